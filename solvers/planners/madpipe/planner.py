"""MadPipe: memory-aware allocations for periodic pipelines with two weight versions (sections 4.1 to 4.3).

Every number of micro-batches and every uniform width (the replicas of each stage, the paper's perspective) makes
a separate chain. On it the planner computes the exact contiguous optimum under 1F1B*, and allocations with a special
processor at several target periods. Their patterns are placed from the inside out, and then by the periodic ILP of
section 4.3 where that may be shorter than the best so far. (1F1B* is the ILP's optimum for contiguous allocations.) The
result is the best of all plans by the simulator, hence never worse than the contiguous optimum. ``paper`` has Algorithm
1's allocations only.

.. [1] Beaumont, Eyraud-Dubois, Shilova, MadPipe: Memory Aware Dynamic Programming Algorithm for Pipelined Model
   Parallelism (2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.stage import update_ns
from penstock.solvers.grid.block_partition import thinnest
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch, candidates
from penstock.solvers.model.options import PAPER, Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.planners.madpipe.chain import Chain, Group
from penstock.solvers.planners.madpipe.contiguous import PartsAtPeriod, contiguous_optimum, ladder, least_memory
from penstock.solvers.planners.madpipe.labels import LOOSER, portfolio, special_optimum
from penstock.solvers.planners.madpipe.paper import first_phase
from penstock.solvers.planners.proposal import Proposal, in_order
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.periodic import inside_out, one_f_one_b_star
from penstock.solvers.schedules.periodic.ilp import solve
from penstock.solvers.schedules.support.stage_line import ALL_BUFFERS, StageLine

WIDTH = Option("width", 0, "replicas of every stage; 0 tries each number that divides the cluster", low=0)
OPTIONS = (PAPER, WIDTH)
PROMISING = 4
ENOUGH_LABELS = 60_000
"""Limits on the search for allocations with a special processor.

``PROMISING``: chains searched; ``ENOUGH_LABELS``: labels after which no further chain is searched.
"""
MAX_JUDGED = 24
STEPS = 6
MOST_SOLVED = 24
MOST_STAGES = 24
"""Limits on the periodic ILPs that are solved: their number, and the stages of each."""
WORTH_SEARCHING = 4
"""A chain is searched unless even evenly shared work takes 1/4 longer than the best plan so far."""
ROUNDED = "there were too many labels to keep them exact: they were rounded up, and shorter periods may be missed"


class Setup(NamedTuple):
    """One way to cut the batch and the cluster: a chain on processors of ``width`` devices."""

    batch: Batch
    groups: tuple[Group, ...]
    chain: Chain

    def time_ns(self, period_ns: int) -> int:
        """Return the time of a global batch at this period."""
        return self.batch.num_micro_batches * period_ns


class Plan(NamedTuple):
    """An allocation with its pattern, or None where it has no pattern, and the expected time of a global batch."""

    expected_ns: int
    allocation: Allocation
    pattern: Pattern | None
    note: str = ""


@dataclass
class SecondPhase:
    """The periodic ILPs of a run: which of them are worth solving, and how many may still be solved.

    ``best_ns``: the time of a global batch under the best plan that certainly fits, by the period of its pattern.
    """

    problem: Problem
    left: int = MOST_SOLVED
    best_ns: int = NEVER_NS
    any_solved: bool = False

    def note(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """Yield the same plans and record the best time."""
        for plan in plans:
            self.best_ns = min(self.best_ns, plan.expected_ns)
            yield plan

    def solved(self, setup: Setup, allocations: Iterable[PartsAtPeriod], halves: int = ALL_BUFFERS) -> Iterator[Plan]:
        """Yield shorter patterns than so far, the least loaded allocations first.

        The first pattern may be of any length. Every allocation that was tried is among them, as ``max_plans`` counts
        them all. Of contiguous allocations only that first one is solved: no pattern is shorter than 1F1B*.
        """
        plans = [allocated(setup, each) for each in allocations]
        lines = [(StageLine.of(self.problem, allocation, halves), allocation) for allocation in plans]
        for line, allocation in sorted(lines, key=lambda pair: pair[0].load_bound_ns()):
            rest_ns = self.best_ns - _updates_ns(self.problem, allocation)
            below_ns = -(-rest_ns // setup.batch.num_micro_batches) if self.any_solved else None
            needless = below_ns is not None and (line.contiguous or line.load_bound_ns() >= below_ns)
            if needless or line.size > MOST_STAGES or not self.left:
                continue
            self.left -= 1
            answer = solve(line, below_ns=below_ns, seed=self.problem.seed)
            if answer.pattern is None:
                yield Plan(NEVER_NS, allocation, None)
            else:
                self.any_solved = True
                plan = _plan(self.problem, setup, allocation, answer.pattern)
                yield from self.note([plan]) if halves == ALL_BUFFERS else [plan]


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield contiguous plans of all chains, the best first.

    Then come special plans of the promising chains, then longer periods. Raises ``UnsupportedRequest`` for several
    kinds of devices, and for a width that does not divide their number or that no micro-batch feeds.
    """
    problem = setting.problem
    refuse_kinds(problem)
    setups = _setups(problem, WIDTH.of(options))
    plans = (_paper_plans if PAPER.of(options) else _plans)(problem, setups, SecondPhase(problem))
    any_plan = False
    for plan in plans:
        any_plan = any_plan or plan.pattern is not None
        yield _proposal(problem, plan)
    if not any_plan:
        yield from (_proposal(problem, plan) for plan in _thinnest(problem, WIDTH.of(options)))


