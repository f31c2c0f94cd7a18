"""The checkpoints of a run, which all ranks write and find together (``checkpoint`` defines their place)."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.executor.checkpoints import checkpoint as files
from penstock.executor.checkpoints.checkpoint import About, Checkpoint, CheckpointFailed
from penstock.executor.checkpoints.checkpoint_state import are_finite, refuse_unwritable, restore, state_of
from penstock.executor.checkpoints.index import index_text
from penstock.executor.checkpoints.outputs import Outputs
from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.rank_programs import batches_per_step
from penstock.schemas.errors import NotFound, UnsupportedRequest

SAVE_LIMIT = timedelta(minutes=30)
"""Time that ranks wait for the slowest disk."""


class _Part(NamedTuple):
    """A rank's part of a checkpoint: SHA-256 of its files, and whether its parameters are finite."""

    digests: dict[str, str]
    is_finite: bool


class Checkpoints:
    """The checkpoints of a run in one directory; every rank creates this at the same point of its set-up (collective).

    ``about``: the contents, except the step. ``token``: keeps this run's unfinished files apart from others'.
    ``outputs``: the places where this run may write.
    Raises UnsupportedRequest when rank 0 cannot write there, or another rank does not see its file.
    """

    def __init__(self, directory: str, keep: int, about: About, token: str, outputs: Outputs = Outputs()) -> None:
        self.directory = Path(outputs.place(directory))
        self._outputs = outputs
        self._keep = keep
        self._about = about
        self._newest: Checkpoint | None = None
        self._newest_finite: Checkpoint | None = None
        self._owner, self._token = token, token.replace(os.sep, "-")
        self._group = dist.new_group(timeout=SAVE_LIMIT, backend="gloo")
        self._refuse_unshared()

    def resume(
        self, interpreter: Interpreter, say: Callable[[Mapping[str, Any]], None], *, may_start_anew: bool
    ) -> int:
        """Restore the newest intact checkpoint's state, and return the step to continue with. Collective.

        Raises NotFound without a checkpoint if the run may not start from the beginning, and InvalidDocument and
        ModelMismatch for a checkpoint of another run or model.
        """
        result: list[Any] = [None]
        if dist.get_rank() == 0:
            result = [files.survey(self.directory)]
        dist.broadcast_object_list(result, src=0, group=self._group)
        checkpoint, damaged = result[0]
        for what in damaged:
            say({"kind": "warning", "step": 0, "text": what})
        if checkpoint is None:
            if not may_start_anew:
                raise NotFound(
                    f"there is no complete checkpoint in {str(self.directory)!r} to resume from"
                    + "".join(f"; {what}" for what in damaged),
                    remedy="give the directory of an earlier run, or resume with auto to start from the beginning",
                )
            return 0
        about = self._about
        files.refuse_other_job(checkpoint, job=about.job, seed=about.seed, global_batch_size=about.global_batch_size)
        restore(interpreter, checkpoint)
        if checkpoint.about.is_finite:
            self._newest_finite = checkpoint
        step: int = checkpoint.next_step(batches_per_step(interpreter.program))
        if checkpoint.directory == self._place(step):
            self._newest = checkpoint
        say({"kind": "resumed", "step": step, "directory": str(checkpoint.directory)})
        return step

    def refuse_unwritable(self, interpreter: Interpreter) -> None:
        """Raise UnsupportedRequest for a model whose state cannot be saved, before it is trained."""
        refuse_unwritable(interpreter)

    def save(self, interpreter: Interpreter, step: int, *, is_finite: bool) -> Checkpoint:
        """Write the state after ``step`` steps, unless this run has written it already; collective.

        ``is_finite``: whether the losses since the last checkpoint were finite. CheckpointFailed on all ranks alike.
        """
        if self._newest is not None and self._newest.about.step == step:
            return self._newest
        written = files.partial(self.directory, step, self._token)
        about = replace(self._about, step=step, batches=step * batches_per_step(interpreter.program))
        problem, parts = self._write(interpreter, written)
        checkpoint: Checkpoint | None = None
        if dist.get_rank() == 0:
            try:
                if problem is None:
                    files.refuse_superseded(self.directory, self._owner)
                    about = replace(about, is_finite=is_finite and all(part.is_finite for part in parts))
                    digests = {name: digest for part in parts for name, digest in part.digests.items()}
                    checkpoint = files.publish(written, about, digests)
            except OSError as error:
                problem = str(error)
            if checkpoint is None:
                shutil.rmtree(written, ignore_errors=True)
            else:
                with suppress(OSError):  # this one is complete; removal is tried again after the next one
                    files.prune(self.directory, self._keep, checkpoint)
        outcome = [checkpoint or problem]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if not isinstance(outcome[0], Checkpoint):
            raise CheckpointFailed(
                f"the checkpoint of step {step} could not be written to {str(self._place(step))!r}: {outcome[0]}"
            )
        self._newest = outcome[0]
        if self._newest.about.is_finite:
            self._newest_finite = self._newest
        return self._newest

    def kept(self) -> str:
        """Describe the checkpoint from which a run whose loss is not finite can be resumed."""
        finite = self._newest_finite
        return (
            "no finite checkpoint of this run" if finite is None else f"the finite checkpoint {str(finite.directory)!r}"
        )

    def _place(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def _write(self, interpreter: Interpreter, place: Path) -> tuple[str | None, list[_Part]]:
        """Write this rank's part. Return a problem of any rank, and on rank 0 the parts of all ranks."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            metadata = save(
                state_of(interpreter),
                storage_writer=FileSystemWriter(place),
                planner=planner,
                process_group=self._group,
            )
        except CheckpointException as error:
            return _first_problem(error), []
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self._part(interpreter, place, metadata), parts, dst=0, group=self._group)
        problems = [part for part in parts or () if isinstance(part, str)]
        return (problems[0], []) if problems else (None, parts or [])

    def _part(self, interpreter: Interpreter, place: Path, metadata: Metadata) -> _Part | str:
        """Return the part that this rank has written, or the text of a problem."""
        rank = dist.get_rank()
        try:
            self._outputs.refuse_moved(str(place))
            if rank == 0:
                files.create(place / files.INDEX, index_text(metadata))
            digests = files.digests_of(place, [one.name for one in place.glob(f"__{rank}_*")])
        except (OSError, UnsupportedRequest) as error:
            return f"rank {rank}: {type(error).__name__}: {error}"
        return _Part(digests, are_finite(interpreter))

    def _refuse_unshared(self) -> None:
        """Let rank 0 prepare the directory and leave a mark that all ranks must see.

        Its random name is also part of the names of unfinished checkpoints, so that other users of the directory cannot
        foresee these names.
        """
        mark = self.directory / f".seen-by-all.{secrets.token_hex(4)}"
        problem: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                files.prepare(self.directory)
                self._outputs.refuse_moved(str(self.directory))
                files.claim(self.directory, self._owner)
                problem = [files.create(mark).name]
            except UnsupportedRequest as error:
                problem = [error]
        dist.broadcast_object_list(problem, src=0)
        if isinstance(problem[0], UnsupportedRequest):
            raise problem[0]
        mark = self.directory / problem[0]
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, os.access(mark, os.W_OK))
        if dist.get_rank() == 0:
            mark.unlink()
        if not all(seen):
            raise UnsupportedRequest(
                f"rank {seen.index(False)} does not see the files that rank 0 writes to {str(self.directory)!r}",
                remedy="give a directory of a file system that all hosts share",
            )
        self._token += mark.suffix


def _first_problem(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"
