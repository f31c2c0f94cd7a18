"""The checkpoints of a run: written and found by all ranks together (``checkpoint`` says where they lie)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.executor.checkpoints import checkpoint as files
from penstock.executor.checkpoints.checkpoint import About, CheckpointFailed
from penstock.executor.checkpoints.checkpoint_state import restore, state_of
from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.work import batches_per_step
from penstock.schemas.errors import NotFound, UnsupportedRequest

SAVE_LIMIT = timedelta(minutes=30)
"""How long ranks wait for the slowest disk."""


class Checkpoints:
    """The checkpoints of a run in one directory; every rank makes one, in the same place of its set-up (collective).

    ``about``: what they are of, but for the step. ``token``: keeps this run's unfinished files apart from others'.
    Raises UnsupportedRequest when rank 0 cannot write there, or another rank does not see what it wrote.
    """

    def __init__(self, directory: str, keep: int, about: About, token: str) -> None:
        self.directory = Path(directory)
        self._keep = keep
        self._about = about
        self._owner, self._token = token, token.replace(os.sep, "-")
        self._group = dist.new_group(timeout=SAVE_LIMIT, backend="gloo")
        self._refuse_unshared()

    def resume(
        self, interpreter: Interpreter, say: Callable[[Mapping[str, Any]], None], *, may_start_anew: bool
    ) -> int:
        """Put the newest intact checkpoint's state in place; the step to go on with. Collective.

        Raises NotFound when there is none and the run may not start from the beginning; InvalidDocument and
        ModelMismatch for one of another run or model.
        """
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            found = [(files.newest(self.directory), files.damage(self.directory))]
        dist.broadcast_object_list(found, src=0)
        checkpoint, damaged = found[0]
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
        step: int = checkpoint.next_step(batches_per_step(interpreter.program))
        say({"kind": "resumed", "step": step, "directory": str(checkpoint.directory)})
        return step

    def save(self, interpreter: Interpreter, step: int) -> Path:
        """Write the state after ``step`` steps; collective. Raises CheckpointFailed on all ranks alike."""
        written = files.partial(self.directory, step, self._token)
        problem = self._write(interpreter, written)
        target = self.directory / f"step-{step}"
        if dist.get_rank() == 0:
            try:
                if problem is None:
                    files.refuse_superseded(self.directory, self._owner)
                    files.publish(
                        written, replace(self._about, step=step, batches=step * batches_per_step(interpreter.program))
                    )
                    files.prune(self.directory, self._keep)
            except OSError as error:
                problem = str(error)
            if problem is not None:
                shutil.rmtree(written, ignore_errors=True)
        problems = [problem]
        dist.broadcast_object_list(problems, src=0, group=self._group)
        if problems[0] is not None:
            raise CheckpointFailed(
                f"the checkpoint of step {step} could not be written to {str(target)!r}: {problems[0]}"
            )
        return target

    def _write(self, interpreter: Interpreter, place: Path) -> str | None:
        """Write this rank's part; what went wrong on whichever rank."""
        writer = FileSystemWriter(place)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            save(state_of(interpreter), storage_writer=writer, planner=planner, process_group=self._group)
        except CheckpointException as error:
            return _first_problem(error)
        return None

    def _refuse_unshared(self) -> None:
        """Have rank 0 prepare the directory and leave a mark that all ranks must see."""
        mark = self.directory / f".seen-by-all.{self._token}"
        problem: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                files.prepare(self.directory)
                files.claim(self.directory, self._owner)
                mark.write_bytes(b"")
            except UnsupportedRequest as error:
                problem = [error]
        dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise problem[0]
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, os.access(mark, os.W_OK))
        if dist.get_rank() == 0:
            mark.unlink()
        if not all(seen):
            raise UnsupportedRequest(
                f"rank {seen.index(False)} does not see the files that rank 0 writes to {str(self.directory)!r}",
                remedy="give a directory of a file system that all hosts share",
            )


def _first_problem(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"
