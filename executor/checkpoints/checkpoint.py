"""Where checkpoints lie, and which of them a run goes on from. Loads no torch: agents and the service call it too.

::

    <directory>/step-30/              after 30 steps; it appears whole, by a rename
        .metadata, __0_0.distcp, …    tensors by name (torch.distributed.checkpoint)
        complete                      written last: what the checkpoint is of, and the size of every other file
    <directory>/.step-40.<token>/     being written; removed by the next run that writes here
    <directory>/.owner                token of the run, or its generation, that may publish here

A checkpoint whose marker is missing or whose files are not as long as the marker says is damaged: an older one is
taken instead.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.schemas.errors import InvalidDocument, RunFailed, UnsupportedRequest

MARKER = "complete"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,14})")
_PARTIAL = ".step-*.*"
_OWNER = ".owner"


class CheckpointFailed(RunFailed):
    """A checkpoint could not be written; the ones before it are as they were."""


@dataclass(frozen=True, slots=True)
class About:
    """What a checkpoint is of. ``seed``: with the step, the state of all randomness.

    ``step``: steps that are done; ``batches``: global batches, several per step under elastic averaging.
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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    directory: Path
    about: About

    def next_step(self, batches_per_step: int = 1) -> int:
        """The first step of a run with ``batches_per_step`` global batches per step that has none of those trained."""
        return -(-self.about.batches // batches_per_step)


def newest(directory: str | Path) -> Checkpoint | None:
    """The checkpoint with most batches whose files are all there; None where there is none."""
    intact, _ = _found(Path(directory))
    return intact[0] if intact else None


def damage(directory: str | Path) -> list[str]:
    """What is wrong with checkpoints that are not intact; to be reported on resuming."""
    return _found(Path(directory))[1]


def prepare(directory: str | Path) -> None:
    """Make the directory, try to write in it, and remove what an interrupted save left.

    Raises UnsupportedRequest where that does not go.
    """
    place = Path(directory)
    try:
        place.mkdir(parents=True, exist_ok=True)
        trial = place / f".trial-{os.getpid()}"
        trial.write_bytes(b"")
        trial.unlink()
        for left in place.glob(_PARTIAL):
            shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise UnsupportedRequest(
            f"checkpoints cannot be written to {str(place)!r}: {error.strerror or error}",
            remedy="give a directory that this user may write to",
        ) from None


def claim(directory: str | Path, token: str) -> None:
    """Let only ``token`` publish here from now on: ranks of an older generation may still live.

    Raises UnsupportedRequest when a later generation of the same run (``run/generation``) has claimed it already.
    """
    run, _, generation = token.rpartition("/")
    other, _, later = _owner(directory).rpartition("/")
    if run and run == other and int(later) > int(generation):
        raise UnsupportedRequest(
            f"generation {later} of run {run!r} writes checkpoints to {str(directory)!r}; this is generation "
            f"{generation}, which has been replaced"
        )
    written = Path(directory) / f"{_OWNER}.{os.getpid()}"
    written.write_text(token, encoding="utf-8")
    written.replace(Path(directory) / _OWNER)


def refuse_superseded(directory: str | Path, token: str) -> None:
    """Raise OSError when another token has claimed the directory."""
    owner = _owner(directory)
    if owner != token:
        raise OSError(f"{owner or 'no run'!r} owns the checkpoints here, not {token!r}")


def _owner(directory: str | Path) -> str:
    try:
        return (Path(directory) / _OWNER).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def partial(directory: str | Path, step: int, token: str) -> Path:
    """The directory that the checkpoint after ``step`` steps is written to first; ``token`` keeps two runs apart."""
    return Path(directory) / f".step-{step}.{token}"


def publish(written: Path, about: About) -> Checkpoint:
    """Mark what was written as complete, and give it its name; one of the same step is replaced."""
    sizes = {one.name: one.stat().st_size for one in sorted(written.iterdir())}
    with (written / MARKER).open("w", encoding="utf-8") as file:
        json.dump({"about": asdict(about), "files": sizes}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    target = written.parent / f"step-{about.step}"
    if target.exists():
        replaced = partial(written.parent, about.step, "replaced")
        target.rename(replaced)
        shutil.rmtree(replaced, ignore_errors=True)
    written.rename(target)
    _sync(written.parent)
    return Checkpoint(target, about)


def prune(directory: str | Path, keep: int) -> None:
    """Remove all but the ``keep`` newest complete checkpoints."""
    for one in _found(Path(directory))[0][keep:]:
        shutil.rmtree(one.directory, ignore_errors=True)


def read(directory: Path) -> Checkpoint:
    """The checkpoint in a ``step-<n>`` directory. Raises InvalidDocument naming what it lacks."""
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        about, sizes = About(**marker["about"]), dict(marker["files"])
    except FileNotFoundError:
        raise InvalidDocument(f"checkpoint {str(directory)!r} was not finished: it has no file {MARKER!r}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidDocument(f"checkpoint {str(directory)!r}: its file {MARKER!r} is damaged: {error}") from None
    for name, size in sizes.items():
        has = _size(directory / name)
        if has is None:
            raise InvalidDocument(f"checkpoint {str(directory)!r} lacks its file {name!r}")
        if has != size:
            raise InvalidDocument(
                f"checkpoint {str(directory)!r}: file {name!r} is damaged: {has:,} of {size:,} bytes are present"
            )
    return Checkpoint(directory, about)


def _found(directory: Path) -> tuple[list[Checkpoint], list[str]]:
    """Intact checkpoints, newest first; and what is wrong with the others."""
    intact, damaged = [], []
    with suppress(FileNotFoundError, NotADirectoryError):
        for place in sorted(directory.iterdir()):
            if _STEP.fullmatch(place.name):
                try:
                    intact.append(read(place))
                except InvalidDocument as error:
                    damaged.append(str(error))
    return sorted(intact, key=lambda one: (one.about.batches, one.about.step), reverse=True), damaged


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sync(directory: Path) -> None:
    """Make a rename last through a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_other_job(checkpoint: Checkpoint, **wanted: Any) -> None:
    """Raise InvalidDocument naming what differs between the checkpoint and this run (job, seed, global_batch_size)."""
    for name, value in wanted.items():
        has = getattr(checkpoint.about, name)
        if has != value:
            raise InvalidDocument(
                f"checkpoint {str(checkpoint.directory)!r} is of a run with {name} {has!r}, this one has {value!r}",
                remedy=f"run with {name} {has!r}, or give another directory",
            )
