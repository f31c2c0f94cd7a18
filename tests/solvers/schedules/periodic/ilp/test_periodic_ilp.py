"""The periodic ILP: worked examples, 1F1B*, an independent checker, enumeration, another solver, the planner."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import replace
from statistics import geometric_mean

import pulp
import pytest
from periodic_lines import faults, make_line, peak_bytes, random_line, with_memory
from problems import chain, make_problem
from pulp.apis.coin_api import pulp_cbc_path

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import FORWARD
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.madpipe.planner import SecondPhase
from penstock.solvers.schedules.catalogue import SCHEDULES
from penstock.solvers.schedules.periodic import inside_out
from penstock.solvers.schedules.periodic.ilp import solve
from penstock.solvers.schedules.periodic.ilp.model import GAP, IMPOSSIBLE, OPTIMAL, TOLERANCE, Model
from penstock.solvers.schedules.periodic.ilp.path import PathOperation, path_of, rivals, timed
from penstock.solvers.schedules.periodic.ilp.solve import _pattern, _room
from penstock.solvers.schedules.periodic.one_f_one_b_star import in_flight, minimal_period_ns
from penstock.solvers.schedules.periodic.smallest_period import periodic_ilp
from penstock.solvers.schedules.support.stage_line import StageLine, as_pattern
from penstock.solvers.solve import driver
from penstock.solvers.verify.verifier import verify

pytestmark = pytest.mark.tier("ci")

SPECIAL = make_line([(1, 1), (2, 2), (1, 1)], processor=[0, 1, 0])
BUFFERED = make_line([(1000, 3000), (2000, 4000), (1000, 1000)], [(125, 125)] * 2, [0, 1, 0], fixed_bytes=[2, 4, 2])
"""The examples of ALGORITHMS 4.4, without transfers, and of 4.3, in thousandths with four buffers on each processor."""


@pytest.mark.parametrize(
    ("line", "memory", "period"),
    [
        (SPECIAL, 1, None),
        (SPECIAL, 2, 6),
        (SPECIAL, 3, 5),
        (SPECIAL, 4, 4),
        (SPECIAL, 9, 4),
        (BUFFERED, 5, None),
        (BUFFERED, 6, 9250),
        (BUFFERED, 7, 6250),
        (BUFFERED, 8, 6000),
        (BUFFERED, 12, 6000),
    ],
)
def test_worked_examples(line: StageLine, memory: int, period: int | None) -> None:
    answer = solve(with_memory(line, memory))
    assert answer.proven
    assert (None if answer.pattern is None else answer.pattern.period_ns) == period
    if answer.pattern is not None:
        assert faults(with_memory(line, memory), answer.pattern) == []
        assert answer.bound_ns <= answer.pattern.period_ns <= answer.bound_ns + 1


def test_contiguous_lines_have_the_period_of_1f1b_star() -> None:
    """Proposition 1, to the nanosecond, and infeasible for the same lines."""
    draw = random.Random(3)
    patterns = 0
    for _ in range(60):
        line = replace(with_memory(random_line(draw, 6), draw.randint(5, 30)), most_in_flight=draw.randint(2, 9))
        answer = solve(line)
        assert answer.proven
        assert (None if answer.pattern is None else answer.pattern.period_ns) == minimal_period_ns(line)
        if answer.pattern is not None:
            assert faults(line, answer.pattern) == []
            patterns += 1
    assert 30 <= patterns < 60


def test_patterns_of_shared_processors_are_valid_and_no_longer_than_inside_out() -> None:
    draw = random.Random(13)
    shorter, alone = 0, 0
    for _ in range(60):
        line = with_memory(random_line(draw, 8, shared=True), draw.randint(10, 40))
        answer, listed = solve(line), inside_out.smallest(line)
        assert answer.proven
        if answer.pattern is None:
            assert listed is None
            continue
        assert faults(line, answer.pattern) == []
        assert line.load_bound_ns() <= answer.bound_ns <= answer.pattern.period_ns
        assert listed is None or answer.pattern.period_ns <= listed.period_ns
        shorter += listed is not None and answer.pattern.period_ns < listed.period_ns
        alone += listed is None
    assert shorter > 5
    assert alone == 0  # at the longest period inside-out keeps one micro-batch everywhere, as few as any pattern


def test_no_shorter_pattern_in_an_enumeration() -> None:
    """Every pattern on whole nanoseconds of three stages, the first and the last on one processor."""
    draw = random.Random(5)
    for _ in range(12):
        times = [(draw.randint(1, 2), draw.randint(1, 2)) for _ in range(3)]
        kept = [draw.randint(1, 2) for _ in range(3)]
        line = with_memory(make_line(times, processor=[0, 1, 0], kept_bytes=kept), draw.randint(3, 7))
        answer = solve(line)
        shortest = next((t for t in range(line.load_bound_ns(), line.alone_ns() + 1) if _possible(line, t)), None)
        assert (None if answer.pattern is None else answer.pattern.period_ns) == shortest


def _possible(line: StageLine, period: int) -> bool:
    path = [(True, s) for s in range(3)] + [(False, s) for s in reversed(range(3))]
    lasts = [(line.forward_ns if forward else line.backward_ns)[s] for forward, s in path]
    for waits in itertools.product(range(period), repeat=5):
        starts = [0]
        for last, wait in zip(lasts, waits, strict=False):
            starts.append(starts[-1] + last + wait)
        slots = [
            (line.processor[s], (start + i) % period)
            for (_forward, s), last, start in zip(path, lasts, starts, strict=True)
            for i in range(last)
        ]
        if len(set(slots)) < len(slots):
            continue
        pattern = as_pattern("any", period, starts[:3], starts[:2:-1])
        if all(peak_bytes(line, pattern, p) <= line.available_bytes[p] for p in (0, 1)):
            return True
    return False


def cbc_period_ns(line: StageLine) -> int | None:
    """Return the smallest period by CBC, which solves the same model as HiGHS; None: there is no pattern."""
    path, (room, most) = path_of(line), _room(line)
    least = max(1, *(sum(path[i].duration_ns for i in users) for users in rivals(path)))
    if min(most) < 1:
        return None
    model = Model(line, path, room, most, least, line.alone_ns())
    model.build()
    options = [f"primalTolerance {TOLERANCE}"]
    model.lp.solve(pulp.COIN_CMD(path=pulp_cbc_path, msg=False, gapRel=GAP, threads=1, options=options))
    if model.lp.sol_status == IMPOSSIBLE:
        return None
    assert model.lp.sol_status == OPTIMAL
    pattern = _pattern(line, path, {pair: round(count.value()) for pair, count in model.counts.items()}, least)
    return None if pattern is None else pattern.period_ns


def test_another_solver_agrees() -> None:
    draw = random.Random(17)
    for _ in range(12):
        line = with_memory(random_line(draw, 6, shared=True), draw.randint(12, 40))
        answer = solve(line)
        assert answer.proven
        assert cbc_period_ns(line) == (None if answer.pattern is None else answer.pattern.period_ns)


def test_only_shorter_patterns_are_wanted() -> None:
    line = with_memory(SPECIAL, 3)
    assert solve(line, below_ns=5).pattern is None
    assert solve(line, below_ns=5).proven
    below = solve(line, below_ns=6).pattern
    assert below is not None
    assert below.period_ns == 5
    assert solve(line, below_ns=4) == (None, 4, True)


@pytest.mark.tier("nightly")
def test_a_limit_of_nodes_is_kept_and_said() -> None:
    """The result within the limit is valid, the bound holds, and the same question has the same answer."""
    draw = random.Random(1)
    unproven = 0
    for _ in range(4):
        line = _balanced_line(draw)
        few, whole = solve(line, nodes=1), solve(line)
        assert few == solve(line, nodes=1)
        assert whole.proven
        assert whole.pattern is not None
        assert few.bound_ns <= whole.pattern.period_ns
        assert few.pattern is None or faults(line, few.pattern) == []
        assert few.pattern is None or whole.pattern.period_ns <= few.pattern.period_ns
        unproven += not few.proven
    assert unproven > 0


def _balanced_line(draw: random.Random) -> StageLine:
    """Draw twelve stages, three with a third of the work each on processor 0, with memory for 1F1B*'s micro-batches."""
    places = [0, 1, 2, 3, 4, 0, 5, 6, 7, 0, 8, 9]
    work = [draw.randint(2250, 3000) // (3 if place == 0 else 1) for place in places]
    hops = [(hop, hop) for hop in (draw.randint(30, 300) for _ in places[1:])]
    kept = [draw.randint(50, 100) for _ in places]
    line = make_line([(w // 3, w - w // 3) for w in work], hops, places, kept)
    room = [0] * 10
    for place, size, count in zip(places, kept, in_flight(line, line.load_bound_ns()), strict=True):
        room[place] += size * count
    return replace(line, available_bytes=tuple(room))


@pytest.mark.tier("quick")
def test_times_from_counts_are_the_shortest() -> None:
    """Given the counts of a pattern, its constraints hold, and a nanosecond less has no starts at all."""
    draw = random.Random(23)
    for _ in range(60):
        drawn = random_line(draw, 6, shared=True)
        nothing = (0,) * (drawn.size - 1)
        line = replace(with_memory(drawn, 40), hop_forward_ns=nothing, hop_backward_ns=nothing)
        pattern = inside_out.smallest(line)
        assert pattern is not None
        path = path_of(line)
        start = {(o.kind == FORWARD, o.stage): o.start_ns + o.shift * pattern.period_ns for o in pattern.operations}
        counts = {
            (i, j): (start[path[j].forward, path[j].stage] - start[path[i].forward, path[i].stage]) // pattern.period_ns
            for group in rivals(path)
            for i, j in itertools.combinations(group, 2)
        }
        result = timed(path, counts, 1)
        assert result is not None
        period, starts = result
        assert period <= pattern.period_ns
        assert all(starts[j] - starts[i] >= wait for (i, j), wait in _waits(path, counts, period).items())
        assert not _any_starts(path, counts, period - 1)


def _waits(
    path: tuple[PathOperation, ...], counts: dict[tuple[int, int], int], period: int
) -> dict[tuple[int, int], int]:
    """Return by how much an operation j starts at least later than i."""
    waits = {(i, i + 1): path[i].duration_ns for i in range(len(path) - 1)}
    for (i, j), n in counts.items():
        waits[i, j] = max(waits.get((i, j), 0), n * period + path[i].duration_ns)
        waits[j, i] = path[j].duration_ns - (n + 1) * period
    return waits


def _any_starts(path: tuple[PathOperation, ...], counts: dict[tuple[int, int], int], period: int) -> bool:
    """Return whether starts exist: no operation has to start later than itself (Floyd and Warshall)."""
    size = range(len(path))
    longest = {pair: float("-inf") for pair in itertools.product(size, repeat=2)} | _waits(path, counts, period)
    for k, i, j in itertools.product(size, repeat=3):
        longest[i, j] = max(longest[i, j], longest[i, k] + longest[k, j])
    return all(longest[i, i] <= 0 for i in size)


@pytest.mark.tier("quick")
def test_counts_that_do_not_go_together_have_no_times() -> None:
    path = path_of(make_line([(2, 3)]))
    assert timed(path, {(0, 1): 0}, 1) == (5, [0, 2])
    assert timed(path, {(0, 1): -1}, 1) is None


def random_problem(seed: int, memory: int, **changes: object) -> Problem:
    """Draw six layers on up to three devices; memory counts exactly as in the model."""
    draw = random.Random(seed)
    settings: dict[str, object] = {
        "boundary_bytes": [draw.randint(10_000, 400_000) for _ in range(5)],
        "parameter_bytes": [draw.randint(0, 1_000_000) for _ in range(6)],
        "stash_bytes": [draw.randint(100_000, 1_500_000) for _ in range(6)],
        "inside_bytes_per_s": 8 * 10**9,
        "nodes": (3,),
        "global_batch_size": 16,
        "count_buffers": False,
        "memory_bytes": memory,
    }
    problem = make_problem([draw.randint(100_000, 3_000_000) for _ in range(6)], **(settings | changes))  # type: ignore[arg-type]
    return replace(problem, update_rules=frozenset({"double_buffered"}))


@pytest.mark.parametrize("places", [(0, 1, 0), (0, 1, 2, 0), (0, 1, 0, 2, 0), (0, 1, 2)])
def test_the_judge_runs_the_pattern_at_its_period(places: tuple[int, ...]) -> None:
    """Unrolled, self-timed and verified; never slower than the period, and in the memory that the model allows."""
    for seed in range(4):
        problem = random_problem(seed, 12_000_000)
        allocation = _on(problem, places)
        try:
            pattern = periodic_ilp(problem, allocation)
        except InvalidPlan:
            assert inside_out.smallest(StageLine.of(problem, allocation)) is None
            continue
        timeline = simulate(problem, allocation, pattern, update_rule="double_buffered")
        assert verify(problem, allocation, pattern, timeline, overlap=True, update_rule="double_buffered") == []
        assert timeline.time_per_global_batch_ns <= 16 * pattern.period_ns
        assert all(use.memory.total <= problem.capacity_bytes(d) for d, use in timeline.uses.items())


def _on(problem: Problem, places: tuple[int, ...]) -> Allocation:
    """Put the layers on these devices, spread as evenly as possible."""
    bounds = [problem.num_layers * i // len(places) for i in range(len(places) + 1)]
    stages = [Stage(a, b - 1, (d,)) for (a, b), d in zip(itertools.pairwise(bounds), places, strict=True)]
    return single_pipeline(tuple(stages), 16)


def test_the_schedule_says_what_it_cannot_do() -> None:
    problem = make_problem([10, 10], parameter_bytes=5, nodes=(2,), memory_bytes=14)
    with pytest.raises(InvalidPlan, match="no period lets every processor"):
        periodic_ilp(problem, chain([(1, [0]), (1, [1])], 4))
    assert SCHEDULES["periodic-ilp"].build is periodic_ilp


@pytest.mark.tier("nightly")
def test_the_planner_is_never_worse_with_the_ilp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is inside-out alone; the ILP is strictly better somewhere."""
    better = 0
    for seed in range(10):
        problem = random_problem(seed, 7_500_000)
        with monkeypatch.context() as inside:
            inside.setattr(SecondPhase, "solved", lambda *_: iter(()))
            alone = driver.solve(problem, "madpipe", options={"width": 1}).best
        both = driver.solve(problem, "madpipe", options={"width": 1}).best
        assert alone is None or both is not None
        if alone is not None and both is not None:
            assert both.value_ns <= alone.value_ns
            better += both.value_ns < alone.value_ns and both.schedule.name == "periodic-ilp"
    assert better > 0


@pytest.mark.tier("nightly")
def test_the_planner_and_the_joint_optimum() -> None:
    """No plan beats the best of all allocations; MadPipe's gap, as only one processor may be special, is limited."""
    gaps = []
    for seed, memory in itertools.product(range(6), (9_000_000, 10_000_000, 12_000_000, 20_000_000)):
        problem = random_problem(seed, memory)
        best = _joint_period_ns(problem)
        plan = driver.solve(problem, "madpipe", options={"width": 1}).best
        if best is None:
            assert plan is None
            continue
        assert plan is not None
        gaps.append(plan.value_ns / (16 * best))
    assert len(gaps) > 20
    assert min(gaps) > 0.9999
    assert max(gaps) < 1.4
    assert geometric_mean(gaps) < 1.06


def _joint_period_ns(problem: Problem) -> int | None:
    """Return the best period over every way to put layers on processors; neighbours on one processor are one stage."""
    lines = []
    for places in itertools.product(range(3), repeat=problem.num_layers):
        seen = list(dict.fromkeys(places))
        if seen != list(range(len(seen))):
            continue
        stages, first = [], 0
        for place, run in itertools.groupby(places):
            count = len(list(run))
            stages.append(Stage(first, first + count - 1, (place,)))
            first += count
        lines.append(StageLine.of(problem, single_pipeline(tuple(stages), 16)))
    best = None
    for line in sorted(lines, key=lambda line: line.load_bound_ns()):
        answer = solve(line, below_ns=best)
        assert answer.proven
        best = best if answer.pattern is None else answer.pattern.period_ns
    return best


ORTOOLS = "from ortools.sat.python import cp_model; m = cp_model.CpModel(); s = cp_model.CpSolver(); s.solve(m)"
HIGHS = f"""import sys; sys.path[:] = {sys.path!r}
from periodic_lines import make_line
from penstock.solvers.schedules.periodic.ilp import solve
assert solve(make_line([(1, 1), (2, 2), (1, 1)], processor=[0, 1, 0], available_bytes=3)).pattern.period_ns == 5"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("order", [(ORTOOLS, HIGHS), (HIGHS, ORTOOLS)], ids=["ortools first", "highs first"])
def test_both_libraries_live_in_one_process(order: tuple[str, str]) -> None:
    """Some versions of highspy and ortools bring the same symbols, and the second import fails."""
    done = subprocess.run([sys.executable, "-c", "\n".join(order)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


PRINTING = f"""import random, sys; sys.path[:] = {sys.path!r}
from periodic_lines import random_line, with_memory
from penstock.solvers.schedules.periodic.ilp import solve
draw = random.Random(3)
for _ in range(25):
    solve(with_memory(random_line(draw, 8), draw.randint(5, 30)))
sys.stdout.write("after")"""


def test_nothing_is_printed() -> None:
    """Lines on which HiGHS 1.12 repairs solutions; it would print messages when its output is flushed."""
    done = subprocess.run([sys.executable, "-c", PRINTING], capture_output=True, text=True, check=True)
    assert done.stdout == "after"
