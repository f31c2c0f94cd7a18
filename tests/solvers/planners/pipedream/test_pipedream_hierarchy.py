"""PipeDream's hierarchical partition: enumeration, the worked example, the released optimizer's arithmetic, levels."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import combinations, pairwise
from math import ceil, inf
from typing import Any

import numpy as np
import pytest
from problems import make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.planners.pipedream.hierarchy import (
    Chain,
    Level,
    Plan,
    Rules,
    chain_of,
    device_order,
    levels_of,
    partition,
)

PLENTY = 2**50
SECOND = 10**9


def make_chain(work: list[int], parameters: list[int], boundary: list[int], room: int = PLENTY) -> Chain:
    def between(values: list[int]) -> np.ndarray:
        prefix = np.concatenate(([0], np.cumsum(np.asarray(values, dtype=np.int64))))
        return prefix[None, :] - prefix[:, None]

    return Chain(
        np.arange(len(work) + 1),
        between(work),
        between(parameters),
        between(parameters),
        np.asarray([0, *boundary, 0], dtype=np.int64),
        room,
    )


def drawn(seed: int, most_layers: int = 6) -> tuple[list[int], list[int], list[int], np.random.Generator]:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, most_layers + 1))
    work = draw.integers(0, 1_000, count).tolist()
    return work, draw.integers(0, 3_000, count).tolist(), draw.integers(0, 900, max(0, count - 1)).tolist(), draw


def time_of(bytes_: int, bandwidth: int) -> int:
    return -(-bytes_ * SECOND // bandwidth)


def splits(count: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *cuts, count) for cuts in combinations(range(1, count), parts - 1)]


def enumerated(
    work: list[int], parameters: list[int], boundary: list[int], level: Level, rules: Rules, room: int = PLENTY
) -> float:
    """Return the best value of every partition and replication on one level, by ALGORITHMS 7.4 or R-35."""
    m, bandwidth = level
    best: float = inf
    for stages in range(1, min(len(work), m) + 1):
        for cuts in splits(len(work), stages):
            for shares in splits(m, stages):
                value = 0
                for number, ((i, j), (low, high)) in enumerate(zip(pairwise(cuts), pairwise(shares), strict=True)):
                    replicas = high - low
                    weights = sum(parameters[i:j])
                    under_way = m - high if rules.released else m - low
                    if ceil(Fraction(under_way, replicas)) * weights > room:
                        value = 2**62
                        break
                    reduce = time_of(2 * weights, bandwidth)
                    if rules.released:
                        share = ceil(Fraction(2 * (replicas - 1) * reduce, replicas))
                        value = max(value, ceil(Fraction(sum(work[i:j]) + share, replicas)))
                    else:
                        value = max(value, ceil(Fraction(max(sum(work[i:j]), (replicas - 1) * reduce), replicas)))
                    if number and not rules.released:
                        value = max(value, time_of(2 * boundary[i - 1], bandwidth))
                    for place in [i, j][:stages] if number and rules.compression else []:
                        size = ceil(Fraction([*boundary, 0][place - 1]) / Fraction(rules.compression))
                        value = max(value, ceil(Fraction(time_of(2 * size, bandwidth), replicas)))
                if value < 2**62:
                    best = min(best, value)
    return best


@pytest.mark.parametrize("rules", [Rules(), Rules(released=True), Rules(True, 2.0)])
def test_one_level_is_the_best_of_all_partitions(rules: Rules) -> None:
    for seed in range(200):
        work, parameters, boundary, draw = drawn(seed)
        level = Level(int(draw.integers(1, 5)), int(draw.integers(10**9, 10**10)))
        room = PLENTY if seed % 2 else int(draw.integers(1_000, 12_000))
        plan = partition(make_chain(work, parameters, boundary, room), (level,), rules)
        assert (inf if plan is None else plan.value_ns) == enumerated(work, parameters, boundary, level, rules, room)


def recursive(
    work: list[int], parameters: list[int], boundary: list[int], levels: list[Level], exact: bool
) -> Fraction | int:
    """Compute the recursion of ALGORITHMS 7.4 as printed: in exact fractions, or with each time rounded up."""
    up: Any = (lambda x: x) if exact else ceil

    def of_level(k: int) -> Any:
        if k == 0:
            return lambda i, j, m: sum(work[i : j + 1])
        inside, machines = of_level(k - 1), levels[k - 2].machines if k > 1 else 1
        bandwidth = levels[k - 1].bandwidth_bytes_per_s

        def replicated(i: int, j: int, m: int) -> Any:
            reduce = up(Fraction(2 * sum(parameters[i : j + 1]) * SECOND, bandwidth))
            return up(Fraction(max(inside(i, j, machines), (m - 1) * reduce)) / m)

        @lru_cache(None)
        def value(i: int, j: int, m: int) -> Any:
            best = replicated(i, j, m)
            for s in range(i, j):
                hop = up(Fraction(2 * boundary[s] * SECOND, bandwidth))
                for behind in range(1, m):
                    best = min(best, max(value(i, s, m - behind), hop, replicated(s + 1, j, behind)))
            return best

        return value

    best_value: Fraction | int = of_level(len(levels))(0, len(work) - 1, levels[-1].machines)
    return best_value


def value_of(plan: Plan, work: list[int], parameters: list[int], boundary: list[int], levels: list[Level]) -> int:
    """Compute the value of a two-level plan from its parts alone: stages inside a machine, and machines in a row."""
    size = levels[0].machines
    by_machines: dict[tuple[int, ...], list[Any]] = {}
    for part in plan.parts:
        by_machines.setdefault(tuple(sorted({p // size for p in part.positions})), []).append(part)
    value = 0
    for machines, parts in by_machines.items():
        inner = 0
        for number, part in enumerate(parts):
            replicas = len(part.positions) // len(machines)
            reduce = time_of(2 * sum(parameters[part.first : part.stop]), levels[0].bandwidth_bytes_per_s)
            spent = max(sum(work[part.first : part.stop]), (replicas - 1) * reduce)
            inner = max(inner, -(-spent // replicas))
            if number:
                inner = max(inner, time_of(2 * boundary[part.first - 1], levels[0].bandwidth_bytes_per_s))
        first, stop = parts[0].first, parts[-1].stop
        reduce = time_of(2 * sum(parameters[first:stop]), levels[1].bandwidth_bytes_per_s)
        value = max(value, -(-max(inner, (len(machines) - 1) * reduce) // len(machines)))
        if first:
            value = max(value, time_of(2 * boundary[first - 1], levels[1].bandwidth_bytes_per_s))
    return value


def test_two_levels_are_the_recursion_and_the_plan_is_worth_its_value() -> None:
    for seed in range(80):
        work, parameters, boundary, draw = drawn(seed)
        levels = [Level(int(draw.integers(1, 4)), 8 * 10**9), Level(int(draw.integers(1, 4)), 10**9)]
        plan = partition(make_chain(work, parameters, boundary), levels, Rules())
        assert plan is not None
        assert plan.value_ns == recursive(work, parameters, boundary, levels, exact=False)
        exact = recursive(work, parameters, boundary, levels, exact=True)
        assert exact <= plan.value_ns <= exact + 2 * sum(level.machines for level in levels)
        assert value_of(plan, work, parameters, boundary, levels) == plan.value_ns
        positions = sorted(p for part in plan.parts for p in part.positions)
        assert positions == list(range(levels[0].machines * levels[1].machines))
        assert [part.first for part in plan.parts] == [0, *(part.stop for part in plan.parts[:-1])]
        assert plan.parts[-1].stop == len(work)


@pytest.mark.parametrize(
    ("levels", "value"),
    [
        pytest.param([Level(2, 8)], 2, id="one-level"),
        pytest.param([Level(2, 8), Level(2, 2)], 1, id="two-levels"),
    ],
)
def test_the_worked_example(levels: list[Level], value: int) -> None:
    """ALGORITHMS 7.4: four layers, t = w = a = 1 s, 1 B, 1 B."""
    plan = partition(make_chain([SECOND] * 4, [1] * 4, [1] * 3), levels, Rules())
    assert plan is not None
    assert plan.value_ns == value * SECOND


def test_without_communication_the_optimum_is_the_best_balance_of_replicated_stages() -> None:
    """ALGORITHMS 7.4's test: B = infinity; parameters and boundaries of no bytes are the same thing."""
    plan = partition(make_chain([6, 2, 2, 2], [0] * 4, [0] * 3), (Level(4, 1),), Rules())
    assert plan is not None
    assert plan.value_ns == 3
    assert [(part.first, part.stop, part.positions) for part in plan.parts] == [(0, 4, (0, 1, 2, 3))]


