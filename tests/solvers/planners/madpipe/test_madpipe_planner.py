"""The planner against enumeration by the simulator, and its refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from periodic_lines import in_flight as counted
from problems import chain, make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Result, Status
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.planners.madpipe import labels, planner
from penstock.solvers.planners.madpipe.labels import Searched
from penstock.solvers.schedules.periodic.ilp import PatternAnswer
from penstock.solvers.schedules.periodic.one_f_one_b_star import chain_loads, in_flight, pattern
from penstock.solvers.schedules.support.stage_line import StageLine
from penstock.solvers.solve.driver import solve
from penstock.solvers.verify.verifier import verify

pytestmark = pytest.mark.tier("ci")


def random_problem(seed: int, layers: int = 8, **changes: Any) -> Problem:
    draw = random.Random(seed)
    settings: dict[str, Any] = {
        "boundary_bytes": [draw.randint(10_000, 400_000) for _ in range(layers - 1)],
        "parameter_bytes": [draw.randint(0, 2_000_000) for _ in range(layers)],
        "stash_bytes": [draw.randint(100_000, 1_500_000) for _ in range(layers)],
        "update_ns": [draw.randint(0, 50_000) for _ in range(layers)],
        "nodes": (3,),
        "global_batch_size": 8,
        "inside_bytes_per_s": 8 * 10**9,
    }
    problem = make_problem([draw.randint(100_000, 3_000_000) for _ in range(layers)], **(settings | changes))
    return replace(problem, update_rules=frozenset({"double_buffered"}))


def solved(problem: Problem, **options: object) -> Result:
    return solve(problem, "madpipe", options=options)


def contiguous_plans(problem: Problem, micro_batches: int) -> list[Allocation]:
    """List every partition over the first devices, one device per stage."""
    plans = []
    for count in range(1, problem.num_devices + 1):
        for inner in itertools.combinations(range(1, problem.num_layers), count - 1):
            bounds = itertools.pairwise((0, *inner, problem.num_layers))
            plans.append(chain([(b - a, [d]) for d, (a, b) in enumerate(bounds)], micro_batches))
    return plans


def best_contiguous_ns(problem: Problem, micro_batches: int) -> int | None:
    """Return the best simulated 1F1B* plan, over all partitions and all periods at which g changes."""
    best = None
    for allocation in contiguous_plans(problem, micro_batches):
        line = StageLine.of(problem, allocation)
        loads = chain_loads(line)
        sums = {sum(loads[i:j]) for i in range(len(loads)) for j in range(i + 1, len(loads) + 1)}
        for period in sorted(s for s in sums if s >= max(loads)):
            if best is not None and best <= period * micro_batches:
                continue
            if max(in_flight(line, period)) > line.most_in_flight:
                continue
            timeline = simulate(problem, allocation, pattern(line, period), update_rule="double_buffered")
            fits = all(use.memory.total <= problem.capacity_bytes(d) for d, use in timeline.uses.items())
            if fits and (best is None or timeline.time_per_global_batch_ns < best):
                best = timeline.time_per_global_batch_ns
    return best


@pytest.mark.cases(1)
@pytest.mark.parametrize("memory", [10**9, 16_000_000, 12_500_000, 10_000_000, 8_500_000])
def test_never_worse_than_the_contiguous_optimum(memory: int) -> None:
    """All partitions, simulated: none is better by more than updates may differ; if one fits, a plan exists."""
    for seed in range(4):
        problem = random_problem(seed, 6, memory_bytes=memory)
        best = best_contiguous_ns(problem, 8)
        result = solved(problem, width=1)
        if best is None:
            continue
        assert result.best is not None
        assert result.best.value_ns <= best * 1.001


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("seed", "layers", "changes"),
    [
        (37, 6, {"memory_bytes": 15_196_466, "shared": True, "nodes": (2, 1)}),
        (112, 6, {"memory_bytes": 13_073_978, "channel": "none"}),
        (113, 5, {"memory_bytes": 5_512_633, "channel": "none"}),
        (154, 4, {"memory_bytes": 8_408_162}),
        (218, 5, {"memory_bytes": 10_039_244, "shared": True, "nodes": (2, 1), "workspace_bytes": 477_151}),
        (337, 6, {"memory_bytes": 8_386_633, "shared": True, "latency_ns": 5_000}),
    ],
)
def test_buffers_that_are_not_there_at_once_cost_nothing(seed: int, layers: int, changes: dict[str, Any]) -> None:
    """Plans where the formula's four buffers a stage would forbid more than the simulator does.

    Random problems with random memory, kept because a planner that reserves the formula's buffers finds no plan, or a
    slower one.
    """
    problem = random_problem(seed, layers, **changes)
    best = best_contiguous_ns(problem, 8)
    result = solved(problem, width=1)
    assert (result.best is None) == (best is None)
    if best is not None and result.best is not None:
        assert result.best.value_ns <= best * 1.001


def test_a_special_processor_wins_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is the contiguous optimum alone: no chain is searched for allocations with a special processor."""
    wins, nothing = 0, Searched((), 0, True, 0)
    for seed in range(8):
        problem = random_problem(seed, memory_bytes=14_000_000)
        both = solved(problem, width=1)
        with monkeypatch.context() as contiguous:
            contiguous.setattr(planner, "portfolio", lambda *_: nothing)
            contiguous.setattr(planner, "special_optimum", lambda *_, **__: nothing)
            alone = solved(problem, width=1)
        if alone.best is None or both.best is None:
            continue
        assert both.best.value_ns <= alone.best.value_ns
        wins += both.best.value_ns < alone.best.value_ns
    assert wins >= 2


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 30_000_000, "nodes": (2, 2)},
        {"memory_bytes": 14_000_000, "nodes": (2, 2), "shared": True, "latency_ns": 5_000},
        {"memory_bytes": 20_000_000, "nodes": (4,), "recompute": "auto", "state_factor": 2, "shard_states": True},
        {"memory_bytes": 20_000_000, "nodes": (2, 1), "recompute": "always", "micro_batch_sizes": (2, 4)},
        {"channel": "full", "nodes": (4,), "cuttable": [True, False, True, True, False, True, True]},
        {"micro_batch_sizes": (4,), "nodes": (1, 1, 1, 1), "between_bytes_per_s": 10**9},
        {"global_batch_size": 1, "nodes": (4,)},
    ],
    ids=lambda changes: " ".join(changes),
)
@pytest.mark.parametrize("printed", [False, True], ids=["exact", "paper"])
def test_plans_verify_and_fit(changes: dict[str, Any], printed: bool) -> None:
    """``Planner.solve`` runs ``verify``; here it runs once more, and in-flight counts are M + 1 at most."""
    problem = random_problem(3, **changes)
    best = solved(problem, paper=printed).best
    if printed and best is None:
        return
    assert best is not None
    assert best.update_rule == "double_buffered"
    timing: dict[str, Any] = {"overlap": best.overlap_all_reduce, "update_rule": best.update_rule}
    assert verify(problem, best.allocation, best.schedule, best.timeline, **timing) == []
    assert all(use.memory.total <= problem.capacity_bytes(d) for d, use in best.timeline.uses.items())
    assert len({stage.replicas for stage in best.allocation.stages}) == 1


