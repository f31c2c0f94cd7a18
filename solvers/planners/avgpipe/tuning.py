"""The tuning of AvgPipe's two degrees: from one profile, or by trying all (sections 5.2, 7.3).

From a profile: take one run with many micro-batches and one pipeline, predict all other settings, and keep the best one
that fits. The run is the request's pipeline profile. Without one the profile is by *simulation*: one pipeline (1F1B) is
simulated with each number of micro-batches, because the simulator has their costs, and the predictor changes only the
number of pipelines. The utilisation is the simulator's: a whole processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from penstock.solvers.costs.memory import fits, free_bytes, static_bytes, weight_bytes
from penstock.solvers.costs.utilisation import utilisation_ppm
from penstock.solvers.judge.shared_processor import parallel_pipelines, simulate_sharing
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.avgpipe.partition import Stages
from penstock.solvers.planners.avgpipe.predictor import Degrees, Measured, Mode, Rank, choose, predict
from penstock.solvers.schedules.advance_forward import advance_forward, in_flight

MOST_OPERATIONS = 1_000_000
"""Operations to simulate at most to compare partitions: a second or two."""


def best_partitions(
    problem: Problem, batches: tuple[Batch, ...], candidates: Sequence[Stages]
) -> tuple[list[Stages], int]:
    """Return the best partition for each number of stages, the best of all first, and the number of simulated plans.

    The best partition is the one whose single pipeline is fastest with its best micro-batches, with no forwards in
    advance or with as many as are useful (P_B). Partitions that do not fit come last; ties go to the first. At most
    about ``MOST_OPERATIONS`` operations are simulated.
    """
    if len(candidates) == 1:
        return [candidates[0]], 0
    simulations = operations = 0
    timed: list[tuple[int, int]] = []
    for place, stages in enumerate(candidates):
        if operations > MOST_OPERATIONS:
            break
        operations += 4 * len(stages) * sum(batch.num_micro_batches for batch in batches)
        tuner = Tuner(problem, batches, stages, 1)
        times = [
            tuner.time_ns(allocation, advance_forward(problem, allocation, delta=delta))
            for allocation in tuner.single_pipelines()
            for delta in dict.fromkeys((0, len(stages) - 1))
        ]
        timed.append((min((time for time in times if time is not None), default=2**62), place))
        simulations += tuner.simulations
    best: dict[int, Stages] = {}
    for _time, place in sorted(timed):
        best.setdefault(len(candidates[place]), candidates[place])
    return list(best.values()), simulations


@dataclass
class Tuner:
    """The settings of pipelines of these stages, with a count of simulations.

    ``batches`` ascend by the number of micro-batches.
    """

    problem: Problem
    batches: tuple[Batch, ...]
    stages: Stages
    most_pipelines: int
    mode: Mode = "wall"
    simulations: int = 0
    _fits: dict[Allocation, bool] = field(default_factory=dict)

    def settings(self) -> list[Degrees]:
        """Return every setting, the most promising first."""
        return self._ranked((2**62,) * len(self.stages))

    def predicted(self) -> Degrees:
        """Return the setting that the predictor finds."""
        return self.first_that_fits(self._ranked(self._free_bytes()))

    def first_that_fits(self, wanted: Iterable[Degrees]) -> Degrees:
        """Return the first setting that fits; if none does, one pipeline of the smallest micro-batches."""
        fitting = (degrees for degrees in wanted if self.fits(self.allocation(degrees)))
        return next(fitting, Degrees(self.batches[-1].num_micro_batches, 1))

    def allocation(self, degrees: Degrees) -> Allocation:
        """Build equal pipelines.

        They recompute if the request requires recomputation, or if it allows it and nothing else fits.
        """
        plain = self._pipelines(degrees, recompute=False)
        if self.problem.recompute == "never":
            return plain
        if self.problem.recompute == "auto" and self.fits(plain):
            return plain
        return self._pipelines(degrees, recompute=True)

    def single_pipelines(self) -> Iterator[Allocation]:
        """Return an iterator over one pipeline with each number of micro-batches."""
        return (self.allocation(Degrees(batch.num_micro_batches, 1)) for batch in self.batches)

    def fits(self, allocation: Allocation) -> bool:
        """Return whether memory suffices for 1F1B, the order that takes the least memory."""
        if allocation not in self._fits:
            orders = advance_forward(self.problem, allocation)
            self._fits[allocation] = self.time_ns(allocation, orders) is not None
        return self._fits[allocation]

    def time_ns(self, allocation: Allocation, orders: Orders) -> int | None:
        """Return the simulated time per global batch, or None where memory does not suffice."""
        self.simulations += 1
        timeline = simulate_sharing(self.problem, allocation, orders)
        if not fits(self.problem, timeline):
            return None
        return timeline.time_per_global_batch_ns

    def measured(self, batch: Batch) -> Measured:
        """Return the request's run, or a simulated run with these micro-batches."""
        run = self.problem.pipeline_run
        if run is None:
            return self._simulated(batch)
        flying = self._flying(run.num_micro_batches)
        ranks = tuple(
            Rank(
                rank.compute_ns,
                rank.transfer_ns,
                rank.utilisation_ppm,
                rank.model_bytes + rank.optimizer_bytes,
                rank.model_bytes,
                rank.activation_bytes * in_flight_count * run.num_pipelines,
            )
            for rank, in_flight_count in zip(run.ranks, flying, strict=True)
        )
        return Measured(run.num_micro_batches, run.num_pipelines, ranks)

    def _simulated(self, batch: Batch) -> Measured:
        number = batch.num_micro_batches
        allocation = self.allocation(Degrees(number, 1))
        self.simulations += 1
        timeline = simulate_sharing(self.problem, allocation, advance_forward(self.problem, allocation))
        ranks = []
        for k, stage in enumerate(allocation.stages):
            sent = timeline.transfers
            of_stage = (sent.stage == k) | ((sent.stage == k - 1) & (sent.direction == 0))
            of_stage |= (sent.stage == k + 1) & (sent.direction == 1)
            use = timeline.uses[stage.devices[0]]
            ranks.append(
                Rank(
                    use.busy_ns,
                    int((sent.end_ns - sent.start_ns)[of_stage].sum()),
                    (utilisation_ppm(self.problem, allocation, k, batch.most_rows),),
                    static_bytes(self.problem, stage).total + weight_bytes(self.problem, stage).trainable,
                    weight_bytes(self.problem, stage).trainable,
                    use.memory.activations + use.memory.buffers + use.memory.workspace,
                )
            )
        return Measured(number, 1, tuple(ranks))

    def _ranked(self, capacity_bytes: tuple[int, ...]) -> list[Degrees]:
        """Return all settings that fit according to the predictor, the fastest first."""
        predictions = []
        for batch in self.batches:
            measured, number = self.measured(batch), batch.num_micro_batches
            before = self._flying(measured.num_micro_batches)
            growth = [Fraction(a, b) for a, b in zip(self._flying(number), before, strict=True)]
            for pipelines in range(1, self.most_pipelines + 1):
                degrees = Degrees(number, pipelines)
                predictions.append((degrees, predict(measured, degrees, self.mode, growth)))
        return choose(predictions, capacity_bytes)

    def _flying(self, num_micro_batches: int) -> tuple[int, ...]:
        """Return the number of micro-batches that each stage keeps in flight under 1F1B."""
        return in_flight(parallel_pipelines(self.stages, 1, num_micro_batches), 0)

    def _free_bytes(self) -> tuple[int, ...]:
        return tuple(free_bytes(self.problem, stage.devices[:1]) for stage in self.stages)

    def _pipelines(self, degrees: Degrees, recompute: bool) -> Allocation:
        stages = tuple(stage.whole for stage in self.stages) if recompute else self.stages
        return parallel_pipelines(stages, degrees.num_pipelines, degrees.num_micro_batches)
