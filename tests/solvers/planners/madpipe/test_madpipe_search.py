"""MadPipe's searches against enumeration, their reference, the paper's example and the simulator's cost functions."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from problems import make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.memory import activation_bytes, static_bytes, transient_bytes, weight_bytes
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.planners.madpipe import paper
from penstock.solvers.planners.madpipe.chain import NEVER_NS, Chain
from penstock.solvers.planners.madpipe.contiguous import (
    Part,
    PartsAtPeriod,
    at_period,
    contiguous_optimum,
    least_memory,
    line_of,
)
from penstock.solvers.planners.madpipe.grid_kernel import grid
from penstock.solvers.planners.madpipe.label_kernel import EXISTS, NONE, SPECIAL, TOO_MANY, Rounding, special
from penstock.solvers.planners.madpipe.labels import TOLERANCE, special_optimum
from penstock.solvers.planners.madpipe.paper import first_phase
from penstock.solvers.schedules.periodic.one_f_one_b_star import minimal_period_ns
from penstock.solvers.schedules.support.stage_line import StageLine, buffer_bytes

EXACT = Rounding(1, 1, 1)


def random_chain(draw: random.Random, most_layers: int = 6, most_processors: int = 3) -> Chain:
    """Draw small numbers, so that sums and periods often meet; some loads, weights and activations are zero."""
    count = draw.randint(1, most_layers)
    return Chain.of_layers(
        [draw.randint(0, 4) for _ in range(count)],
        [draw.randint(1, 6) for _ in range(count)],
        [draw.randint(0, 3) for _ in range(count)],
        [draw.randint(0, 5) for _ in range(count + 1)],
        bandwidth_bytes_per_s=draw.choice([2, 5]) * 10**9,
        memory_bytes=draw.randint(8, 60),
        processors=draw.randint(1, most_processors),
    )


def partitions(chain: Chain) -> Iterator[list[tuple[int, int]]]:
    for count in range(1, chain.size + 1):
        for inner in itertools.combinations(range(1, chain.size), count - 1):
            yield list(itertools.pairwise((0, *inner, chain.size)))


def then(x: int, y: int, period: int) -> int:
    """Return the (+) of section 4.2.2."""
    filled = -(-x // period)
    return x + y if filled == -(-(x + y) // period) else period * filled + y


def plain(chain: Chain, stages: Sequence[tuple[int, int]], special_ones: set[int], period: int, tight: bool) -> bool:
    """Return whether one allocation keeps a period, written from section 4.2 without labels."""
    delay, resident, busy, largest, normals = 0, 0, 0, 0, 0
    hop = chain.hop_ns.max(axis=0)
    for s in reversed(range(len(stages))):
        k, j = stages[s]
        load = chain.load(k, j)
        group = max(1, -(-(delay + load) // period))
        each = int(chain.kept_bytes[0, k, j])
        if s in special_ones:
            busy += load
            resident += chain.bytes_of(k, j, 0, group - 1)
            largest = max(largest, each if tight else 0)
        else:
            normals += 1
            if load > period or chain.bytes_of(k, j, 0, group) > chain.available_bytes:
                return False
        if k > 0 and hop[k] > period:
            return False
        delay = then(then(delay, load, period), int(hop[k]), period)
    neighbours = any(s + 1 in special_ones for s in special_ones)
    return (
        normals < chain.processors
        and busy <= period
        and resident + largest <= chain.available_bytes
        and not (tight and neighbours)
    )


def possible(chain: Chain, period: int, tight: bool) -> bool:
    for stages in partitions(chain):
        for size in range(len(stages) + 1):
            for chosen in itertools.combinations(range(len(stages)), size):
                if plain(chain, stages, set(chosen), period, tight):
                    return True
    return False


@pytest.mark.parametrize("tight", [True, False])
def test_labels_decide_as_enumeration_does(tight: bool) -> None:
    draw = random.Random(1)
    seen = {EXISTS: 0, NONE: 0}
    for _ in range(150):
        chain = random_chain(draw)
        low = chain.least_period_ns()
        for period in draw.sample(range(low, 2 * low + 8), 3):
            status, _labels, stages = special(line_of(chain), period, tight, EXACT, 10**6)
            assert (status == EXISTS) == possible(chain, period, tight)
            seen[status] += 1
            if status == EXISTS:
                spans = [(k, j) for k, j, _ in stages.tolist()]
                chosen = {s for s, (_, _, how) in enumerate(stages.tolist()) if how >= SPECIAL}
                assert plain(chain, spans, chosen, period, tight)
    assert min(seen.values()) > 30


def test_possibility_never_ends_as_the_period_grows() -> None:
    draw = random.Random(2)
    for _ in range(20):
        chain = random_chain(draw, 10, 4)
        low = chain.least_period_ns()
        for decide in (
            lambda t, chain=chain: special(line_of(chain), t, True, EXACT, 10**6)[0] == EXISTS,
            lambda t, chain=chain: special(line_of(chain), t, False, EXACT, 10**6)[0] == EXISTS,
            lambda t, chain=chain: at_period(chain, t) is not None,
        ):
            answers = [decide(t) for t in range(low, 3 * low, max(1, low // 20))]
            assert answers == sorted(answers)


def line_of_parts(chain: Chain, stages: Sequence[tuple[int, int]]) -> StageLine:
    """Return the stages as a line for 1F1B*."""
    half = [int(chain.hop_ns[-1, j]) // 2 if chain.processors > 1 else 0 for _, j in stages[:-1]]
    forward = [int(chain.forward_ns[j] - chain.forward_ns[k]) for k, j in stages]
    return StageLine(
        tuple(forward),
        tuple(chain.load(k, j) - f for (k, j), f in zip(stages, forward, strict=True)),
        tuple(half),
        tuple(half),
        tuple(range(len(stages))),
        tuple(int(chain.fixed_bytes[k, j]) for k, j in stages),
        tuple(int(chain.kept_bytes[0, k, j]) for k, j in stages),
        (0,) * len(stages),
        (chain.available_bytes,) * len(stages),
        chain.most_in_flight,
    )


def test_the_thinnest_of_a_few_bytes_is_found() -> None:
    """Chains of less than 1000 bytes, to the byte: with one byte less no chain fits; some chains do not fit at all."""
    seen = 0
    for seed in range(60):
        chain = random_chain(random.Random(seed))
        least = least_memory(chain)
        longest = chain.longest_period_ns()
        assert (least is None) == (at_period(chain, longest) is None)
        if least is not None:
            seen += 1
            needed = next(n for n in range(chain.available_bytes + 1) if _fits(chain, n, longest) is not None)
            assert _fits(chain, needed, longest) == least
    assert 20 < seen < 60


def _fits(chain: Chain, available_bytes: int, period_ns: int) -> PartsAtPeriod | None:
    return at_period(replace(chain, available_bytes=available_bytes), period_ns)


def test_contiguous_optimum_against_all_partitions_under_minimal_1f1b_star() -> None:
    draw = random.Random(4)
    missing = 0
    for _ in range(200):
        chain = random_chain(draw, 7, 4)
        periods = [
            minimal_period_ns(line_of_parts(chain, stages))
            for stages in partitions(chain)
            if len(stages) <= chain.processors
        ]
        best = min((p for p in periods if p is not None), default=None)
        optimum = contiguous_optimum(chain)
        assert (None if optimum is None else optimum.period_ns) == best
        missing += optimum is None
        if optimum is not None:
            spans = [(part.first, part.after) for part in optimum.parts]
            least = minimal_period_ns(line_of_parts(chain, spans))
            assert least is not None
            assert least <= optimum.period_ns
    assert 5 < missing < 150


def test_a_special_processor_never_makes_it_worse() -> None:
    """One special stage is a normal one (tightened memory), so the search reaches the contiguous optimum at least."""
    draw = random.Random(6)
    better = 0
    for _ in range(100):
        chain = random_chain(draw, 9, 3)
        alone = contiguous_optimum(chain)
        searched = special_optimum(chain)
        assert searched.exact
        if alone is not None:
            assert searched.allocations[0].period_ns <= alone.period_ns + alone.period_ns // TOLERANCE + 1
            better += searched.allocations[0].period_ns < alone.period_ns
        below = None if alone is None else alone.period_ns
        beneath = special_optimum(chain, below_ns=below)
        if beneath.allocations:
            assert beneath.allocations[0].period_ns == searched.allocations[0].period_ns
    assert better > 10


def test_rounded_labels_are_safe() -> None:
    """A result with rounded labels also holds without rounding; where the cap is reached the answer states it."""
    draw = random.Random(8)
    for _ in range(40):
        chain = random_chain(draw, 10, 3)
        line, low = line_of(chain), chain.least_period_ns()
        for period in (low + 1, low + low // 3, 2 * low):
            rough = special(line, period, True, Rounding(3, 7, 2), 10**6)
            if rough[0] == EXISTS:
                spans = [(k, j) for k, j, _ in rough[2].tolist()]
                chosen = {s for s, (_, _, how) in enumerate(rough[2].tolist()) if how >= SPECIAL}
                assert plain(chain, spans, chosen, period, True)
    wide = Chain.of_layers(
        [draw.randint(1000, 9000) for _ in range(40)],
        [draw.randint(1000, 9000) for _ in range(40)],
        [draw.randint(0, 900) for _ in range(40)],
        [draw.randint(0, 5000) for _ in range(41)],
        bandwidth_bytes_per_s=10**9,
        memory_bytes=120_000,
        processors=4,
    )
    assert special(line_of(wide), wide.least_period_ns() * 11 // 10, True, EXACT, 50)[0] == TOO_MANY


EXAMPLE: dict[str, Any] = {"bandwidth_bytes_per_s": 8_000, "processors": 2}
SECOND = 10**9


def example(memory: int) -> Chain:
    """Return ALGORITHMS 4.3: P = 2, beta = 8, layers (1, 3), (2, 4), (1, 1), no weights, activations of 1 (1000 B)."""
    return Chain.of_layers(
        [SECOND, 2 * SECOND, SECOND],
        [3 * SECOND, 4 * SECOND, SECOND],
        [0] * 3,
        [1000] * 4,
        memory_bytes=memory * 1000,
        **EXAMPLE,
    )


@pytest.mark.parametrize(("memory", "period", "on_grid"), [(4, 8, 8.003906), (5, 8, 8.001016), (6, 6, 8), (7, 6, 6.12)])
def test_paper_example(memory: int, period: int, on_grid: float) -> None:
    """ALGORITHMS 4.3 and the vectors: literal memory, exact and on the 101 x 11 x 51 grid with K = 10."""
    exact = special_optimum(example(memory), tight=False).allocations[0]
    assert exact.period_ns == pytest.approx(period * SECOND, rel=1e-4)
    assert first_phase(example(memory))[0].period_ns == pytest.approx(on_grid * SECOND, rel=1e-6)


def test_paper_example_takes_the_two_ends_together() -> None:
    allocation = special_optimum(example(6), tight=False).allocations[0]
    assert allocation.parts == (Part(0, 1, 0, True), Part(1, 2, 0, False), Part(2, 3, 0, True))
    contiguous = contiguous_optimum(example(6))
    assert contiguous == PartsAtPeriod(8 * SECOND, (Part(0, 1, 0), Part(1, 3, 0)))


def test_the_grid_is_never_better_than_the_exact_search() -> None:
    draw = random.Random(9)
    compared = 0
    for _ in range(25):
        chain = random_chain(draw, 8, 3)
        grid = first_phase(chain)
        exact = special_optimum(chain, tight=False)
        assert not grid or exact.allocations
        if grid:
            assert exact.allocations[0].period_ns <= grid[0].period_ns * (1 + 1 / TOLERANCE) + 1
            compared += 1
    assert compared > 5


MEMORY_VARIANTS: list[dict[str, Any]] = [
    {},
    {"recompute": "auto", "workspace_bytes": [5, 0, 9, 1, 2]},
    {"recompute": "always", "count_buffers": False},
    {"shard_states": True, "state_factor": 2, "trainable_bytes": [3, 7, 0, 11, 5]},
    {"shared_parameters": (("tied", (0, 3), 17), ("other", (2, 4), 5)), "gradient_factor": 2},
    {"cuttable": [True, False, True, True]},
    {"shared": True, "latency_ns": 3, "between_bytes_per_s": 10**8},
]


@pytest.mark.parametrize("changes", MEMORY_VARIANTS, ids=lambda changes: " ".join(changes) or "plain")
@pytest.mark.parametrize(("width", "halves"), [(1, 2), (2, 2), (1, 1), (2, 0)])
def test_chain_counts_as_the_judge_does(changes: dict[str, Any], width: int, halves: int) -> None:
    """Every stage's load, transfers and bytes against ``StageLine`` and the memory functions of the simulator."""
    settings: dict[str, Any] = {
        "boundary_bytes": [7, 2, 9, 4],
        "parameter_bytes": [10, 20, 30, 40, 50],
        "stash_bytes": [100, 30, 50, 20, 10],
        "nodes": (2, 4),
        "global_batch_size": 12,
        "context_bytes": 13,
    }
    problem = make_problem([10, 20, 5, 40, 10], **(settings | changes))
    batch = batch_of(problem, 3)
    groups = [tuple(range(q * width, q * width + width)) for q in range(6 // width)]
    chain = Chain.of(problem, batch, groups, halves)
    assert chain.available_bytes == min(problem.capacity_bytes(d) for d in range(6)) - 13
    assert chain.most_in_flight == 5
    for k, j in itertools.combinations(range(chain.size + 1), 2):
        first, last = chain.cuts[k], chain.cuts[j] - 1
        for variant, again in enumerate(chain.again):
            stage = Stage(first, last, groups[0], recompute=((first, last),) if again else ())
            fixed = plain_bytes = static_bytes(problem, stage).total + weight_bytes(problem, stage)[1]
            fixed += stage_costs(problem, stage, 3).workspace_bytes + buffer_bytes(problem, stage, 3, halves)
            assert halves < 2 or fixed == plain_bytes + transient_bytes(problem, stage, 3)
            for g in (0, 1, 4):
                expected = fixed + g * activation_bytes(problem, stage, 3)
                assert chain.bytes_of(k, j, variant, g) == expected


def test_a_boundary_that_nothing_connects_is_never_used() -> None:
    problem = make_problem([10, 10, 10], boundary_bytes=4, nodes=(1, 1), between_bytes_per_s=0)
    chain = Chain.of(problem, batch_of(problem, 1), [(0,), (1,)])
    assert (chain.hop_ns[1, 1:-1] == NEVER_NS).all()
    optimum = contiguous_optimum(chain)
    assert optimum is not None
    assert len(optimum.parts) == 1
    assert np.diff(chain.load_ns[0]).sum() == optimum.period_ns


def grid_reference(chain: Chain, target: float) -> float:
    """Compute MadPipe-DP on the grid by recursion (section 4.2.2), rounded up; infinite where nothing fits."""
    n, whole = chain.size, float(chain.load_ns[0, -1])
    hop = chain.hop_ns.max(axis=0)
    steps = whole / 100, chain.available_bytes / 10, (whole + float(hop.sum())) / 50

    def up(value: float, step: float) -> int:
        return int(np.ceil(value / step - 1e-9)) if step else 0

    def then_exactly(x: float, y: float) -> float:
        filled = np.ceil(x / target - 1e-9)
        return x + y if filled == np.ceil((x + y) / target - 1e-9) else target * filled + y

    @functools.cache
    def best(j: int, p: int, t: int, m: int, v: int) -> float:
        if j == 0:
            return t * steps[0]
        least = float("inf")
        for k in range(j) if p else [0]:
            load, delay = float(chain.load(k, j)), v * steps[2]
            group = max(1, int(np.ceil((delay + load) / target - 1e-9)))
            later = up(then_exactly(then_exactly(delay, load), float(hop[k])), steps[2])
            if p and chain.bytes_of(k, j, 0, group) <= chain.available_bytes:
                least = min(least, max(load, float(hop[k]), best(k, p - 1, t, m, later)))
            resident = up(m * steps[1] + chain.bytes_of(k, j, 0, group - 1), steps[1])
            if resident <= 10:
                busy = min(100, up(t * steps[0] + load, steps[0]))
                least = min(least, max(float(hop[k]), best(k, p, busy, resident, later)))
        return least

    return best(n, chain.processors - 1, 0, 0, 0)


def test_grid_finds_what_its_reference_finds() -> None:
    draw = random.Random(10)
    nothing = 0
    for _ in range(60):
        chain = random_chain(draw)
        target = draw.uniform(0.8, 2.0) * chain.least_period_ns()
        status, period, stages = grid(line_of(chain), target, 1e9, 10**7)
        expected = grid_reference(chain, target)
        assert period == pytest.approx(expected)
        assert (status == EXISTS) == (len(stages) > 0) == (expected < float("inf"))
        nothing += status == NONE
    assert 0 < nothing < 50


def test_a_grid_beyond_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(12)
    wide = Chain.of_layers(
        [draw.randint(1000, 9000) for _ in range(40)],
        [draw.randint(1000, 9000) for _ in range(40)],
        [draw.randint(0, 90) for _ in range(40)],
        [draw.randint(0, 5000) for _ in range(41)],
        bandwidth_bytes_per_s=10**9,
        memory_bytes=300_000,
        processors=4,
    )
    monkeypatch.setattr(paper, "MOST_STATES", 2**16)
    with pytest.raises(UnsupportedRequest, match="40 layers and 4 processors has more than 65536 states") as refusal:
        first_phase(wide)
    assert refusal.value.remedy == "paper false"
