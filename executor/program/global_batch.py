"""A global batch on a rank: its samples, its random states, its loss.

Several are under way at once where nothing is flushed; each of these objects then serves one global batch after
another. The terms of the loss are summed over all ranks as soon as a rank has nothing more to add, so that their true
number is available before the optimizer's step without waiting for a flush. The loss itself is summed with them where
all ranks have it on the host. On GPUs it is read when the batch is reported, so that no step waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.executor.run.chain import Chain
from penstock.executor.runtime.interface import Event, Runtime
from penstock.executor.stage.stage_module import step_seed
from penstock.executor.transport import sum_over
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest

if TYPE_CHECKING:
    from penstock.executor.divided.context import Context

Rows = tuple[int, int]
Read = Callable[[int, range], tuple[dict[str, Tensor], Any]]
"""A function that returns inputs and targets of some rows of a numbered batch."""


@dataclass(slots=True)
class StepResult:
    """A step's mean loss, the same on all ranks, and the number of terms of the mean.

    ``losses``: the mean loss of each global batch of the step, by pipeline; several under elastic averaging.
    """

    loss: float
    count: int
    losses: tuple[float, ...] = ()


class Source:
    """The source of global batches: the job, on this rank's device. Pipeline ``lane`` trains every ``lanes``-th batch.

    ``context``: the way in which this rank shares sequences with other ranks.

    ``counting``: the open batches whose totals have not started, in order. All ranks sum one global batch after the
    other, though each completes its part at another time, because a group's collectives have one order. ``unreported``:
    the batches whose result has not been reported, in order. ``loss_group``: the group that sums losses on GPUs; None
    where every rank has its loss on the host.
    """

    def __init__(
        self,
        chain: Chain,
        runtime: Runtime,
        seed: int,
        lane: int = 0,
        lanes: int = 1,
        context: Context | None = None,
    ) -> None:
        self.chain = chain
        self.context = context
        self.runtime = runtime
        self.seed = seed
        self.lane = lane
        self.lanes = lanes
        self.counting: deque[GlobalBatch] = deque()
        self.unreported: deque[GlobalBatch] = deque()
        self.loss_group: Any = None

    def agree(self) -> None:
        """Agree with all ranks on how losses are summed; collective, once.

        Losses on GPUs are summed in a separate group: on some ranks they come later than terms of later batches.
        """
        on_gpus = torch.tensor([int(self.runtime.gpu is not None)])
        dist.all_reduce(on_gpus, op=dist.ReduceOp.MAX)
        if on_gpus.item():
            self.loss_group = dist.new_group(backend="gloo")

    def set_off(self) -> None:
        """Start the totals of batches to which this rank has nothing more to add."""
        while self.counting and self.counting[0].is_complete:
            self.counting.popleft().start_totals()

    def number(self, step: int) -> int:
        """Return the job's number of the global batch that this rank's pipeline trains in a step."""
        return step * self.lanes + self.lane

    def read(self, number: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        """Return inputs and targets of some rows of global batch ``number``."""
        return self._local(self.chain.job.batch(number, rows))

    def read_evaluation(self, number: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        """Return inputs and targets of evaluation batch ``number``. UnsupportedRequest for a job without evaluation."""
        evaluation: Any = getattr(self.chain.job, "evaluation", None)
        if evaluation is None:
            raise UnsupportedRequest(
                f"job {self.chain.job.name!r} cannot be evaluated: it has no evaluation(number, rows)",
                remedy="add evaluation and num_evaluation_batches to the job; see the job protocol in "
                "penstock.executor.run.job",
            )
        return self._local(evaluation(number, rows))

    def _local(self, batch: tuple[dict[str, Tensor], Any]) -> tuple[dict[str, Tensor], Any]:
        """Return this rank's part of a batch, on its device."""
        if self.context is not None:
            batch = self.context.cut(self.chain.job, *batch)
        local: tuple[dict[str, Tensor], Any] = self.runtime.moved(batch)
        return local


