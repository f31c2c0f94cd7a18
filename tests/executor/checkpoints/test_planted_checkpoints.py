"""Checkpoints made by someone who may write to the directory: nothing in them is executed, each is refused by name."""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from real_checkpoint import put, run, sign, sign_marker

from penstock.executor.checkpoints.checkpoint import INDEX, MARKER, Checkpoint, survey
from penstock.executor.checkpoints.checkpoint_state import _Reader
from penstock.executor.checkpoints.values import from_text, to_text
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest

TENSOR = "model/block.0.up.weight"
TEXT = "options/block.0.up.weight"
EXTENSION = 0x7EADBEEF


class Evil:
    """An object whose pickle makes a directory when it is read."""

    def __init__(self, proof: str) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (self.proof,)


class EvilState(Evil):
    """An object of a class that torch allows, whose state is evil."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"evil": Evil(self.proof)}


def by_text(opcodes: str) -> Callable[[str], bytes]:
    return lambda proof: opcodes.format(proof=proof).encode()


PICKLES: dict[str, Callable[[str], bytes]] = {
    **{f"protocol-{n}": lambda proof, n=n: pickle.dumps(Evil(proof), n) for n in (0, 1, 2, 4, 5)},
    "inst": by_text("(S'{proof}'\niposix\nmkdir\n."),
    "obj": by_text("(cposix\nmkdir\nS'{proof}'\no."),
    "build": by_text("ccollections\nOrderedDict\n(tR}}S'a'\ncposix\nmkdir\n(S'{proof}'\ntRsb."),
    "extension": lambda proof: b"\x80\x02\x84" + EXTENSION.to_bytes(4, "little") + f"(S'{proof}'\ntR.".encode(),
    "persistent-id": by_text("cposix\nmkdir\n(S'{proof}'\ntRQ."),
    "eval": by_text('cbuiltins\neval\n(S\'__import__("os").mkdir("{proof}")\'\ntR.'),
    "state-of-an-allowed-class": lambda proof: pickle.dumps(EvilState(proof), 2),
}


def torch_file(one: Any, **how: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(one, stream, **how)
    return stream.getvalue()


def zipped(**files: bytes) -> bytes:
    """Build an archive that torch takes for one of its files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as file:
        for name, data in ({"version": b"3\n", "byteorder": b"little"} | files).items():
            file.writestr(f"archive/{name.replace('__', '/').replace('_pkl', '.pkl')}", data)
    return stream.getvalue()


def script(proof: str) -> bytes:
    """Build a TorchScript archive, which torch.load passes to torch.jit.load."""
    evil = pickle.dumps(Evil(proof), 2)
    return zipped(data_pkl=evil, constants_pkl=evil, code____torch____py=b"import os")


FILES: dict[str, Callable[[str], bytes]] = {
    "torch-zip": lambda proof: torch_file(Evil(proof)),
    "torch-legacy": lambda proof: torch_file(Evil(proof), _use_new_zipfile_serialization=False),
    "torch-tensor-beside": lambda proof: torch_file({"weight": torch.zeros(2), "more": Evil(proof)}),
    "torch-nested": lambda proof: zipped(data_pkl=PICKLES["protocol-2"](proof), data__0=torch_file(Evil(proof))),
    "torchscript": script,
    "other-type": lambda proof: torch_file({"weight": torch.zeros(2)}),
    **{f"zipped-{name}": lambda proof, make=make: zipped(data_pkl=make(proof)) for name, make in PICKLES.items()},
}