def test_the_memory_rule_may_leave_nothing() -> None:
    """Both layers together keep 20 bytes, and the first of two stages two micro-batches of 10 bytes each."""
    chain = make_chain([1, 1], [10, 10], [0], room=19)
    assert partition(chain, (Level(2, 1),), Rules()) is None
    assert partition(chain, (Level(2, 1),), Rules(released=True)) is not None


def test_levels_follow_the_cluster() -> None:
    plain = make_problem([1] * 4, nodes=(2, 2), inside_bytes_per_s=8 * SECOND)
    assert levels_of(plain) == (Level(2, 8 * SECOND), Level(2, SECOND))
    assert device_order(plain) == (0, 1, 2, 3)
    assert levels_of(make_problem([1], nodes=(3, 1), inside_bytes_per_s=8 * SECOND)) == (Level(4, SECOND),)
    assert levels_of(make_problem([1], nodes=(1, 1, 1))) == (Level(3, SECOND),)
    assert levels_of(make_problem([1], nodes=(4,), inside_bytes_per_s=8 * SECOND)) == (Level(4, 8 * SECOND),)
    assert levels_of(make_problem([1], nodes=(1,))) == (Level(1, 0),)


def test_the_chain_has_places_where_it_may_be_cut() -> None:
    problem = make_problem([5, 6, 7, 8], boundary_bytes=[1, 2, 3], cuttable=[True, False, True], global_batch_size=2)
    chain = chain_of(problem, batch_of(problem, 2))
    assert chain.places.tolist() == [0, 1, 3, 4]
    assert chain.work_ns[0].tolist() == [0, 30, 108, 156]
    assert chain.boundary_bytes.tolist() == [0, 2, 6, 0]


def test_devices_of_several_kinds_are_refused() -> None:
    problem = make_problem([1, 1], nodes=(2,), kinds=["fast", "cpu"], speed={"fast": 2.0})
    with pytest.raises(UnsupportedRequest, match="the cluster has cpu, fast") as refused:
        chain_of(problem, batch_of(problem, 1))
    assert refused.value.remedy is not None
