"""Parts of the model on devices in a loop or a V, and the planners ``interleaved`` and ``zero-bubble``."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from problems import make_problem

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.grid.parts_in_turn import IN_A_V, Turns, even_sums, laid_out
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Status
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.solve.driver import solve

pytestmark = pytest.mark.tier("ci")

NAMES = ["interleaved", "zero-bubble"]


def drawn(seed: int, **more: object) -> Problem:
    rng = random.Random(seed)
    layers = rng.randint(8, 14)
    settings: dict[str, object] = {
        "nodes": rng.choice([(4,), (2, 2), (3, 3)]),
        "global_batch_size": rng.randint(4, 12),
        "micro_batch_sizes": rng.choice([(), (1,)]),
        "shared": rng.random() < 0.5,
        "recompute": rng.choice(["never", "auto", "always"]),
    }
    return make_problem(
        [rng.randint(50, 150) for _ in range(layers)],
        None,
        [rng.randint(0, 30) for _ in range(layers - 1)],
        [rng.randint(0, 90) for _ in range(layers)],
        stash_bytes=[rng.randint(1, 100) for _ in range(layers)],
        update_ns=3,
        **(settings | more),  # type: ignore[arg-type]
    )


def sums_of(times: np.ndarray, rank_of: list[int], bounds: list[int]) -> list[int]:
    return [
        sum(int(times[r, bounds[k] : bounds[k + 1]].sum()) for k, owner in enumerate(rank_of) if owner == r)
        for r in range(len(times))
    ]


@pytest.mark.tier("quick")
@pytest.mark.parametrize("shape", [[0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 2, 2, 1, 0], [0, 1]])
@pytest.mark.parametrize("seed", range(8))
def test_sums_are_nearly_as_even_as_can_be(seed: int, shape: list[int]) -> None:
    """Against every choice of cuts: at most a fifth above on these small chains, and seldom above at all."""
    rng = random.Random(seed)
    layers = 11
    times = np.asarray([[rng.randint(1, 9) for _ in range(layers)]] * (max(shape) + 1))
    loads = np.concatenate((np.zeros((len(times), 1), dtype=np.int64), np.cumsum(times, axis=1)), axis=1)
    cuttable = np.asarray([rng.random() < 0.9 for _ in range(layers - 1)])
    places = [i + 1 for i in range(layers - 1) if cuttable[i]]
    least = min(max(sums_of(times, shape, [0, *cuts, layers])) for cuts in combinations(places, len(shape) - 1))
    bounds = even_sums(loads, cuttable, shape)
    assert set(bounds[1:-1]) <= set(places)
    assert bounds == sorted(set(bounds))
    assert max(sums_of(times, shape, bounds)) <= 1.2 * least


@pytest.mark.tier("quick")
def test_ranks_of_two_kinds_get_work_by_their_speed() -> None:
    problem = make_problem([10] * 18, nodes=(2,), kinds=["cpu", "fast"], speed={"fast": 2.0}, global_batch_size=4)
    allocation = laid_out(problem, batch_of(problem, 1), ((0,), (1,)), IN_A_V)
    layers = [sum(s.last - s.first + 1 for s in allocation.stages if s.devices == (d,)) for d in (0, 1)]
    assert layers == [6, 12]


@pytest.mark.tier("quick")
def test_places_of_chunks() -> None:
    problem = make_problem([10] * 12, nodes=(2, 2), global_batch_size=4)
    places = [(0, 1), (2, 3)]
    loop = laid_out(problem, batch_of(problem, 2), places, Turns("loop", 3))
    assert [stage.devices for stage in loop.stages] == places * 3
    vee = laid_out(problem, batch_of(problem, 2), places, IN_A_V)
    assert [stage.devices for stage in vee.stages] == [*places, *places[::-1]]
    assert [stage.last - stage.first + 1 for stage in vee.stages] == [3, 3, 3, 3]
    with pytest.raises(UnsupportedRequest, match="14 parts need 14 separable blocks of layers; there are 12"):
        laid_out(problem, batch_of(problem, 2), places, Turns("loop", 7))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_plans_are_judged_verified_and_above_the_bounds(seed: int, name: str) -> None:
    """``solve`` verifies; every bound is below the value, and recomputation is as requested."""
    problem = drawn(seed)
    result = solve(problem, name)
    assert result.best is not None
    assert all(bound.bound_ns <= result.best.value_ns for bound in result.bounds)
    again = [bool(stage.recompute) for stage in result.best.allocation.stages]
    assert {"never": not any(again), "always": all(again), "auto": True}[problem.recompute]
    assert solve(problem, name).best.value_ns == result.best.value_ns  # type: ignore[union-attr]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "schedule"), [(name, schedule) for name in NAMES for schedule in PLANNERS[name].accepts]
)
def test_each_schedule_may_be_asked_for(name: str, schedule: str) -> None:
    problem = drawn(3, nodes=(4,), micro_batch_sizes=(), recompute="never", global_batch_size=8)
    best = solve(problem, name, schedule=schedule).best
    assert best is not None
    assert best.schedule.name == schedule


def test_less_bubble_than_one_part_each() -> None:
    """Equal layers, few micro-batches: the order of the papers' claims."""
    problem = make_problem([100] * 16, nodes=(4,), global_batch_size=8, micro_batch_sizes=(1,))
    gpipe, interleaved, zero = (
        solve(problem, name, options=options).best
        for name, options in (("gpipe", {"stages": 4}), ("interleaved", {"depth": 4}), ("zero-bubble", {"depth": 4}))
    )
    assert gpipe is not None
    assert interleaved is not None
    assert zero is not None
    assert gpipe.value_ns == (8 + 3) * 1200
    assert interleaved.value_ns == 8 * 1200 + 3 * 1200 // 4, "M (F + B) + (p - 1) (F + B) / v with v = 4"
    assert zero.value_ns == 8 * 1200 + 3 * 200, "no bubble of the last rank after its fill of p - 1 chunks"


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_little_memory_is_kept_to(name: str) -> None:
    """Where the plain orders do not fit, recomputation or orders that keep less do; the resulting plans fit."""
    free = drawn(1, nodes=(4,), recompute="auto", micro_batch_sizes=(1,))
    roomy = solve(free, name).best
    assert roomy is not None
    need = roomy.timeline.peak_memory_bytes
    for memory_bytes in (need - 1, need * 3 // 4):
        tight = solve(drawn(1, nodes=(4,), recompute="auto", micro_batch_sizes=(1,), memory_bytes=memory_bytes), name)
        assert tight.best is not None
        assert tight.best.timeline.peak_memory_bytes <= memory_bytes
        assert tight.best.value_ns >= roomy.value_ns
    none = solve(drawn(1, nodes=(4,), recompute="never", micro_batch_sizes=(1,), memory_bytes=10), name)
    assert none.status is Status.INFEASIBLE
    assert none.shortage is not None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnsupportedRequest, match="needs 2 devices and 4 separable blocks"):
        solve(make_problem([1] * 8, nodes=(1,)), "interleaved")
    with pytest.raises(UnsupportedRequest, match="needs 2 devices and 4 separable blocks"):
        solve(make_problem([1] * 3, nodes=(4,)), "zero-bubble", options={"shape": "v"})
    with pytest.raises(InvalidDocument, match="is 5 devices in a pipeline"):
        solve(make_problem([1] * 8, nodes=(4,)), "zero-bubble", options={"depth": 5})
    with pytest.raises(InvalidDocument, match="not interleave"):
        solve(make_problem([1] * 8, nodes=(4,)), "interleaved", options={"chunks": 1})


@pytest.mark.parametrize("shape", ["line", "v"])
def test_shapes_and_depths_may_be_asked_for(shape: str) -> None:
    problem = drawn(2, nodes=(4,))
    best = solve(problem, "zero-bubble", options={"shape": shape, "depth": 2}).best
    assert best is not None
    assert len({stage.devices for stage in best.allocation.stages}) == 2
    assert len(best.allocation.stages) == (2 if shape == "line" else 4)
    assert len(best.allocation.stages[0].devices) == 2
