"""Programs of periodic plans, run by a plain simulation of ranks: versions, loops, messages, against plain counts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from lowered import ran, starved
from problems import make_problem, straight
from random_plans import random_pattern, random_problem

import penstock.solvers.lowering as lowering
from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD, Program
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.lowering import lower
from penstock.solvers.lowering.loops import Length
from penstock.solvers.lowering.loops import length as usual_length
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Pattern, PatternOperation
from penstock.solvers.model.unroll import Unrolled
from penstock.solvers.model.update_rules import UpdateRule, micro_batches_per_update
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.schedules.periodic.wpipe import wpipe
from penstock.solvers.verify.versions import check_versions

SEEDS = 60


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower all global batches instead of a short run of them."""

    def unfolded(allocation: Allocation, pattern: Pattern, batches: int) -> Length:
        return Length(batches, batches, *usual_length(allocation, pattern, batches)[2:])

    monkeypatch.setattr(lowering, "length", unfolded)


def papers_version(rule: str, allocation: Allocation, stage: int, update_round: int) -> int:
    """Return the version of ALGORITHMS 5.1; -1, before 0, is the version that the program before has left."""
    pipeline = len(allocation.stages)
    late = rule == "double_buffered" or 2 * stage < pipeline
    return update_round - 1 if late else update_round


def dead(problem: Problem, allocation: Allocation, run: Unrolled, rule: UpdateRule) -> bool:
    """Return whether the verifier reports that a version is used that is not kept."""
    names = [device.name for device in problem.devices]
    return any("weight version" in fault for fault in check_versions(names, allocation, run, rule))


