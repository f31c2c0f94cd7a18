"""The simulator of docs/theory/judge.md in plain Python: valid rows (2.4), steps (5), plans without a flush (6).

Written from the page alone. Sections 2.3 and 3 are in ``page_network`` and ``page_costs``, 4 and 5 in ``page_clock``,
7 in ``page_sharing``, 8 and 9 in ``page_memory``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from math import lcm

from page_clock import GRADIENT, Clock, Lane, Run
from page_costs import BACKWARD, FORWARD, STEP, UNREACHABLE, B, Costs, F, I, Invalid, Operation, R, W

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Pattern


def simulate_page(
    problem: Problem,
    allocation: Allocation,
    schedule: Orders | Pattern,
    overlap: bool | None = None,
    rule: str = "synchronous",
) -> Run:
    """Run a flushed plan, or a plan without a flush; raise Invalid as sections 2.4, 4 and 1 say."""
    if isinstance(schedule, Pattern):
        return _long_run(problem, allocation, schedule, overlap, rule)
    costs = Costs(problem, allocation, overlap)
    lanes = [Lane(row.devices, _tuples(row.operations)) for row in schedule.rows]
    run = Run(costs, rule, [costs.M] * len(costs.stages), lanes, tied=costs.ties(rule))
    check_rows(run)
    refuse_unreachable(run)
    clock = Clock(run, costs.M)
    clock.run_all()
    finish_flushed(run)
    return run


def _tuples(operations: object) -> list[Operation]:
    return [(int(kind), int(s), int(m)) for kind, s, m in operations]  # type: ignore[attr-defined]


def check_rows(run: Run) -> None:
    """Check that rows are valid (section 2.4)."""
    for k, lane in enumerate(run.lanes):
        places = {operation: place for place, operation in enumerate(lane.row)}
        if len(places) != len(lane.row):
            raise Invalid("an operation stands twice")
        wanted = 0
        for s in range(len(run.costs.stages)):
            first, last = run.costs.ranges[run.costs.pipeline[s]]
            batches = [m for m in range(first, last + 1) if k in run.runners(s, m)]
            again = [(R, s, m) in places for m in batches]
            for m in batches:
                kinds = [kind for kind in range(5) if (kind, s, m) in places and kind != R]
                if kinds not in ([F, B], [F, I, W]):
                    raise Invalid("operations are missing")
                order = [F, *([R] if any(again) else []), *kinds[1:]]
                at = [places.get((kind, s, m), -1) for kind in order]
                if -1 in at or at != sorted(at):
                    raise Invalid("operations are out of order")
                wanted += len(order)
        if wanted != len(lane.row):
            raise Invalid("there are operations too many")


def refuse_unreachable(run: Run) -> None:
    """Refuse durations of UNREACHABLE or more (section 1)."""
    costs = run.costs
    durations = [bucket.duration for group in costs.groups for bucket in group.buckets]
    durations += [tie.duration for tie in run.tied]
    for s in range(len(costs.stages)):
        for m in {m for lane in run.lanes for _kind, stage, m in lane.row if stage == s}:
            moved = [costs.transfer(s, direction, costs.rows(m)) for direction in (FORWARD, BACKWARD)]
            durations += [each.duration for each in moved if each is not None]
    if any(duration >= UNREACHABLE for duration in durations):
        raise Invalid("not connected")


# Section 5: the steps of a flushed plan.


def finish_flushed(run: Run) -> None:
    """Add the steps after a flushed plan's rows and buckets, and the plan's time."""
    for k, lane in enumerate(run.lanes):
        last = {operation[1]: place for place, operation in enumerate(lane.row) if operation[0] in (B, W)}
        stages = [s for s in range(len(run.costs.stages)) if k in run.lanes_of(s)]
        free = max((run.operations[k, operation][1] for operation in lane.row), default=0)
        summed = [run.ties[tie.number, 0][1] for tie in run.tied if set(tie.devices) & set(lane.devices)]
        free = max([free, *summed])
        for s in sorted(stages, key=lambda s: (last.get(s, -1), s)):
            groups = [g for g, group in enumerate(run.costs.groups) if s in group.stages]
            reduced = [span[1] for (g, _t, _k), span in run.reductions.items() if g in groups]
            start = max([free, *reduced])
            free = start + run.costs.step(s)
            run.steps[s, k] = (start, free)
    run.time = run.end
    run.window = (0, run.time)


# Section 6.


def _long_run(problem: Problem, allocation: Allocation, pattern: Pattern, overlap: bool | None, rule: str) -> Run:
    costs = Costs(problem, allocation, overlap, long_run=True)
    turns = [len(stage.devices) for stage in costs.stages if stage.dispatch == "round_robin"]
    M, q = costs.M, pattern.micro_batches_per_period
    deep = -(-(max(each.shift for each in pattern.operations) + 1) * q // M)
    whole = lcm(M, q, *turns) // M
    first = 2 * deep + 1
    last = first + -(-max(2, 2 * deep, -(-48 // M)) // whole) * whole
    rounds = last + deep + 1
    every = [M] * len(costs.stages)
    if rule == "weight_stashing":
        every = [len(stage.devices) if stage.dispatch == "round_robin" else 1 for stage in costs.stages]
    costs.ranges = [(0, rounds * M - 1)]
    lanes = [Lane(devices, []) for devices in _lanes(costs)]
    run = Run(costs, rule, every, lanes, tied=costs.ties(rule))
    for k, lane in enumerate(lanes):
        lane.row.extend(_row(run, k, pattern, rounds * M))
    check_rows(run)
    for k, lane in enumerate(lanes):
        lane.row[:] = _with_steps(run, k, rounds * M)
    refuse_unreachable(run)
    Clock(run, rounds * M).run_all()
    run.rounds = rounds
    _measure(run, first, last, whole)
    return run


def _lanes(costs: Costs) -> list[tuple[int, ...]]:
    """Group devices that hold the same stages, and have the same turn in each round-robin stage."""
    lanes: dict[Hashable, list[int]] = defaultdict(list)
    for d in sorted({d for stage in costs.stages for d in stage.devices}):
        turns = [
            (s, stage.devices.index(d) if stage.dispatch == "round_robin" else 0)
            for s, stage in enumerate(costs.stages)
            if d in stage.devices
        ]
        lanes[tuple(turns)].append(d)
    return [tuple(devices) for devices in lanes.values()]


def _row(run: Run, lane: int, pattern: Pattern, total: int) -> list[Operation]:
    entries = []
    q = pattern.micro_batches_per_period
    for k, each in enumerate(pattern.operations):
        if lane not in run.lanes_of(each.stage):
            continue
        for m in range(each.micro_batch, total, q):
            if lane in run.runners(each.stage, m):
                nominal = (m // q + each.shift) * pattern.period_ns + each.start_ns
                entries.append((nominal, k, m, (each.kind, each.stage, m)))
    return [operation for _nominal, _k, _m, operation in sorted(entries)]


def _with_steps(run: Run, lane: int, total: int) -> list[Operation]:
    """Return the row with its steps, each before the operations that must follow it."""
    row = run.lanes[lane].row
    before: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for s in range(len(run.costs.stages)):
        if lane not in run.lanes_of(s):
            continue
        for t in range(total // run.every[s]):
            before[_place_of_step(run, row, s, t)].append((s, (t + 1) * run.every[s] - 1))
    operations = []
    for place in range(len(row) + 1):
        operations += [(STEP, s, m) for s, m in sorted(before[place])]
        operations += row[place : place + 1]
    return operations


def _place_of_step(run: Run, row: list[Operation], s: int, t: int) -> int:
    operations = [(place, kind, run.number(s, m)) for place, (kind, stage, m) in enumerate(row) if stage == s]
    last = max((place for place, kind, number in operations if kind in GRADIENT and number == t), default=-1)
    forwards = [(place, _version(run, s, number) > t) for place, kind, number in operations if kind == F]
    gradients = [place for place, kind, _number in operations if kind in GRADIENT and place > last]
    if run.rule == "weight_stashing":
        blockers = [place for place, _newer in forwards if place > last]
    else:
        newer = min((place for place, later in forwards if later), default=len(row))
        blockers = [place for place, _newer in forwards if place > last and place >= newer]
    return min([*gradients, *blockers], default=len(row))


def _version(run: Run, s: int, t: int) -> int:
    """Return used(t)."""
    early = run.rule == "double_buffered" or (run.rule == "double_grouped" and 2 * s < len(run.costs.stages))
    return max(t - 1, 0) if early else t


def _measure(run: Run, first: int, last: int, whole: int) -> None:
    """Set the window, and the time per global batch."""
    done: dict[int, int] = defaultdict(int)
    for (_lane, (kind, _s, m)), (_start, end) in run.operations.items():
        if kind in (B, W):
            done[m // run.costs.M] = max(done[m // run.costs.M], end)
    n = last - first
    k = n
    for some in range(whole, n // 2 + 1, whole):
        if len({done[t + some] - done[t] for t in range(first, last - some + 1)}) == 1:
            k = some
            break
    run.window = (done[last - k], done[last])
    run.batches = k
    run.time = -(-(done[last] - done[last - k]) // k)
