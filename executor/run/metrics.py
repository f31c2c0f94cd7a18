"""The metrics that rank 0 writes while a run trains: JSON lines, and event files for TensorBoard.

A line of a step has ``step``, ``loss``, ``time_ns``, ``samples_per_s``, ``learning_rate`` and, where they exist,
``grad_norm`` (before clipping) and ``loss_scale``. A line of an evaluation has ``step`` (steps done) and
``evaluation``. Numbers that are not finite are the texts "NaN", "Infinity" and "-Infinity". In event files both kinds
have the number of steps done. A run that is resumed appends: of equal steps the last line counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from penstock.executor.checkpoints.outputs import Outputs
from penstock.executor.run.rank_programs import batches_per_step
from penstock.schemas.errors import MissingExtra, UnsupportedRequest
from penstock.schemas.quantities import spell

if TYPE_CHECKING:
    from penstock.executor.program.interpreter import Interpreter

_FLUSH_S = 5


class Metrics:
    """A writer of both kinds of files; either may be left out. ``outputs``: the places where they may be.

    Raises UnsupportedRequest for a place that cannot be written, MissingExtra without TensorBoard.
    """

    def __init__(
        self,
        path: str | None,
        tensorboard_directory: str | None,
        first_step: int,
        interpreter: Interpreter,
        outputs: Outputs,
    ) -> None:
        path, tensorboard_directory = (
            None if one is None else outputs.place(one) for one in (path, tensorboard_directory)
        )
        self._interpreter = interpreter
        self._learning_rate = _learning_rate(interpreter)
        self._lines = None if path is None else _opened(path)
        self._board = None if tensorboard_directory is None else _board(tensorboard_directory, first_step)
        for one in filter(None, (path, tensorboard_directory)):
            outputs.refuse_moved(one)

    def step(self, step: int, loss: float, time_ns: int) -> None:
        """Write a step that was trained, with the learning rate with which it began."""
        program = self._interpreter.program
        samples = program.global_batch_size * batches_per_step(program)
        values = {
            "loss": loss,
            "time_ns": time_ns,
            "samples_per_s": samples * 1e9 / time_ns if time_ns else None,
            "learning_rate": self._learning_rate,
        }
        self._learning_rate = _learning_rate(self._interpreter)
        norm = self._interpreter.actions.norm
        if norm is not None:
            values["grad_norm"] = norm.norm
            values["loss_scale"] = None if norm.scale is None else norm.scale.value
        self._write(step, step + 1, {name: value for name, value in values.items() if value is not None})

    def evaluation(self, step: int, loss: float) -> None:
        """Write the mean loss over the evaluation batches after ``step`` steps."""
        self._write(step, step, {"evaluation": loss})

    def close(self) -> None:
        """Write the rest, and close the files."""
        if self._lines is not None:
            self._lines.close()
        if self._board is not None:
            self._board.close()

    def _write(self, step: int, done: int, values: dict[str, float]) -> None:
        if self._lines is not None:
            try:
                spelled = {name: spell(value) for name, value in values.items()}
                self._lines.write(json.dumps({"step": step, **spelled}) + "\n")
                self._lines.flush()
            except OSError as error:
                sys.stderr.write(f"metrics are no longer written: {error}\n")
                self._lines = None
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, done)


def _learning_rate(interpreter: Interpreter) -> float | None:
    """Return the learning rate of the first group of this rank's first optimizer, or None."""
    for stage in interpreter.stages.values():
        if stage.optimizer is not None:
            return float(stage.optimizer.param_groups[0]["lr"])
    return None


def _opened(path: str) -> TextIO:
    try:
        return Path(path).open("a", encoding="utf-8")
    except OSError as error:
        raise UnsupportedRequest(
            f"metrics cannot be written to {path!r}: {error.strerror or error}", remedy="give another file"
        ) from None


def _board(directory: str, first_step: int) -> Any:
    """Create a writer that hides what an interrupted run wrote of ``first_step`` and later steps."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingExtra(
            "TensorBoard's event files need the package tensorboard", remedy="pip install 'penstock[tensorboard]'"
        ) from None
    try:
        return SummaryWriter(directory, purge_step=first_step + 1 if first_step else None, flush_secs=_FLUSH_S)
    except OSError as error:
        raise UnsupportedRequest(
            f"event files cannot be written to {directory!r}: {error.strerror or error}",
            remedy="give another directory",
        ) from None
