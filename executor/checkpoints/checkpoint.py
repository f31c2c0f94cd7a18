"""The files of checkpoints, and the choice of one to resume from. Loads no torch: agents and the service use it too.

::

    <directory>/step-30/              after 30 steps; it appears whole, by a rename
        .metadata, __0_0.distcp, …    tensors by name (torch.distributed.checkpoint)
        entries.json                  the place of each entry (``index``)
        complete                      written last: the marker, with length and SHA-256 of every other file
    <directory>/.step-40.<token>/     being written; removed by the next run that writes here
    <directory>/.step-30.replaced/    being replaced by another one of step 30; counts until step-30 exists
    <directory>/.owner                token of the run, or its generation, that may publish here

A checkpoint without a marker, or with files that differ from its marker, is damaged: an older one is used instead.
Reading executes nothing, and follows no symbolic link below the directory, because others may write there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from penstock.schemas.errors import InvalidDocument, RunFailed, UnsupportedRequest

MARKER = "complete"
INDEX = "entries.json"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,14})")
_PARTIAL = ".step-*.*"
_REPLACED = "replaced"
_OWNER = ".owner"
_HASHERS = 8
"""Files that are hashed at a time, at most one per processor; hashing releases Python's lock."""


class CheckpointFailed(RunFailed):
    """A checkpoint could not be written; the earlier ones are unchanged."""


