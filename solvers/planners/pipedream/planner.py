"""PipeDream: its partition, run without a flush (1F1B, weight stashing) or with one (P_A), as the request allows.

Both papers that compare with it flush: DAPPLE section VI-F and SPP section V run its partition with P_A. So does
``paper``, which partitions by the paper's formula alone; without a flush its replicas take micro-batches in turn.

.. [1] Narayanan et al., PipeDream (SOSP 2019), sections 3.1 to 3.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.tables.device_line import device_order, server_classes
from penstock.solvers.grid.block_partition import thinnest
from penstock.solvers.grid.device_row import DeviceRow
from penstock.solvers.grid.row_partition import RatedAllocation, Settings, placed
from penstock.solvers.grid.slice_costs import Layers
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import Batch, candidates
from penstock.solvers.model.options import PAPER
from penstock.solvers.model.pins import broken_pin, by_layers, keep_pins
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.pipedream.hierarchy import Rules, allocated
from penstock.solvers.planners.proposal import Proposal, in_order, under
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.periodic.eager import (
    LONGEST_TURN,
    eager,
    lacking_bytes,
    noam,
    shortest_depths,
    turn_of,
    usual_depths,
)

OPTIONS = (PAPER,)
AT_ONCE = 2
AFTERWARDS = 16
RULES: tuple[UpdateRule, ...] = ("weight_stashing", "synchronous")


class _Plan(NamedTuple):
    """A proposal with the expected time of a global batch, by the planner's estimate.

    ``always``: simulated whatever its estimate, so that no formula's flushed plan is better than the result.
    """

    expected_ns: int
    proposal: Proposal
    always: bool = False


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield the best plans of each number of micro-batches for each update rule, then the next best plans of all."""
    problem = setting.problem
    search = _Partitions(problem, options)
    rules = [rule for rule in RULES if rule in problem.update_rules]
    left: list[_Plan] = []
    nothing = True
    for batch in search.batches():
        for rule in rules:
            plans = sorted(search.plans(batch, rule), key=lambda plan: plan.expected_ns)
            nothing = nothing and not plans
            met: Counter[bool] = Counter()  # by whether they keep the pins: else devices have to change places
            for plan in plans:
                kept = broken_pin(problem, plan.proposal.allocation) is None
                if met[kept] < AT_ONCE or plan.always:
                    yield plan.proposal
                else:
                    left.append(plan)
                met[kept] += 1
    left.sort(key=lambda plan: plan.expected_ns)
    yield from (plan.proposal for plan in left[:AFTERWARDS])
    if nothing:
        for rule in rules:
            yield from (plan.proposal for plan in search.thinnest(rule))