def refuse_kinds(problem: Problem) -> None:
    """Refuse clusters of several kinds of devices: MadPipe's processors are alike."""
    kinds = sorted({device.kind for device in problem.devices})
    if len(kinds) > 1:
        raise UnsupportedRequest(
            f"planner 'madpipe' needs processors of one kind; the cluster has {', '.join(kinds)}",
            remedy="a cluster of one kind, or planner 'pipedream' (weight_stashing), which takes several",
        )


def widths(problem: Problem, requested: int) -> list[int]:
    """Return the numbers of replicas of every stage to try.

    Raises ``UnsupportedRequest`` where stages would not be replicated alike.
    """
    divisors = [w for w in range(1, problem.num_devices + 1) if problem.num_devices % w == 0]
    if requested == 0:
        return divisors
    if requested not in divisors:
        nearest = min(divisors, key=lambda w: (abs(w - requested), w))
        raise UnsupportedRequest(
            f"planner 'madpipe' replicates all stages alike; {problem.num_devices} devices cannot form groups "
            f"of {requested}",
            remedy=f"width {nearest}, or one of {', '.join(map(str, divisors))}",
        )
    return [requested]


def groups_of(problem: Problem, width: int) -> tuple[Group, ...]:
    """Return processors of neighbouring devices, inside a node first."""
    order = [device for node in problem.nodes() for device in node]
    return tuple(tuple(order[i : i + width]) for i in range(0, len(order), width))


def _setups(problem: Problem, requested: int) -> list[Setup]:
    """Return every chain that gives each replica ``min_slice`` rows, by the time of its work shared evenly."""
    tried = widths(problem, requested)
    setups = [
        Setup(batch, groups, Chain.of(problem, batch, groups))
        for width in tried
        for groups in [groups_of(problem, width)]
        for batch in candidates(problem, tried)
        if batch.replicas_fed(problem.min_slice) >= width
    ]
    if not setups and requested:
        raise UnsupportedRequest(
            f"planner 'madpipe': no micro-batch gives {requested} replicas {problem.min_slice} samples each",
            remedy=f"micro_batch_sizes [{requested * problem.min_slice}], or width 0",
        )
    return sorted(setups, key=lambda setup: (setup.time_ns(setup.chain.least_period_ns()), len(setup.groups)))


def _plans(problem: Problem, setups: list[Setup], second: SecondPhase) -> Iterator[Plan]:
    pairs = _contiguous(setups)
    optima = [_plans_of(problem, setup, [optimum])[0] for setup, optimum in pairs if optimum is not None]
    yield from second.note(_by_promise(optima))
    yield from _by_promise([_outwards(problem, plan) for plan in optima[:PROMISING]])
    promising = [pair for pair in pairs if pair[1] is not None][:PROMISING]
    for setup, contiguous in promising[:1]:
        yield from second.solved(setup, [] if contiguous is None else [contiguous])
    promising += [pair for pair in pairs if pair[1] is None][:PROMISING]
    spent = 0
    for setup, contiguous in promising:
        if spent > ENOUGH_LABELS:
            break
        searched = portfolio(setup.chain, None if contiguous is None else contiguous.period_ns)
        spent += searched.labels
        note = "" if searched.exact else ROUNDED
        plans = second.note(_by_promise(_plans_of(problem, setup, list(searched.allocations))))
        both = chain(plans, second.solved(setup, searched.allocations))
        yield from (plan._replace(note=note) for plan in both)
    for setup, contiguous in promising:
        for halves, allocations in _with_fewer_buffers(problem, setup, contiguous):
            yield from _by_promise(_plans_of(problem, setup, allocations, halves))
            yield from second.solved(setup, allocations, halves)
    for setup, contiguous in promising:
        if contiguous is not None:
            yield from _by_promise(_plans_of(problem, setup, ladder(setup.chain, contiguous.period_ns, STEPS)))


