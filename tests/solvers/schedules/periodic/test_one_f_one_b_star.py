"""1F1B* and the inside-out pattern: printed examples, an independent checker, enumeration of all patterns."""

from __future__ import annotations

import itertools
import random

import pytest
from periodic_lines import faults, in_flight, make_line, random_line, with_memory
from problems import chain, make_problem, straight

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.schedules.periodic import inside_out as outwards
from penstock.solvers.schedules.periodic.inside_out import inside_out
from penstock.solvers.schedules.periodic.one_f_one_b_star import (
    chain_loads,
    fits,
    groups,
    minimal_period_ns,
    one_f_one_b_star,
    pattern,
)
from penstock.solvers.schedules.periodic.one_f_one_b_star import in_flight as counted
from penstock.solvers.schedules.support.stage_line import StageLine


def shape(steady: Pattern) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return t_F, h_F, t_B, h_B by stage."""
    by_operation = {(o.kind, o.stage): o for o in steady.operations}
    stages = range(len(steady.operations) // 2)
    forward, backward = ([by_operation[kind, s] for s in stages] for kind in (FORWARD, BACKWARD))
    return (
        [o.start_ns for o in forward],
        [o.shift for o in forward],
        [o.start_ns for o in backward],
        [o.shift for o in backward],
    )


@pytest.mark.parametrize(
    ("period", "group", "expected"),
    [
        (3, [4, 3, 2, 1], ([0, 1, 2, 0], [0, 0, 0, 1], [1, 2, 0, 1], [3, 2, 2, 1])),
        (6, [2, 2, 1, 1], ([0, 1, 2, 3], [0, 0, 0, 0], [4, 2, 0, 4], [1, 1, 1, 0])),
        (9, [2, 1, 1, 1], ([0, 1, 2, 3], [0, 0, 0, 0], [1, 8, 6, 4], [1, 0, 0, 0])),
        (12, [1, 1, 1, 1], ([0, 1, 2, 3], [0, 0, 0, 0], [10, 8, 6, 4], [0, 0, 0, 0])),
    ],
)
def test_four_equal_stages(period: int, group: list[int], expected: tuple[list[int], ...]) -> None:
    """ALGORITHMS 4.1, the verified example: four stages of F = 1, B = 2."""
    line = make_line([(1, 2)] * 4)
    assert counted(line, period) == group
    assert shape(pattern(line, period)) == expected


@pytest.mark.parametrize(
    ("period", "group"),
    [(8, [3, 3, 2, 1, 1]), (10, [3, 2, 2, 1, 1]), (15, [2, 2, 1, 1, 1]), (21, [1, 1, 1, 1, 1])],
)
def test_groups_of_unequal_elements(period: int, group: list[int]) -> None:
    """ALGORITHMS 4.1, loads 2, 1, 4, 0.5, 3 in halves."""
    assert groups([4, 2, 8, 1, 6], period) == group


def test_random_patterns_are_valid_and_keep_g() -> None:
    """R-17: a stage of group g keeps exactly g micro-batches, never less, never more."""
    draw = random.Random(7)
    for _ in range(5000):
        line = random_line(draw)
        period = draw.randint(max(chain_loads(line)), sum(chain_loads(line)) * 11 // 10)
        steady = pattern(line, period)
        assert faults(line, steady, rounds=4) == []
        assert in_flight(line, steady) == counted(line, period)


@pytest.mark.tier("nightly")
def test_no_pattern_keeps_fewer() -> None:
    """Proposition 1 on all patterns of two stages with a channel: starts are within a period of their inputs' ends."""
    draw = random.Random(3)
    for _ in range(40):
        durations = [draw.randint(1, 2) for _ in range(4)]
        hop = (draw.randint(0, 1), draw.randint(0, 1))
        line = make_line([(durations[0], durations[1]), (durations[2], durations[3])], [hop])
        for period in range(max(chain_loads(line)), min(7, sum(chain_loads(line)) + 1)):
            assert counted(line, period) == _fewest(line, period)