@dataclass(frozen=True, slots=True)
class About:
    """The contents of a checkpoint. ``seed``: with the step, it determines all random states.

    ``step``: steps that are done. ``batches``: global batches, several per step under elastic averaging.
    ``is_finite``: whether all parameters are finite, and all losses since the previous checkpoint.
    """

    step: int
    batches: int
    job: str
    seed: int
    update_rule: str
    pipelines: int
    global_batch_size: int
    plan_hash: str | None
    torch_version: str
    is_finite: bool = True


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. ``sizes``, ``digests``: the length and SHA-256 of each file but the marker, by name."""

    directory: Path
    about: About
    sizes: Mapping[str, int] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def next_step(self, batches_per_step: int = 1) -> int:
        """Return the first step whose batches are all new, in a run with this number of global batches per step."""
        return -(-self.about.batches // batches_per_step)


class Survey(NamedTuple):
    """The checkpoints in a directory: the newest intact one, and descriptions of the damage of other ones."""

    newest: Checkpoint | None
    damaged: list[str]


def survey(directory: str | Path) -> Survey:
    """Find the checkpoint with the most batches whose files are unchanged, by computing their digests again."""
    complete, damaged = _checkpoints_in(Path(directory))
    for one in complete:
        if (problem := _altered(one)) is None:
            return Survey(one, damaged)
        damaged.append(problem)
    return Survey(None, damaged)


def newest(directory: str | Path) -> Checkpoint | None:
    """Return the newest intact checkpoint (``survey``), or None."""
    return survey(directory).newest


def prepare(directory: str | Path) -> None:
    """Create the directory, try to write in it, and remove what an interrupted save left.

    Raises UnsupportedRequest where that fails.
    """
    place = Path(directory)
    try:
        place.mkdir(parents=True, exist_ok=True)
        create(place / f".trial-{secrets.token_hex(4)}").unlink()
        for left in place.glob(_PARTIAL):
            _put_back(left)
            _remove(left)
    except OSError as error:
        raise UnsupportedRequest(
            f"checkpoints cannot be written to {str(place)!r}: {error.strerror or error}",
            remedy="give a directory that this user may write to",
        ) from None


def claim(directory: str | Path, token: str) -> None:
    """Let only ``token`` publish here from now on: ranks of an older generation may still be alive.

    Raises UnsupportedRequest when a later generation of the same run (``run/generation``) has claimed it already.
    """
    run, _, generation = token.rpartition("/")
    other, _, later = _owner(directory).rpartition("/")
    if run and run == other and later.isdecimal() and int(later) > int(generation):
        raise UnsupportedRequest(
            f"generation {later} of run {run!r} writes checkpoints to {str(directory)!r}; this is generation "
            f"{generation}, which has been replaced"
        )
    written = create(Path(directory) / f"{_OWNER}.{secrets.token_hex(4)}", token)
    written.replace(Path(directory) / _OWNER)


def refuse_superseded(directory: str | Path, token: str) -> None:
    """Raise OSError when another token has claimed the directory."""
    owner = _owner(directory)
    if owner != token:
        raise OSError(f"{owner or 'no run'!r} owns the checkpoints here, not {token!r}")


def _owner(directory: str | Path) -> str:
    file = Path(directory) / _OWNER
    return file.read_text(encoding="utf-8", errors="replace") if _size(file) is not None else ""


def create(file: Path, text: str = "") -> Path:
    """Write a new file. Raises OSError where the name is taken, also by a symbolic link, which is not followed."""
    with file.open("x", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    return file


def partial(directory: str | Path, step: int, token: str) -> Path:
    """Return the directory in which the checkpoint of a step is first written; ``token`` keeps two runs apart."""
    return Path(directory) / f".step-{step}.{token}"


def publish(written: Path, about: About, digests: Mapping[str, str] | None = None) -> Checkpoint:
    """Mark a directory as complete, and give it its name; a checkpoint of the same step is replaced.

    ``digests``: the SHA-256 of files for which it is computed already. Wherever this is interrupted, either the old or
    the new checkpoint counts.
    """
    sizes = {one.name: one.stat().st_size for one in sorted(written.iterdir())}
    all_digests = digests_of(written, sizes.keys() - (digests or {}).keys()) | dict(digests or {})
    checkpoint = Checkpoint(written.parent / f"step-{about.step}", about, sizes, all_digests)
    files = {name: {"bytes": size, "sha256": all_digests[name]} for name, size in sizes.items()}
    marker = {"about": asdict(about), "files": files}
    create(written / MARKER, json.dumps(marker | {"sha256": _own_digest(marker)}, indent=1))
    _sync(written)
    replaced = partial(written.parent, about.step, _REPLACED)
    if checkpoint.directory.exists():
        _remove(replaced)
        checkpoint.directory.rename(replaced)
    written.rename(checkpoint.directory)
    _sync(written.parent)
    _remove(replaced)
    return checkpoint


def prune(directory: str | Path, keep: int, written: Checkpoint | None = None) -> None:
    """Remove complete checkpoints, except the ``keep`` newest, the newest finite one, and the one just written."""
    complete = _checkpoints_in(Path(directory))[0]
    spared = [*complete[:keep], *[one for one in complete if one.about.is_finite][:1]]
    for one in complete:
        if one not in spared and (written is None or one.directory != written.directory):
            away = partial(directory, one.about.step, "removed")
            _remove(away)
            one.directory.rename(away)
            _remove(away)


def digests_of(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of files of a directory. Raises OSError for one that cannot be read."""
    listed = sorted(names)
    with ThreadPoolExecutor(min(_HASHERS, os.cpu_count() or 1)) as pool:
        return dict(zip(listed, pool.map(lambda name: _digest(directory / name), listed), strict=True))


