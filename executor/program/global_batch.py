"""A global batch on its way through a rank: its samples, its random states, its loss.

Several are under way at once where nothing is flushed; each of these objects then serves one global batch after
another. The loss and its terms are added up over all ranks as soon as a rank has nothing more to add, so that the true
number of terms is known before the optimizer's step without waiting for a flush.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.executor.gpu import moved
from penstock.executor.run.chain import Chain
from penstock.executor.stage.stage_module import step_seed
from penstock.executor.transport import sum_over
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest

if TYPE_CHECKING:
    from penstock.executor.divided.context import Context

Rows = tuple[int, int]
Read = Callable[[int, range], tuple[dict[str, Tensor], Any]]
"""Gives inputs and targets of some rows of a numbered batch."""


@dataclass(slots=True)
class StepResult:
    """A step's mean loss, the same on all ranks, and the terms that it is the mean of.

    ``losses``: the mean loss of each global batch of the step, by pipeline; several under elastic averaging.
    """

    loss: float
    count: int
    losses: tuple[float, ...] = ()


class Source:
    """Where global batches come from: the job's, on this rank's device. ``lane`` of ``lanes`` trains every lanes-th.

    ``context``: how this rank shares sequences with others.

    ``counting``: those that are open and whose totals have not set off, in order. All ranks add up one global batch
    after the other, though each is done with its own part at another time: a group's collectives have one order.
    ``unreported``: those whose result has not been reported, in order.
    """

    def __init__(
        self,
        chain: Chain,
        device: torch.device,
        seed: int,
        lane: int = 0,
        lanes: int = 1,
        context: Context | None = None,
    ) -> None:
        self.chain = chain
        self.context = context
        self.device = device
        self.seed = seed
        self.lane = lane
        self.lanes = lanes
        self.counting: deque[GlobalBatch] = deque()
        self.unreported: deque[GlobalBatch] = deque()

    def set_off(self) -> None:
        """Start the totals of what this rank has nothing more to add to."""
        while self.counting and self.counting[0].is_complete:
            self.counting.popleft().start_totals()

    def number(self, step: int) -> int:
        """The job's number of the global batch that this rank's pipeline trains in a step."""
        return step * self.lanes + self.lane

    def read(self, number: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        """Inputs and targets of some rows of global batch ``number``."""
        return self._own(self.chain.job.batch(number, rows))

    def read_evaluation(self, number: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        """The same of evaluation batch ``number``. Raises UnsupportedRequest for a job without evaluation."""
        evaluation: Any = getattr(self.chain.job, "evaluation", None)
        if evaluation is None:
            raise UnsupportedRequest(
                f"job {self.chain.job.name!r} cannot be evaluated: it has no evaluation(number, rows)",
                remedy="add it, and num_evaluation_batches; see the job protocol in penstock.executor.run.job",
            )
        return self._own(evaluation(number, rows))

    def _own(self, batch: tuple[dict[str, Tensor], Any]) -> tuple[dict[str, Tensor], Any]:
        """What this rank has of it, on its device."""
        if self.context is not None:
            batch = self.context.cut(self.chain.job, *batch)
        return batch if self.device.type == "cpu" else moved(batch, self.device)


class GlobalBatch:
    """``key``: the batch's part of every random state. ``num_losses``: forwards of the last stage on this rank.

    ``uses``: how many of this rank's forwards read the same rows, which are then asked for once.
    """

    def __init__(self, source: Source, num_losses: int, uses: Mapping[Rows, int]) -> None:
        self.source = source
        self.num_losses = num_losses
        self.uses = uses
        self.held: dict[Rows, list[Any]] = {}
        self.step = self.number = -1
        self.key = 0
        self.true_count = 0.0
        self._read: Read = source.read
        self._losses: list[Tensor] = []
        self._count = self._missing = 0
        self._totals: tuple[Tensor, Any] | None = None
        self._result: StepResult | None = None

    def open(self, step: int) -> None:
        """Start the global batch of ``step``."""
        self.step, self.number = step, self.source.number(step)
        self._begin(self.source.read, self.num_losses)
        self.source.counting.append(self)
        self.source.unreported.append(self)
        self.source.set_off()

    def open_evaluation(self, number: int) -> None:
        """Start evaluation batch ``number``, whose loss is asked for with ``take_losses``."""
        self.step, self.number = -1, number
        self._begin(self.source.read_evaluation, -1)

    def _begin(self, read: Read, missing: int) -> None:
        self.key = step_seed(self.source.seed, self.number)
        self.held.clear()
        self._read = read
        self._losses = []
        self._count = 0
        self._totals = None
        self._result = None
        self._missing = missing

    def take(self, rows: range) -> tuple[dict[str, Tensor], Any]:
        """Inputs and targets of some rows."""
        key = rows.start, rows.stop
        entry = self.held.pop(key, None)
        if entry is None:
            entry = [*self._read(self.number, rows), self.uses.get(key, 1)]
        entry[2] -= 1
        if entry[2] > 0:
            self.held[key] = entry
        return entry[0], entry[1]

    def add_loss(self, loss: Tensor, count: int) -> None:
        """Add a micro-batch's loss; after this rank's last one the totals set off."""
        self._losses.append(loss)
        self._count += count
        self._missing -= 1
        if self._missing == 0:
            self.source.set_off()

    @property
    def is_complete(self) -> bool:
        """Whether this rank has added all its losses."""
        return self._missing == 0

    def take_losses(self) -> tuple[float, int]:
        """The sum of the losses that this rank has added, and their terms."""
        total, count = float(sum(loss.double() for loss in self._losses)), self._count
        self._losses, self._count = [], 0
        return total, count

    def start_totals(self) -> None:
        """Start adding up over all ranks, pipeline by pipeline where each has batches of its own."""
        lane, lanes = self.source.lane, self.source.lanes
        values = [0.0] * (2 * lanes)
        values[2 * lane], values[2 * lane + 1] = self.take_losses()
        totals = torch.tensor(values, dtype=torch.float64)
        self._totals = totals, sum_over(totals)

    def finish(self) -> StepResult:
        """The loss over all ranks; waits for it. Raises InvalidDocument when it has no terms."""
        if self._result is None:
            assert self._totals is not None, "a forward of the last stage is missing"
            totals, work = self._totals
            work.wait()
            values = totals.tolist()
            losses, counts = values[::2], values[1::2]
            if min(counts) <= 0:
                raise InvalidDocument(
                    f"the loss of step {self.step} has {min(counts):.0f} terms; its mean is undefined"
                )
            means = tuple(loss / count for loss, count in zip(losses, counts, strict=True))
            self.true_count = counts[self.source.lane]
            self._result = StepResult(sum(losses) / sum(counts), round(sum(counts)), means)
        return self._result