def _fewest(line: StageLine, period: int) -> list[int]:
    """Return the fewest micro-batches of each stage in any pattern; the channel carries one transfer at a time."""
    path = [
        (0, line.forward_ns[0]),
        ("link", line.hop_forward_ns[0]),
        (1, line.forward_ns[1]),
        (1, line.backward_ns[1]),
        ("link", line.hop_backward_ns[0]),
        (0, line.backward_ns[0]),
    ]
    fewest = [10**6, 10**6]
    for waits in itertools.product(range(period), repeat=5):
        starts = [0]
        for (_resource, duration), wait in zip(path, waits, strict=False):
            starts.append(starts[-1] + duration + wait)
        busy: set[tuple[object, int]] = set()
        clash = False
        for (resource, duration), start in zip(path, starts, strict=True):
            slots = {(resource, (start + i) % period) for i in range(duration)}
            clash |= bool(slots & busy) or len(slots) < duration
            busy |= slots
        if clash:
            continue
        for s, (f, b) in enumerate(((0, 5), (2, 3))):
            fewest[s] = min(fewest[s], -((starts[f] - starts[b] - path[b][1]) // period))
    return fewest


def test_minimal_period_is_the_first_that_fits() -> None:
    draw = random.Random(5)
    missing = 0
    for _ in range(60):
        count = draw.randint(1, 5)
        line = make_line(
            [(draw.randint(0, 4), draw.randint(0, 5)) for _ in range(count)],
            [(draw.randint(0, 2), draw.randint(0, 2)) for _ in range(count - 1)],
            kept_bytes=[draw.randint(1, 5) for _ in range(count)],
            available_bytes=draw.randint(4, 16),
            most_in_flight=draw.randint(1, 6),
        )
        loads = chain_loads(line)
        first = next((t for t in range(max(1, *loads), sum(loads) + 2) if fits(line, counted(line, t))), None)
        assert minimal_period_ns(line) == first
        missing += first is None
    assert 0 < missing < 60


def test_up_to_two_p_minus_one_micro_batches() -> None:
    """M3 (ALGORITHMS 8): reached when every channel is a separate group."""
    line = make_line([(2, 4)] * 4, [(3, 3)] * 3)
    assert counted(line, 6) == [7, 5, 3, 1]


def test_inside_out_is_one_f_one_b_star_on_contiguous_lines() -> None:
    draw = random.Random(11)
    for _ in range(300):
        line = random_line(draw)
        period = draw.randint(max(chain_loads(line)), sum(chain_loads(line)))
        steady = outwards.at_period(line, period)
        assert steady is not None
        assert faults(line, steady) == []
        assert in_flight(line, steady) == counted(line, period)


def test_inside_out_with_a_special_processor_is_valid() -> None:
    draw = random.Random(13)
    patterns = 0
    for _ in range(200):
        line = random_line(draw, 8, shared=True)
        line = with_memory(line, draw.randint(10, 60))
        steady = outwards.smallest(line)
        if steady is None:
            continue
        patterns += 1
        assert steady.period_ns >= line.load_bound_ns()
        assert faults(line, steady) == []
    assert 100 < patterns < 200


def test_example_of_two_processors() -> None:
    """ALGORITHMS 4.4: (1, 1), (2, 2), (1, 1) on processors 0, 1, 0: periods 6, 5, 4 for 2, 3, 4 micro-batches."""
    line = make_line([(1, 1), (2, 2), (1, 1)], processor=[0, 1, 0])
    periods = []
    for memory in (2, 3, 4):
        steady = outwards.smallest(with_memory(line, memory))
        periods.append(None if steady is None else steady.period_ns)
    assert periods == [6, 5, 4]


def test_plan_functions_say_what_they_cannot_do() -> None:
    problem = make_problem([10, 10, 10], boundary_bytes=1, nodes=(3,), global_batch_size=4)
    shared = chain([(1, [0]), (1, [1]), (1, [0])], 4)
    with pytest.raises(InvalidPlan, match="holds several"):
        one_f_one_b_star(problem, shared)
    assert inside_out(problem, shared).period_ns >= 60
    with pytest.raises(InvalidPlan, match="below the longest"):
        one_f_one_b_star(problem, straight(problem, 4), period_ns=5)
    turns = chain([(3, [0, 1])], 4, dispatch="round_robin")
    with pytest.raises(UnsupportedRequest, match="split each micro-batch"):
        one_f_one_b_star(problem, turns)
    tight = make_problem([10, 10], parameter_bytes=5, nodes=(2,), memory_bytes=14)
    with pytest.raises(InvalidPlan, match="two versions"):
        one_f_one_b_star(tight, straight(tight, 4))
    with pytest.raises(InvalidPlan, match="no period was found"):
        inside_out(tight, straight(tight, 4))


def test_two_versions_limit_what_is_in_flight() -> None:
    """M >= g - 1: with two micro-batches a stage keeps at most three, so the period grows."""
    few, many = (make_problem([10] * 5, nodes=(5,), global_batch_size=m) for m in (2, 16))
    periods = [one_f_one_b_star(p, straight(p, p.global_batch_size)).period_ns for p in (few, many)]
    assert periods == [60, 30]