def read(directory: Path) -> Checkpoint:
    """Read the checkpoint in a ``step-<n>`` directory, by names and lengths. InvalidDocument for what it lacks."""
    where = f"checkpoint {str(directory)!r}"
    if directory.is_symlink():
        raise InvalidDocument(f"{where} is a symbolic link, which is not followed")
    if _size(directory / MARKER) is None:
        raise InvalidDocument(f"{where} was not finished: it has no file {MARKER!r}")
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        if marker.pop("sha256") != _own_digest(marker):
            raise ValueError("its contents do not match its SHA-256")
        about = _about(marker["about"])
        sizes = {name: int(one["bytes"]) for name, one in marker["files"].items()}
        digests = {name: str(one["sha256"]) for name, one in marker["files"].items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise InvalidDocument(f"{where}: its file {MARKER!r} is damaged: {error}") from None
    for name, size in sizes.items():
        if Path(name).name != name:
            raise InvalidDocument(f"{where}: its file {MARKER!r} names {name!r}, which is not in this directory")
        has = _size(directory / name)
        if has is None:
            raise InvalidDocument(f"{where} lacks its file {name!r}")
        if has != size:
            raise InvalidDocument(f"{where}: file {name!r} is damaged: {has:,} of {size:,} bytes are present")
    return Checkpoint(directory, about, sizes, digests)


def _own_digest(marker: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()


def _about(data: Mapping[str, Any]) -> About:
    """Return the contents of a marker. Raises TypeError or ValueError for a value that no marker has."""
    about = About(**data)
    for one in fields(About):
        value, wanted = getattr(about, one.name), _TYPES[one.type]
        if type(value) not in wanted:
            raise TypeError(f"{one.name} is {value!r:.80}")
        if type(value) is int and value < 0:
            raise ValueError(f"{one.name} is {value}")
    if about.pipelines < 1:
        raise ValueError(f"pipelines is {about.pipelines}")
    return about


_TYPES: Mapping[Any, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "str | None": (str, type(None)),
    "bool": (bool,),
}
"""The types of values by the annotations of ``About``."""


def _checkpoints_in(directory: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints with all their bytes, newest first, and descriptions of the damage of other ones."""
    complete, damaged = [], []
    with suppress(FileNotFoundError, NotADirectoryError):
        for place in sorted(directory.iterdir()):
            if _STEP.fullmatch(place.name) or _stands_in(place):
                try:
                    complete.append(read(place))
                except InvalidDocument as error:
                    damaged.append(str(error))
    return sorted(complete, key=lambda one: (one.about.batches, one.about.step), reverse=True), damaged


def _altered(checkpoint: Checkpoint) -> str | None:
    """Describe the damage of a checkpoint whose files have changed; None where no file has."""
    where = f"checkpoint {str(checkpoint.directory)!r}"
    try:
        digests = digests_of(checkpoint.directory, checkpoint.digests)
    except OSError as error:
        return f"{where} cannot be read: {error}"
    altered = [name for name, digest in digests.items() if digest != checkpoint.digests[name]]
    if not altered:
        return None
    return f"{where} is damaged: its SHA-256 says that {', '.join(map(repr, altered))} changed after it was written"


def _digest(file: Path) -> str:
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _stands_in(place: Path) -> bool:
    """Return whether a checkpoint was renamed for replacement while its replacement never got the name."""
    step, _, kind = place.name.removeprefix(".").partition(".")
    return kind == _REPLACED and bool(_STEP.fullmatch(step)) and not (place.parent / step).exists()


def _put_back(place: Path) -> None:
    """Restore the name of a complete checkpoint whose replacement was interrupted."""
    with suppress(InvalidDocument):
        if _stands_in(place):
            read(place)
            place.rename(place.parent / place.name.split(".")[1])


def _remove(place: Path) -> None:
    """Remove a file or directory where possible; of a symbolic link only the link."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _size(path: Path) -> int | None:
    """Return the length of a regular file; None for others, such as missing files, symbolic links and pipes."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _sync(directory: Path) -> None:
    """Make a rename permanent, even through a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_other_job(checkpoint: Checkpoint, **wanted: Any) -> None:
    """Raise InvalidDocument with the first difference between the checkpoint and this run (job, seed, batch size)."""
    for name, value in wanted.items():
        has = getattr(checkpoint.about, name)
        if has != value:
            raise InvalidDocument(
                f"checkpoint {str(checkpoint.directory)!r} is of a run with {name} {has!r}, but this run has {value!r}",
                remedy=f"run with {name} {has!r}, or give another directory",
            )