def _contiguous(setups: list[Setup]) -> list[tuple[Setup, PartsAtPeriod | None]]:
    """Return promising chains, each with its contiguous optimum, the best first; chains without one come last."""
    best: int | None = None
    pairs: list[tuple[Setup, PartsAtPeriod | None]] = []
    for setup in setups:
        least = setup.time_ns(setup.chain.least_period_ns())
        if best is not None and least > best + best // WORTH_SEARCHING:
            break
        optimum = contiguous_optimum(setup.chain)
        pairs.append((setup, optimum))
        if optimum is not None:
            reached = setup.time_ns(optimum.period_ns)
            best = reached if best is None else min(best, reached)
    return sorted(pairs, key=lambda pair: 2**62 if pair[1] is None else pair[0].time_ns(pair[1].period_ns))


def _with_fewer_buffers(
    problem: Problem, setup: Setup, contiguous: PartsAtPeriod | None
) -> Iterator[tuple[int, list[PartsAtPeriod]]]:
    """Yield allocations that may fit because not all their buffers exist at once, with shorter periods than so far.

    Only the simulator can say whether they fit. The best allocation so far is among them, at the shortest period that
    fewer buffers let it have.
    """
    for halves in range(ALL_BUFFERS) if problem.memory.count_buffers else ():
        roomier = Chain.of(problem, setup.batch, setup.groups, halves)
        best = contiguous_optimum(roomier)
        if best is None or (contiguous is not None and best.period_ns >= contiguous.period_ns):
            continue
        longest = None if contiguous is None else contiguous.period_ns
        allocations = [best, *ladder(roomier, best.period_ns, STEPS, longest)]
        if contiguous is None and (thin := least_memory(roomier)) is not None:
            allocations.append(thin)
        if contiguous is not None:
            allocations.append(contiguous._replace(period_ns=best.period_ns))
        allocations += special_optimum(roomier, below_ns=best.period_ns, extra=LOOSER).allocations
        yield halves, allocations


def _paper_plans(problem: Problem, setups: list[Setup], second: SecondPhase) -> Iterator[Plan]:
    for setup in setups[:PROMISING]:
        allocations = first_phase(setup.chain)
        yield from second.note(_by_promise(_plans_of(problem, setup, allocations)))
        yield from second.solved(setup, allocations)


def _by_promise(plans: list[Plan]) -> list[Plan]:
    return sorted(plans, key=lambda plan: plan.expected_ns)[:MAX_JUDGED]


def _plans_of(
    problem: Problem, setup: Setup, allocations: list[PartsAtPeriod], halves: int = ALL_BUFFERS
) -> list[Plan]:
    """Return the allocations with their shortest patterns, memory counted as ``buffer_bytes`` says."""
    plans = []
    for each in allocations:
        allocation = allocated(setup, each)
        line = StageLine.of(problem, allocation, halves)
        if line.contiguous:
            period = one_f_one_b_star.minimal_period_ns(line)
            wanted = min(each.period_ns, line.alone_ns())
            pattern = None if period is None else one_f_one_b_star.pattern(line, max(period, wanted))
        else:
            pattern = inside_out.smallest(line)
        if pattern is not None:
            plans.append(_plan(problem, setup, allocation, pattern))
    return plans


def _plan(problem: Problem, setup: Setup, allocation: Allocation, pattern: Pattern) -> Plan:
    return Plan(setup.time_ns(pattern.period_ns) + _updates_ns(problem, allocation), allocation, pattern)


def _updates_ns(problem: Problem, allocation: Allocation) -> int:
    return max(update_ns(problem, stage) for stage in allocation.stages)


def _outwards(problem: Problem, plan: Plan) -> Plan:
    """Return the same contiguous allocation under the inside-out pattern."""
    assert plan.pattern is not None
    pattern = inside_out.at_period(StageLine.of(problem, plan.allocation), plan.pattern.period_ns)
    return plan if pattern is None else plan._replace(pattern=pattern)


def allocated(setup: Setup, solution: PartsAtPeriod) -> Allocation:
    """Return stages on processors in the order of the chain; the special processor keeps its first place."""
    cuts, again = setup.chain.cuts, setup.chain.again
    stages: list[Stage] = []
    special: Group | None = None
    free = iter(setup.groups)
    for part in solution.parts:
        first, last = cuts[part.first], cuts[part.after] - 1
        group = special if part.special and special is not None else next(free)
        if part.special:
            special = group
        stages.append(Stage(first, last, group, recompute=((first, last),) if again[part.variant] else ()))
    return single_pipeline(tuple(stages), setup.batch.num_micro_batches)


def _proposal(problem: Problem, plan: Plan) -> Proposal:
    if plan.pattern is None:
        return Proposal(plan.allocation, ())
    return in_order(problem, plan.allocation, plan.pattern, "double_buffered", plan.note)


def _thinnest(problem: Problem, width: int) -> Iterator[Plan]:
    """Yield the plans with the least memory, by 1F1B*, so that the simulator reports what is lacking."""
    for allocation in thinnest(problem, max(1, width)):
        plan = allocation if problem.recompute == "never" else allocation.recomputing(range(len(allocation.stages)))
        line = StageLine.of(problem, plan)
        yield Plan(0, plan, one_f_one_b_star.pattern(line, line.alone_ns()))