def test_width_is_kept_and_unequal_replicas_are_refused() -> None:
    problem = random_problem(1, nodes=(2, 4), micro_batch_sizes=(2,))
    best = solved(problem, width=2).best
    assert best is not None
    assert {stage.replicas for stage in best.allocation.stages} == {2}
    assert {stage.devices for stage in best.allocation.stages} <= {(0, 1), (2, 3), (4, 5)}
    with pytest.raises(UnsupportedRequest, match="6 devices cannot form groups of 4") as refusal:
        solved(problem, width=4)
    assert refusal.value.remedy == "width 3, or one of 1, 2, 3, 6"
    with pytest.raises(UnsupportedRequest, match="gives 3 replicas 1 samples") as refusal:
        solved(problem, width=3)
    assert refusal.value.remedy == "micro_batch_sizes [3], or width 0"


def test_several_kinds_are_refused() -> None:
    problem = random_problem(1, nodes=(2,), kinds=["cpu", "fast"], speed={"fast": 2.0})
    with pytest.raises(UnsupportedRequest, match="one kind; the cluster has cpu, fast"):
        solved(problem)


def test_the_smallest_memory_counts() -> None:
    """Devices of one kind may have unequal memory: the plan fits on every one of them."""
    problem = random_problem(2, memory_bytes=[40_000_000, 13_000_000, 40_000_000])
    best = solved(problem, width=1).best
    assert best is not None
    assert all(use.memory.total <= problem.capacity_bytes(d) for d, use in best.timeline.uses.items())


def test_two_versions_need_few_in_flight() -> None:
    """With one micro-batch per update two are in flight at most, whatever memory allows."""
    problem = random_problem(5, global_batch_size=1, nodes=(4,), layers=8)
    best = solved(problem).best
    assert best is not None
    line = StageLine.of(problem, best.allocation)
    assert isinstance(best.schedule, Pattern)
    assert line.most_in_flight == 2
    assert max(counted(line, best.schedule)) <= 2


def test_infeasible_says_what_is_lacking() -> None:
    result = solved(random_problem(0, memory_bytes=1_000_000))
    assert result.status is Status.INFEASIBLE
    assert result.shortage is not None
    assert "are missing" in result.sentence


def test_rounding_of_labels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the cap is reached the plan is still valid, and ``why`` states the rounding."""
    problem = random_problem(1, memory_bytes=14_000_000)
    exact = solved(problem, width=1)
    monkeypatch.setattr(labels, "LABELS", 8)
    rough = solved(problem, width=1)
    assert "rounded" in rough.sentence
    assert "rounded" not in exact.sentence
    assert exact.best is not None
    assert rough.best is not None
    assert rough.best.value_ns >= exact.best.value_ns


@pytest.mark.parametrize(("seed", "memory_bytes"), [(1, 10_000_000), (3, 8_000_000)])
def test_allocations_without_a_pattern_count_as_plans(
    seed: int, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs an integer program, which may take minutes between two plans; also where no pattern exists."""
    problem = random_problem(seed, memory_bytes=memory_bytes, nodes=(4,))
    solved_programs: list[StageLine] = []

    def without_pattern(line: StageLine, **_: Any) -> PatternAnswer:
        solved_programs.append(line)
        return PatternAnswer(None, 0, False)

    monkeypatch.setattr(planner, "solve", without_pattern)
    solve(problem, "madpipe", gap=0.0)
    without_limit = len(solved_programs)
    solved_programs.clear()
    solve(problem, "madpipe", max_plans=2)
    assert len(solved_programs) <= 4 < without_limit, "2, and 2 of the first remedy where none fits"


@pytest.mark.parametrize("schedule", ["1f1b-star", "inside-out", "periodic-ilp"])
def test_both_schedules_may_be_asked_for(schedule: str) -> None:
    best = solve(random_problem(4), "madpipe", schedule=schedule).best
    assert best is not None
    assert best.schedule.name == schedule


def test_same_request_same_plan() -> None:
    problem = random_problem(7, memory_bytes=14_000_000, nodes=(2, 2))
    one, two = solved(problem).best, solved(problem).best
    assert one is not None
    assert two is not None
    assert (one.allocation, one.schedule, one.value_ns) == (two.allocation, two.schedule, two.value_ns)