@pytest.fixture(scope="module")
def real(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("real")
    assert [one["kind"] for one in run(pool, place, 1)] == ["done", "done"]
    return place


@pytest.fixture
def step(real: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be changed."""
    return Path(shutil.copytree(real / "step-1", tmp_path / "saved" / "step-1"))


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The directory that is there once planted code was executed."""
    return tmp_path / "proof"


def entries_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return every entry of a checkpoint, read as ranks read it."""
    reader = _Reader(checkpoint)
    for name, one in reader._has.items():
        if hasattr(one, "size"):
            reader.into(name, torch.empty(one.size, dtype=one.properties.dtype))
        else:
            reader.if_there(name)
    reader.read()
    return reader.entries


def refusal(directory: Path) -> str:
    """Return the sentence by which the only checkpoint of a directory is refused."""
    result = survey(directory)
    if result.newest is None:
        (sentence,) = result.damaged
        return sentence
    with pytest.raises(InvalidDocument) as refused:
        entries_of(result.newest)
    return str(refused.value)


def test_a_checkpoint_as_it_was_written_is_read(step: Path) -> None:
    sign(step)
    result = survey(step.parent)
    assert result.newest is not None
    entries = entries_of(result.newest)
    assert entries[TENSOR].abs().sum() > 0
    assert entries[TEXT]["optimizer"] == "SGD"
    assert entries[TEXT]["options"]["momentum"] == 0.9


@pytest.mark.parametrize("entry", [TENSOR, TEXT])
@pytest.mark.parametrize("kind", [*PICKLES, *FILES])
def test_no_entry_is_executed(step: Path, proof: Path, entry: str, kind: str) -> None:
    copyreg.add_extension("posix", "mkdir", EXTENSION)
    try:
        put(step, entry, (PICKLES | FILES)[kind](str(proof)))
        sentence = refusal(step.parent)
    finally:
        copyreg.remove_extension("posix", "mkdir", EXTENSION)
    assert not proof.exists(), "code of the checkpoint was executed"
    assert "step-1' cannot be read: " in sentence
    assert "\n" not in sentence.partition("\n  try: ")[0]


def test_the_planted_pickles_would_be_executed(proof: Path) -> None:
    """Read as they are by Python, each makes its directory: otherwise the tests above would show nothing."""
    copyreg.add_extension("posix", "mkdir", EXTENSION)
    try:
        for kind, make in PICKLES.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pickle, "Unpickler", pickle._Unpickler)  # type: ignore[attr-defined]
                reader = pickle.Unpickler(io.BytesIO(make(str(proof))))
                patch.setattr(reader, "persistent_load", lambda one: one, raising=False)
                reader.load()
            assert proof.exists(), kind
            proof.rmdir()
    finally:
        copyreg.remove_extension("posix", "mkdir", EXTENSION)


def test_torchs_own_names_are_not_read(step: Path, proof: Path) -> None:
    """They are a pickle, for other programs. Even with malicious code in it a run continues from the numbers."""
    (step / ".metadata").write_bytes(pickle.dumps(Evil(str(proof))))
    sign(step)
    result = survey(step.parent)
    assert result.newest is not None
    assert TENSOR in entries_of(result.newest)
    (step / INDEX).unlink()
    sign(step)
    assert f"{INDEX}'" in refusal(step.parent)
    assert not proof.exists()


def of_index(**changes: Any) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        entries = json.loads((step / INDEX).read_text())
        entry = entries[TENSOR]
        entry.update({name: value for name, value in changes.items() if name in ("dtype", "shape", "chunks")})
        if "chunks" not in changes:
            entry["chunks"][0].update({name: value for name, value in changes.items() if name not in entry})
        (step / INDEX).write_text(json.dumps(entries))
        sign(step)

    return change


def of_marker(**about: Any) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        marker = json.loads((step / MARKER).read_text())
        marker["about"].update(about)
        sign_marker(step, marker)

    return change


def names_a_file(name: str) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        marker = json.loads((step / MARKER).read_text())
        marker["files"][name] = {"bytes": 1, "sha256": ""}
        sign_marker(step, marker)

    return change


def linked(step: Path) -> None:
    shutil.move(step / "__0_0.distcp", step.parent.parent / "elsewhere")
    (step / "__0_0.distcp").symlink_to(step.parent.parent / "elsewhere")


def linked_whole(step: Path) -> None:
    shutil.move(step, step.parent.parent / "elsewhere")
    step.symlink_to(step.parent.parent / "elsewhere")


def piped(step: Path) -> None:
    (step / MARKER).unlink()
    os.mkfifo(step / MARKER)


def text_of(value: str) -> Callable[[Path], None]:
    return lambda step: put(step, TEXT, torch_file(value))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param(of_index(dtype="nn"), "'nn'", id="no-type-of-numbers"),
        pytest.param(of_index(dtype="__import__('os')"), "is not valid", id="code-as-a-type"),
        pytest.param(of_index(shape=[-1, 8]), "not a count", id="negative"),
        pytest.param(of_index(shape=[1 << 40, 1 << 20]), "numbers", id="more-than-there-is"),
        pytest.param(of_index(sizes=[1 << 31, 1 << 31]), "a part ends at", id="beyond-the-whole"),
        pytest.param(of_index(file="../../../etc/passwd"), "is not a file of this checkpoint", id="another-file"),
        pytest.param(of_index(file=MARKER), "is not a file of this checkpoint", id="the-marker"),
        pytest.param(of_index(at=[0, 1 << 50]), "ends at byte", id="beyond-the-end"),
        pytest.param(of_index(at=[0]), "is not valid", id="half-a-place"),
        pytest.param(of_index(chunks="__0_0.distcp"), "is not valid", id="no-list"),
        pytest.param(of_marker(step="1"), "step is '1'", id="text-for-a-number"),
        pytest.param(of_marker(pipelines=0), "pipelines is 0", id="no-pipeline"),
        pytest.param(of_marker(batches=True), "batches is True", id="flag-for-a-number"),
        pytest.param(of_marker(__class__="os"), "__class__", id="another-field"),
        pytest.param(names_a_file("../../secret"), "not in this directory", id="a-file-elsewhere"),
        pytest.param(lambda step: (step / MARKER).write_text("[" * 100_000), "is damaged", id="deep"),
        pytest.param(lambda step: (step / MARKER).write_text("[]"), "is damaged", id="list"),
        pytest.param(linked, "lacks its file", id="file-by-link"),
        pytest.param(linked_whole, "is a symbolic link", id="directory-by-link"),
        pytest.param(piped, "has no file 'complete'", id="pipe"),
        pytest.param(text_of("not JSON"), "not a value that Penstock writes", id="no-json"),
        pytest.param(text_of('{"penstock": ["eval", "1"]}'), "not a value that Penstock writes", id="unknown-tag"),
        pytest.param(text_of('{"penstock": ["dtype", "nn.Module"]}'), "not a value", id="no-dtype"),
    ],
)
def test_other_words_than_those_written_are_refused(step: Path, harm: Callable[[Path], None], words: str) -> None:
    harm(step)
    assert words in refusal(step.parent)


@pytest.mark.parametrize(
    ("entry", "data"),
    [
        pytest.param(TENSOR, lambda proof: torch_file(Evil(proof)), id="tensor"),
        pytest.param(TEXT, lambda proof: torch_file(Evil(proof)), id="text"),
        pytest.param("schedule", lambda proof: torch_file('{"step": 1}'), id="method-of-a-schedule"),
    ],
)
def test_ranks_execute_nothing_of_a_planted_checkpoint(
    pool: RankPool, step: Path, proof: Path, entry: str, data: Callable[[str], bytes]
) -> None:
    put(step, entry, data(str(proof)))
    results = run(pool, step.parent, 2, resume=True)
    assert {one["kind"] for one in results} == {"failed"}
    assert any("is not part of its state" in one["reason"] or "cannot be read" in one["reason"] for one in results), (
        results
    )
    assert not proof.exists()


@pytest.mark.parametrize(
    "value",
    [
        {"lr": 0.1, "betas": (0.9, 0.99), "nesterov": False, "none": None},
        {3: "by number", 5: [1, (2,)]},
        {"penstock": ["a", "b"]},
        [{1, 2}, torch.float32, float("inf")],
    ],
)
def test_values_come_back(value: Any) -> None:
    assert from_text(to_text("options", value)) == value


def test_tensors_among_options_come_back() -> None:
    back = from_text(to_text("options", {"lr": torch.tensor(0.25, dtype=torch.float64)}))
    assert (back["lr"].item(), back["lr"].dtype) == (0.25, torch.float64)


def test_what_is_no_data_is_not_written() -> None:
    with pytest.raises(
        UnsupportedRequest, match=r"'schedule' has a value of type .*Evil, which a checkpoint cannot store"
    ):
        to_text("schedule", {"gamma": Evil("x")})
