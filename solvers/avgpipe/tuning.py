"""How AvgPipe sets its two degrees: from one profile, by trying all, or by one of two guidelines (sections 5.2, 7.3).

``profile``: one run at many micro-batches and one pipeline, the predictor for all other settings, the best that fits.
The run is the request's pipeline profile; without one, the judge's simulation of such a run (1F1B, measured by
*simulation*: utilisation as the judge has it). ``traverse``: every setting. ``max_num``: the smallest micro-batches,
then as many pipelines as memory allows. ``max_size``: the largest micro-batches, then likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from penstock.solvers.allocation import Allocation, Stage
from penstock.solvers.avgpipe.partition import partition
from penstock.solvers.avgpipe.predictor import Degrees, Measured, Mode, Rank, choose, predict
from penstock.solvers.batches import Batch
from penstock.solvers.memory import static_bytes, weight_bytes
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders
from penstock.solvers.schedules.advance_forward import advance_forward, in_flight
from penstock.solvers.sharing import parallel_pipelines, simulate_sharing
from penstock.solvers.utilisation import utilisation_ppm

Tuning = Literal["profile", "traverse", "max_num", "max_size"]


@dataclass
class Tuner:
    """Settings of pipelines of ``num_stages`` stages; ``batches`` ascend by micro-batches. Counts what it simulates."""

    problem: Problem
    batches: tuple[Batch, ...]
    num_stages: int
    most_pipelines: int
    mode: Mode = "wall"
    simulations: int = 0
    _fits: dict[Allocation, bool] = field(default_factory=dict)

    def settings(self, tuning: Tuning) -> Iterator[Degrees]:
        """The setting that a tuning finds, or all, the most promising first. Always at least one, if none fits too."""
        if tuning == "traverse":
            yield from self._ranked((2**62,) * self.num_stages)
            return
        if tuning == "profile":
            wanted = self._ranked(self._capacity_bytes())
        else:
            batch = self.batches[-1 if tuning == "max_num" else 0]
            wanted = [Degrees(batch.num_micro_batches, n) for n in range(self.most_pipelines, 0, -1)]
        fitting = (degrees for degrees in wanted if self.fits(self.allocation(degrees)))
        yield next(fitting, Degrees(self.batches[-1].num_micro_batches, 1))

    def allocation(self, degrees: Degrees) -> Allocation:
        """Equal pipelines; they recompute where the request wants it, or where nothing else fits and it may be."""
        plain = self._pipelines(degrees, recompute=False)
        if self.problem.recompute == "never":
            return plain
        if self.problem.recompute == "auto" and self.fits(plain):
            return plain
        return self._pipelines(degrees, recompute=True)

    def fits(self, allocation: Allocation) -> bool:
        """Whether memory suffices for 1F1B, which takes least."""
        if allocation not in self._fits:
            orders = advance_forward(self.problem, allocation)
            self._fits[allocation] = self.time_ns(allocation, orders) is not None
        return self._fits[allocation]

    def time_ns(self, allocation: Allocation, orders: Orders) -> int | None:
        """Time per global batch by the judge; None where memory does not suffice."""
        self.simulations += 1
        timeline = simulate_sharing(self.problem, allocation, orders)
        if any(use.memory.total > self.problem.capacity_bytes(d) for d, use in timeline.uses.items()):
            return None
        return timeline.time_per_global_batch_ns

    def measured(self) -> Measured:
        """The request's run, or a simulated one."""
        run = self.problem.pipeline_run
        if run is None:
            return self._simulated()
        stages = self._stages(run.num_micro_batches)
        flying = in_flight(parallel_pipelines(stages, 1, run.num_micro_batches), 0)
        ranks = tuple(
            Rank(
                rank.compute_ns,
                rank.transfer_ns,
                rank.utilisation_ppm,
                rank.model_bytes + rank.optimizer_bytes,
                rank.model_bytes,
                rank.activation_bytes * held * run.num_pipelines,
            )
            for rank, held in zip(run.ranks, flying, strict=True)
        )
        return Measured(run.num_micro_batches, run.num_pipelines, ranks)

    def _simulated(self) -> Measured:
        """Many micro-batches, one pipeline (section 5.2.1)."""
        number = self.batches[-1].num_micro_batches
        allocation = self._pipelines(Degrees(number, 1), recompute=self.problem.recompute == "always")
        self.simulations += 1
        timeline = simulate_sharing(self.problem, allocation, advance_forward(self.problem, allocation))
        ranks = []
        for k, stage in enumerate(allocation.stages):
            sent = timeline.transfers
            own = (sent.stage == k) | ((sent.stage == k - 1) & (sent.direction == 0))
            own |= (sent.stage == k + 1) & (sent.direction == 1)
            use = timeline.uses[stage.devices[0]]
            ranks.append(
                Rank(
                    use.busy_ns,
                    int((sent.end_ns - sent.start_ns)[own].sum()),
                    (utilisation_ppm(self.problem, allocation, k, self.batches[-1].most_rows),),
                    static_bytes(self.problem, stage).total,
                    2 * weight_bytes(self.problem, stage)[1],
                    use.memory.activations + use.memory.buffers + use.memory.workspace,
                )
            )
        return Measured(number, 1, tuple(ranks))

    def _ranked(self, capacity_bytes: tuple[int, ...]) -> list[Degrees]:
        """All settings that fit by the predictor, the fastest by it first."""
        measured = self.measured()
        grid = [
            Degrees(batch.num_micro_batches, pipelines)
            for batch in self.batches
            for pipelines in range(1, self.most_pipelines + 1)
        ]
        flying = {number: self._flying(number) for number in {*(m for m, _n in grid), measured.num_micro_batches}}
        before = flying[measured.num_micro_batches]
        growth = {m: [Fraction(a, b) for a, b in zip(flying[m], before, strict=True)] for m in flying}
        found = ((degrees, predict(measured, degrees, self.mode, growth[degrees[0]])) for degrees in grid)
        return choose(found, capacity_bytes)

    def _flying(self, num_micro_batches: int) -> tuple[int, ...]:
        return tuple(min(self.num_stages - k, num_micro_batches) for k in range(self.num_stages))

    def _capacity_bytes(self) -> tuple[int, ...]:
        devices = [stage.devices[0] for stage in self._stages(self.batches[-1].num_micro_batches)]
        return tuple(self.problem.capacity_bytes(d) - self.problem.devices[d].context_bytes for d in devices)

    def _stages(self, num_micro_batches: int, recompute: bool = False) -> tuple[Stage, ...]:
        batch = min(self.batches, key=lambda batch: abs(batch.num_micro_batches - num_micro_batches))
        return partition(self.problem, batch, self.num_stages, recompute)

    def _pipelines(self, degrees: Degrees, recompute: bool) -> Allocation:
        stages = self._stages(degrees.num_micro_batches, recompute)
        return parallel_pipelines(stages, degrees.num_pipelines, degrees.num_micro_batches)