class _Partitions:
    """The partitions of one request."""

    def __init__(self, problem: Problem, options: Mapping[str, object]) -> None:
        self._problem = problem
        self._paper = PAPER.of(options)
        self._turns = (True,) if self._paper else (True, False)
        order = device_order(problem)
        uneven = len(set(server_classes(problem))) > 1
        orders = () if self._paper else (order, order[::-1]) if uneven else (order,)
        self._rows = [DeviceRow(problem, devices) for devices in orders]
        if problem.pins and orders:
            self._rows += [
                DeviceRow(problem, each, keeping=True) for each in dict.fromkeys((order, by_layers(problem, order)))
            ]
        self._layers = Layers(problem)

    def batches(self) -> list[Batch]:
        """Return the numbers of micro-batches; the one whose work spreads best over the devices comes first."""
        problem = self._problem
        widths = (1, problem.num_devices, *(len(node) for node in problem.nodes()))
        everything = Stage(0, problem.num_layers - 1, (0,))

        def spread(batch: Batch) -> tuple[int, int]:
            costs = stage_costs(problem, everything, batch.most_rows)
            turns = batch.num_micro_batches + problem.num_devices - 1
            return turns * (costs.forward_ns + costs.backward_ns), batch.num_micro_batches

        return sorted(candidates(problem, widths), key=spread)

    def plans(self, batch: Batch, rule: UpdateRule) -> list[_Plan]:
        """Return the best partitions of a step, each once, with their schedules."""
        if rule == "synchronous":
            formulas = {each.allocation for each in self._formulas(batch)}
            rated = self._partitions(batch, rule, False)
            return [self._flushed(each)._replace(always=each.allocation in formulas) for each in rated]
        partitions = [rated.allocation for turns in self._turns for rated in self._partitions(batch, rule, turns)]
        kept = dict.fromkeys(keep_pins(self._problem, allocation) for allocation in partitions)
        return [plan for allocation in kept if allocation is not None for plan in self._stashing(allocation)]

    def thinnest(self, rule: UpdateRule) -> list[_Plan]:
        """Return the plans with the least memory, from which the simulator reports how many bytes are lacking."""
        if rule == "synchronous":
            return [self._flushed(RatedAllocation(allocation, 0)) for allocation in thinnest(self._problem)]
        return [plan for allocation in thinnest(self._problem) for plan in self._stashing(allocation)]

    def _partitions(self, batch: Batch, rule: UpdateRule, turns: bool) -> list[RatedAllocation]:
        formulas = self._formulas(batch)
        if not turns:
            fed = max(1, batch.replicas_fed(self._problem.min_slice))
            formulas = [each for each in formulas if all(stage.replicas <= fed for stage in each.allocation.stages)]
        rated = [each._replace(allocation=each.allocation.in_turn() if turns else each.allocation) for each in formulas]
        for row in self._rows:
            rated += self._placed(row, batch, rule, turns)
        longest = max(LONGEST_TURN, batch.num_micro_batches)
        unique = {each.allocation: each for each in rated if turn_of(each.allocation) <= longest}
        return list(unique.values())

    def _formulas(self, batch: Batch) -> list[RatedAllocation]:
        """Return the hierarchical partitions: by the paper's formula, and by the released optimizer's.

        With ``paper``, the formula may refuse the cluster; otherwise clusters of several kinds get no such partitions.
        """
        if not self._paper and len({device.kind for device in self._problem.devices}) > 1:
            return []
        formulas = (False,) if self._paper else (False, True)
        partitions = [allocated(self._problem, batch, Rules(released)) for released in formulas]
        return [each for each in partitions if each is not None]

    def _placed(self, row: DeviceRow, batch: Batch, rule: UpdateRule, turns: bool) -> list[RatedAllocation]:
        """Return partitions on the row with NOAM's micro-batches in flight.

        Where fewer in flight allow a better partition, return that partition too, and partitions that recompute.
        """
        again = self._problem.recompute == "always"
        tight = Settings(rule, turns, again)
        loose = replace(tight, lenient=True)
        first, second = (placed(self._problem, row, self._layers, batch, each, AT_ONCE) for each in (tight, loose))
        if first and second[0].value_ns >= first[0].value_ns:
            return first
        partitions = first + second
        if self._problem.recompute == "auto":
            for each in (tight, loose):
                partitions += placed(self._problem, row, self._layers, batch, replace(each, recompute=True), 1)
        return partitions

    def _flushed(self, rated: RatedAllocation) -> _Plan:
        allocation = rated.allocation
        rows = -(-self._problem.global_batch_size // allocation.num_micro_batches)
        costs = [stage_costs(self._problem, stage, rows) for stage in allocation.stages]
        through = sum(c.forward_ns + c.backward_ns for c in costs)
        proposal = under(self._problem, allocation, ("early-backward",), "A" if self._paper else "best")
        return _Plan((allocation.num_micro_batches - 1) * rated.value_ns + through, proposal)

    def _stashing(self, allocation: Allocation) -> list[_Plan]:
        """Return the plans with the eager pattern.

        Where memory does not hold NOAM's micro-batches, these stages also recompute.
        """
        problem, rule = self._problem, RULES[0]
        wanted = noam(allocation)
        variants = [allocation]
        if problem.recompute == "auto":
            short = {s for s, depth in enumerate(wanted) if lacking_bytes(problem, allocation, rule, s, depth) > 0}
            variants.append(allocation.recomputing(short))
        elif problem.recompute == "always":
            variants = [allocation.recomputing(range(len(wanted)))]
        plans = []
        for variant in dict.fromkeys(variants):
            for depth in shortest_depths(problem, variant, rule, usual_depths(problem, variant, rule))[1]:
                pattern = eager(problem, variant, update_rule=rule, depth=depth)
                proposal = in_order(problem, variant, pattern, rule)
                plans.append(_Plan(pattern.period_ns * variant.num_micro_batches, proposal))
        return plans