def deadlocks(problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule) -> bool:
    """Return whether the simulator reports that steps of replicas wait for each other's reductions."""
    try:
        simulate(problem, allocation, pattern, update_rule=rule)
    except InvalidPlan as error:
        return "deadlocks" in error.detail
    return False


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_patterns(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    problem = replace(problem, global_batch_size=3 * problem.global_batch_size)
    allocation, pattern, rule, run = random_pattern(rng, problem)
    while run.allocation.num_micro_batches > 250:
        allocation, pattern, rule, run = random_pattern(rng, problem)
    every = [micro_batches_per_update(rule, stage, allocation.num_micro_batches) for stage in allocation.stages]
    batches = run.rounds + rng.randint(0, 9)
    batches += -batches % max(every) if rule == "weight_stashing" else 0
    if any(batches * allocation.num_micro_batches % each for each in every):
        with pytest.raises(InvalidPlan, match="which is not a multiple of"):
            lower(problem, allocation, pattern, update_rule=rule, batches=batches)
        return
    if starved(problem, allocation, batches):
        with pytest.raises(InvalidPlan, match=r"some would get|that take turns"):
            lower(problem, allocation, pattern, update_rule=rule, batches=batches)
        return
    if dead(problem, allocation, run, rule) or deadlocks(problem, allocation, pattern, rule):
        with pytest.raises(InvalidPlan, match=r"needs weights|in a circle"):
            lower(problem, allocation, pattern, update_rule=rule, batches=batches)
        return
    programs = lower(problem, allocation, pattern, update_rule=rule, batches=batches)
    reference = ran(programs)
    for program in programs:
        for part in program.stages:
            assert reference.steps[program.rank, part.stage] * part.update_every == batches * program.num_micro_batches
            for m in reference.batches_of(part):
                if rule != "weight_stashing":
                    expected = papers_version(rule, allocation, part.stage, m // part.update_every)
                    assert reference.used[program.rank, part.stage, m] == expected
    whole(monkeypatch)
    unfolded = lower(problem, allocation, pattern, update_rule=rule, batches=batches)
    assert [list(p.instructions()) for p in programs] == [list(p.instructions()) for p in unfolded]


def test_a_long_run_is_a_short_program() -> None:
    problem = make_problem([1] * 4, boundary_bytes=4, global_batch_size=22)
    allocation = straight(problem, 8)
    pattern = eager(problem, allocation, update_rule="double_buffered")
    few, many = (lower(problem, allocation, pattern, update_rule="double_buffered", batches=n) for n in (60, 6000))
    for a, b in zip(few, many, strict=True):
        assert (b.batches, b.repeat) == (6000, a.repeat + 5940)
        assert (a.prologue, a.body, a.body_batches) == (b.prologue, b.body, b.body_batches)
        assert len(a.epilogue) == len(b.epilogue)
        assert max(one.micro_batch for one in b.epilogue) == 6000 * 8 - 1
        assert sum(one.kind == "F" for one in b.body) == 8 * b.body_batches


def test_rows_of_every_global_batch_are_the_real_ones() -> None:
    """Seven samples in three micro-batches: 3, 2, 2 rows in each global batch, not three everywhere. By hand."""
    problem = make_problem([1, 1], boundary_bytes=4, global_batch_size=7)
    allocation = straight(problem, 3)
    pattern = eager(problem, allocation, update_rule="double_buffered")
    program = lower(problem, allocation, pattern, update_rule="double_buffered", batches=3)[1]
    rows = [program.channels[0].rows[program.row_class(m)] for m in range(9)]
    assert rows == [(0, 3), (0, 2), (0, 2)] * 3


# Versions, in flight, messages (ALGORITHMS 5.1, 5.4)


def counted(programs: Sequence[Program]) -> tuple[list[int], list[int], int]:
    """Count each stage's most versions and micro-batches in flight, and messages per micro-batch, by walking."""
    versions: Counter[int] = Counter()
    flying: Counter[int] = Counter()
    messages: Counter[int] = Counter()
    for program in programs:
        newest: Counter[int] = Counter()
        age: Counter[int] = Counter()
        version: dict[tuple[int, int], int] = {}
        for one in program.instructions():
            key = one.stage, one.micro_batch
            if one.kind == "VERSION":
                age[one.stage] = one.micro_batch
            elif one.kind == "F":
                version[key] = newest[one.stage] - age[one.stage]
            elif one.kind == "STEP":
                newest[one.stage] += 1
            elif one.kind.startswith("SEND"):
                messages[one.micro_batch] += 1
            flights = {m: v for (s, m), v in version.items() if s == one.stage}
            flying[one.stage] = max(flying[one.stage], len(flights))
            kept = {newest[one.stage], newest[one.stage] - age[one.stage], *flights.values()}
            versions[one.stage] = max(versions[one.stage], len(kept))
            if one.kind == "B":
                del version[key]
    (per_micro_batch,) = set(messages.values())
    stages = sorted(flying)
    return [versions[s] for s in stages], [flying[s] for s in stages], per_micro_batch


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_pipedream_keeps_a_version_for_each_micro_batch_in_flight(depth: int) -> None:
    problem = make_problem([1] * depth, boundary_bytes=4, nodes=(depth,), global_batch_size=4)
    allocation = straight(problem, 4)
    pattern = eager(problem, allocation, update_rule="weight_stashing")
    programs = lower(problem, allocation, pattern, update_rule="weight_stashing", batches=8)
    versions, flying, messages = counted(programs)
    assert versions == flying == [depth - i for i in range(depth)]
    assert [program.stages[0].versions for program in programs] == versions
    assert [program.stages[0].update_every for program in programs] == [1] * depth
    assert messages == 2 * (depth - 1)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_2bw_keeps_two_versions(depth: int) -> None:
    problem = make_problem([1] * depth, boundary_bytes=4, nodes=(depth,), global_batch_size=depth)
    allocation = straight(problem, depth)
    pattern = eager(problem, allocation, update_rule="double_buffered")
    programs = lower(problem, allocation, pattern, update_rule="double_buffered", batches=30)
    assert counted(programs) == ([2] * depth, [depth - i for i in range(depth)], 2 * (depth - 1))


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_wpipe_keeps_two_versions_of_one_group_and_crosses_twice_as_many_boundaries(depth: int) -> None:
    number = depth + 1
    problem = make_problem([1] * (2 * depth), boundary_bytes=4, nodes=(depth,), global_batch_size=number)
    allocation = single_pipeline(tuple(Stage(s, s, (s % depth,)) for s in range(2 * depth)), number)
    programs = lower(problem, allocation, wpipe(problem, allocation), update_rule="double_grouped", batches=20)
    versions, flying, messages = counted(programs)
    assert versions == [2] * depth + [1] * depth
    assert messages == 2 * (2 * depth - 1)
    together = [Counter(one.kind for one in p.instructions())["VERSION"] for p in programs]
    assert all(count > 0 for count in together)
    peaks = [flying[i] for i in range(depth)]
    assert peaks == [number + depth - i for i in range(depth)]
    assert [flying[depth + i] for i in range(depth)] == [depth - i for i in range(depth)]


def test_2bw_with_fewer_micro_batches_than_are_in_flight_is_refused() -> None:
    """ALGORITHMS 5.1: with M = 2 and four stages a forward needs a version that does not exist yet, or no longer."""
    problem = make_problem([1] * 4, boundary_bytes=4, global_batch_size=2)
    allocation = straight(problem, 2)
    operations = tuple(
        op for s in range(4) for op in (PatternOperation(FORWARD, s, 0, s), PatternOperation(BACKWARD, s, 1, 6 - s))
    )
    with pytest.raises(InvalidPlan, match="needs weights"):
        lower(problem, allocation, Pattern("deep", 2, 1, operations), update_rule="double_buffered", batches=12)