class GlobalBatch:
    """A global batch of a rank. ``key``: its part of every random state.

    ``num_losses``: forwards of the last stage on this rank. ``uses``: how many of this rank's forwards read the same
    rows, which are then read once.
    """

    def __init__(self, source: Source, num_losses: int, uses: Mapping[Rows, int]) -> None:
        self.source = source
        self.num_losses = num_losses
        self.uses = uses
        self.row_cache: dict[Rows, list[Any]] = {}
        self.step = self.number = -1
        self.key = 0
        self._read: Read = source.read
        self._losses: list[Tensor] = []
        self._count = self._missing = 0
        self._totals: tuple[Tensor, Any] | None = None
        self._fetched: tuple[Tensor, Event] | None = None
        self._result: StepResult | None = None

    def open(self, step: int) -> None:
        """Start the global batch of ``step``."""
        self.step, self.number = step, self.source.number(step)
        self._begin(self.source.read, self.num_losses)
        self.source.counting.append(self)
        self.source.unreported.append(self)
        self.source.set_off()

    def open_evaluation(self, number: int) -> None:
        """Start evaluation batch ``number``, whose loss ``take_losses`` returns."""
        self.step, self.number = -1, number
        self._begin(self.source.read_evaluation, -1)

    def open_rehearsal(self) -> None:
        """Start the first global batch of the job, whose loss is not reported."""
        self.step, self.number = -1, self.source.number(0)
        self._begin(self.source.read, -1)

    def _begin(self, read: Read, missing: int) -> None:
        self.key = step_seed(self.source.seed, self.number)
        self.row_cache.clear()
        self._read = read
        self._losses = []
        self._count = 0
        self._totals = self._fetched = None
        self._result = None
        self._missing = missing

    def take(self, rows: range) -> tuple[dict[str, Tensor], Any]:
        """Return inputs and targets of some rows."""
        key = rows.start, rows.stop
        entry = self.row_cache.pop(key, None)
        if entry is None:
            entry = [*self._read(self.number, rows), self.uses.get(key, 1)]
        entry[2] -= 1
        if entry[2] > 0:
            self.row_cache[key] = entry
        return entry[0], entry[1]

    def add_loss(self, loss: Tensor, count: int) -> None:
        """Add a micro-batch's loss; after this rank's last loss the totals start."""
        self._losses.append(loss)
        self._count += count
        self._missing -= 1
        if self._missing == 0:
            self.source.set_off()

    @property
    def is_complete(self) -> bool:
        """True if this rank has added all its losses."""
        return self._missing == 0

    def take_losses(self) -> tuple[float, int]:
        """Return the sum of the losses that this rank has added, and their terms."""
        total, count = float(sum(loss.double() for loss in self._losses)), self._count
        self._losses, self._count = [], 0
        return total, count

    def start_totals(self) -> None:
        """Start to sum over all ranks, by pipeline where each has separate batches."""
        lane, lanes = self.source.lane, self.source.lanes
        values = [0.0] * (2 * lanes)
        if self.source.loss_group is None:
            values[2 * lane], values[2 * lane + 1] = self.take_losses()
        else:
            values[2 * lane + 1] = self._count
            self._fetched = self._fetch_losses()
        totals = torch.tensor(values, dtype=torch.float64)
        self._totals = totals, sum_over(totals)

    def _fetch_losses(self) -> tuple[Tensor, Event]:
        """Start to copy the sum of this rank's losses to the host."""
        zero = torch.zeros((), dtype=torch.float64, device=self.source.runtime.device)
        total = sum((loss.double() for loss in self._losses), zero)
        self._losses = []
        host = self.source.runtime.host_buffer(total)
        return host, self.source.runtime.download(total, host)

    @property
    def true_count(self) -> float:
        """The terms of the loss of this rank's pipeline; waits for all ranks. InvalidDocument if there are no terms."""
        count: float = self._counted()[2 * self.source.lane + 1]
        return count

    def _counted(self) -> list[float]:
        """Return loss (unless it is on GPUs) and terms of each pipeline."""
        assert self._totals is not None, "a forward of the last stage is missing"
        totals, work = self._totals
        if work is not None:
            work.wait()
            self._totals = totals, None
        values: list[float] = totals.tolist()
        if min(values[1::2]) <= 0:
            raise InvalidDocument(
                f"the loss of step {self.step} has {min(values[1::2]):.0f} terms; its mean is undefined"
            )
        return values

    def finish(self) -> StepResult:
        """Return the loss over all ranks; waits for it. Raises InvalidDocument when it has no terms."""
        if self._result is None:
            values = self._counted()
            losses, counts = values[::2], values[1::2]
            if self._fetched is not None:
                losses = self._fetched_losses()
            means = tuple(loss / count for loss, count in zip(losses, counts, strict=True))
            self._result = StepResult(sum(losses) / sum(counts), round(sum(counts)), means)
        return self._result

    def _fetched_losses(self) -> list[float]:
        """Return each pipeline's loss over all ranks, when the devices have it. Ranks call it batch after batch."""
        assert self._fetched is not None
        host, arrived = self._fetched
        arrived.synchronize()
        totals = torch.zeros(self.source.lanes, dtype=torch.float64)
        totals[self.source.lane] = host
        dist.all_reduce(totals, group=self.source.loss_group)
        losses: list[float] = totals.tolist()
        return losses
