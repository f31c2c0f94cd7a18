"""Published schedules with several parts on a device or split backwards: letter by letter, spans, bubbles, peaks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import make_problem, straight

from penstock.convert.torch_csv import onto, to_csv
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.interleaved import interleaved, looped_bfs
from penstock.solvers.schedules.overtaking import improved
from penstock.solvers.schedules.support.chained import Chained
from penstock.solvers.schedules.support.recomputed import recomputed, recomputing
from penstock.solvers.schedules.support.reordering import PERIOD
from penstock.solvers.schedules.v_shape import (
    V_HALF,
    V_MIN,
    V_ZERO,
    Offsets,
    building_block,
    v_half,
    v_min,
    zb_v,
)
from penstock.solvers.schedules.zero_bubble import zb_h1, zb_h2
from penstock.solvers.verify.verifier import verify

Generator = Callable[[Problem, Allocation], Orders]
TIMES = [(10, 10, 10), (20, 25, 15), (40, 50, 30), (20, 30, 10)]


def loop(p: int, v: int, number: int, forward: int = 10, backward: int = 20) -> tuple[Problem, Allocation]:
    """Build p ranks with v stages each, stage c p + r on rank r."""
    problem = make_problem([forward] * (p * v), [backward] * (p * v), nodes=(p,), global_batch_size=number)
    return problem, single_pipeline(tuple(Stage(s, s, (s % p,)) for s in range(p * v)), number)


def vee(p: int, number: int, times: tuple[int, int, int] = (10, 10, 10)) -> tuple[Problem, Allocation]:
    """Build p ranks, stages r and 2 p - 1 - r on rank r."""
    forward, inputs, weights = ([each] * (2 * p) for each in times)
    backward = [i + w for i, w in zip(inputs, weights, strict=True)]
    problem = make_problem(forward, backward, weight_ns=weights, nodes=(p,), global_batch_size=number)
    return problem, single_pipeline(tuple(Stage(s, s, (min(s, 2 * p - 1 - s),)) for s in range(2 * p)), number)


def line(p: int, number: int, times: tuple[int, int, int] = (10, 10, 10)) -> tuple[Problem, Allocation]:
    """Build a stage on each device."""
    forward, inputs, weights = ([each] * p for each in times)
    backward = [i + w for i, w in zip(inputs, weights, strict=True)]
    problem = make_problem(forward, backward, weight_ns=weights, nodes=(p,), global_batch_size=number)
    return problem, straight(problem, number)


def judged(problem: Problem, allocation: Allocation, orders: Orders) -> Timeline:
    timeline = simulate(problem, allocation, orders)
    assert verify(problem, allocation, orders, timeline) == []
    assert schedule_bound(problem, allocation, orders).bound_ns <= timeline.time_per_global_batch_ns
    assert request_bound(problem).bound_ns <= timeline.time_per_global_batch_ns
    return timeline


def text(orders: Orders, rank: int, name: Callable[[int, int, int], str]) -> str:
    return " ".join(name(*operation) for operation in orders.rows[rank].operations.tolist())


def kept(orders: Orders) -> list[int]:
    """Return the most micro-batches that each rank keeps, of all its stages, from F to B or W."""
    change = np.asarray([1, -1, 0, -1, 0])
    return [int(np.cumsum(change[row.operations[:, 0]]).max()) for row in orders.rows]


def idle(timeline: Timeline) -> list[int]:
    """Return each rank's idle time between its first and its last operation."""
    return [
        int(track.end_ns[-1] - track.start_ns[0] - (track.end_ns - track.start_ns).sum()) for track in timeline.tracks
    ]


def test_interleaved_is_the_appendixs() -> None:
    """ALGORITHMS appendix C: p = 2, v = 2, M = 4."""
    orders = interleaved(*loop(2, 2, 4))
    wanted = (
        "F0.c0 F1.c0 F0.c1 F1.c1 F2.c0 B0.c1 F3.c0 B1.c1 F2.c1 B0.c0 F3.c1 B1.c0 B2.c1 B3.c1 B2.c0 B3.c0",
        "F0.c0 F1.c0 F0.c1 B0.c1 F1.c1 B1.c1 F2.c0 B0.c0 F3.c0 B1.c0 F2.c1 B2.c1 F3.c1 B3.c1 B2.c0 B3.c0",
    )
    for rank, row in enumerate(wanted):
        assert text(orders, rank, lambda kind, s, m: f"{KINDS[kind]}{m}.c{s // 2}") == row


@pytest.mark.parametrize(
    ("generator", "row"),
    [
        (zb_h1, "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7"),
        (zb_h2, "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 W0 F7 B3 W1 B4 W2 B5 W3 B6 W4 B7 W5 W6 W7"),
    ],
)
def test_zero_bubble_is_the_appendixs(generator: Generator, row: str) -> None:
    """ALGORITHMS appendix C: p = 4, M = 8, rank 1; B is our I."""
    assert text(generator(*line(4, 8)), 1, lambda kind, _s, m: f"{'FBBW'[kind]}{m}") == row


def test_zb_v_is_the_appendixs() -> None:
    """ALGORITHMS appendix C: n = 2, M = 4; ' is the second chunk."""
    orders = zb_v(*vee(2, 4))
    wanted = (
        "F0 F1 F2 F0' B0' W0' F1' B1' W1' F3 B0 W0 F2' B2' W2' B1 W1 F3' B3' W3' B2 W2 B3 W3",
        "F0 F0' F1 F1' B0' W0' F2 B0 W0 F2' B1' W1' F3 B1 W1 F3' B2' W2' B2 B3' B3 W2 W3' W3",
    )
    for rank, row in enumerate(wanted):
        assert text(orders, rank, lambda kind, s, m: f"{'FBBW'[kind]}{m}" + "'" * (s >= 2)) == row


@pytest.mark.parametrize(("p", "v", "number"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (3, 4, 6), (4, 2, 16)])
def test_interleaved_spans_and_peaks(p: int, v: int, number: int) -> None:
    """ALGORITHMS 7.5, 5.7: M (F + B) + (p - 1) (F + B) / v, F and B of all chunks of a rank; the peaks in chunks."""
    problem, allocation = loop(p, v, number)
    orders, whole = interleaved(problem, allocation), 30 * v
    assert judged(problem, allocation, orders).time_per_global_batch_ns == number * whole + (p - 1) * whole // v
    assert kept(orders) == [min(number * v, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)]
    broad = looped_bfs(problem, allocation)
    assert judged(problem, allocation, broad).time_per_global_batch_ns == number * whole + (p - 1) * whole // v
    assert kept(broad) == [number * v] * p


def test_breadth_first_with_one_chunk_is_gpipe() -> None:
    problem, allocation = loop(4, 1, 8)
    assert judged(problem, allocation, looped_bfs(problem, allocation)).time_per_global_batch_ns == (8 + 3) * 30


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "number"), [(4, 8), (4, 12), (6, 12)])
def test_zero_bubble_bubbles_and_peaks(p: int, number: int, times: tuple[int, int, int]) -> None:
    """ALGORITHMS 7.6: the longest idle time of a rank, for H1 and H2, and micro-batches from F to W."""
    problem, allocation = line(p, number, times)
    forward, inputs, weights = times
    for generator, late, most in ((zb_h1, 1, p), (zb_h2, 2, 2 * p - 1)):
        orders = generator(problem, allocation)
        timeline = judged(problem, allocation, orders)
        assert max(idle(timeline)) == (p - 1) * max(0, forward + inputs - late * weights)
        assert kept(orders) == [min(number, most)] * p


@pytest.mark.parametrize(("p", "number"), [(2, 4), (4, 8), (4, 24), (6, 24), (9, 36)])
def test_zb_v_has_no_bubble(p: int, number: int) -> None:
    """ALGORITHMS 7.6: bubble 0 for equal times, 2 p chunks kept."""
    problem, allocation = vee(p, number)
    orders = zb_v(problem, allocation)
    assert idle(judged(problem, allocation, orders)) == [0] * p
    assert kept(orders) == [2 * p] * p


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize(("generator", "offsets"), [(v_half, V_HALF), (v_min, V_MIN)])
def test_v_schedules_keep_half_and_a_third(p: int, generator: Generator, offsets: Offsets) -> None:
    """The paper's peaks, in micro-batches: (p + 2) // 2 for V-half, (p + 4) // 3 for V-min; one more takes a period."""
    number = 4 * p
    orders = generator(*vee(p, number))
    span = judged(*vee(p, number), orders).time_per_global_batch_ns
    lives = [(block[5] + 1 - block[0], block[4] + 1 - block[1]) for block in building_block(p, offsets)]
    assert max(kept(orders)) <= max(sum(-(-life // PERIOD) for life in block_lives) for block_lives in lives)
    assert max(kept(orders)) == 2 * {v_half: (p + 2) // 2, v_min: (p + 4) // 3}[generator]
    more = vee(p, number + 1)
    assert judged(*more, generator(*more)).time_per_global_batch_ns - span == 10 * PERIOD


@pytest.mark.cases(14)
@pytest.mark.parametrize("number", [2, 3, 6])
@pytest.mark.parametrize(
    ("generator", "p", "bubbles"),
    [
        (v_half, 4, (5, 170, 120)),
        (v_half, 5, (11, 305, 240)),
        (v_half, 8, (17, 490, 376)),
        (v_half, 9, (23, 625, 496)),
        (v_half, 12, (29, 820, 636)),
        (v_half, 16, (41, 1135, 892)),
        (v_min, 4, (11, None, None)),
        (v_min, 6, (17, None, None)),
        (v_min, 8, (27, None, None)),
        (v_min, 12, (41, None, None)),
        (v_min, 16, (59, None, None)),
    ],
)
def test_v_schedules_are_as_long_as_the_authors(
    generator: Generator, p: int, bubbles: tuple[int | None, ...], number: int
) -> None:
    """A step less a rank's work, of the orders of the authors' scheduler for 2 p, 3 p and 6 p micro-batches.

    ``zbv_greedy`` of github.com/sail-sg/zero-bubble-pipeline-parallelism, for times (1, 1, 1), (20, 25, 15) and
    (20, 20, 16); V-min's bubbles grow with the micro-batches where times differ.
    """
    for times, bubble in zip(((1, 1, 1), (20, 25, 15), (20, 20, 16)), bubbles, strict=True):
        if bubble is not None:
            problem, allocation = vee(p, number * p, times)
            span = makespan_ns(problem, allocation, generator(problem, allocation))
            assert span == 2 * number * p * sum(times) + bubble


@pytest.mark.parametrize(
    ("p", "number", "bubbles"), [(3, 6, (265, 144)), (6, 12, (715, 432)), (6, 18, (895, 480)), (8, 16, (1050, 664))]
)
def test_v_min_for_unequal_times_is_as_long_as_the_authors(p: int, number: int, bubbles: tuple[int, int]) -> None:
    """The same test as above, for V-min and times (20, 25, 15) and (20, 20, 16)."""
    for times, bubble in zip(((20, 25, 15), (20, 20, 16)), bubbles, strict=True):
        problem, allocation = vee(p, number, times)
        span = makespan_ns(problem, allocation, v_min(problem, allocation))
        assert span == 2 * number * sum(times) + bubble


@pytest.mark.cases(3)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize(("generator", "most"), [(v_half, lambda p: (p + 2) // 2), (v_min, lambda p: (p + 4) // 3)])
def test_fewer_micro_batches_take_less_and_keep_no_more(
    p: int, generator: Generator, most: Callable[[int], int]
) -> None:
    """For equal times: a micro-batch less saves time, and no number of them leaves more bubble than 2 p and more."""
    spans = []
    for number in range(1, 2 * p + 2):
        problem, allocation = vee(p, number, (1, 1, 1))
        orders = generator(problem, allocation)
        spans.append(judged(problem, allocation, orders).time_per_global_batch_ns)
        assert max(kept(orders)) <= 2 * min(number, most(p))
    assert spans == sorted(set(spans))
    bubbles = [span - PERIOD * number for number, span in enumerate(spans, start=1)]
    assert bubbles[-1] == bubbles[-2] == max(bubbles[p:])


def test_offsets_trade_room_for_time() -> None:
    """V-min keeps least, ZB-V's offsets most; the more micro-batches are kept, the shorter the step."""
    problem, allocation = vee(8, 32, (10, 12, 8))
    all_orders = [generator(problem, allocation) for generator in (v_min, v_half, zb_v)]
    assert [max(kept(orders)) for orders in all_orders] == sorted(max(kept(orders)) for orders in all_orders)
    spans = [judged(problem, allocation, orders).time_per_global_batch_ns for orders in all_orders]
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize("offsets", [V_MIN, V_HALF, V_ZERO])
@pytest.mark.parametrize("p", range(1, 14))
def test_a_building_block_does_one_thing_at_a_time(p: int, offsets: Offsets) -> None:
    blocks = building_block(p, offsets)
    for rank, (down, up, upper, lower, upper_weights, lower_weights) in enumerate(blocks):
        assert len({t % PERIOD for t in blocks[rank]}) == PERIOD
        assert down < up < upper < upper_weights
        assert upper < lower < lower_weights
        if rank:
            assert down - blocks[rank - 1][0] == offsets.forward_down
            assert blocks[rank - 1][1] - up == offsets.forward_up


def test_offsets_that_meet_are_an_error() -> None:
    with pytest.raises(AssertionError, match="leave no room"):
        building_block(8, Offsets(1, 1, 2, 2))


@pytest.mark.parametrize("number", range(1, 10))
@pytest.mark.parametrize("generator", [zb_h1, zb_h2, v_half, v_min, looped_bfs])
def test_any_number_of_micro_batches(generator: Generator, number: int) -> None:
    problem, allocation = vee(4, number) if generator in (v_half, v_min) else line(4, number)
    judged(problem, allocation, generator(problem, allocation))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedRequest, match="groups of 4") as refused:
        interleaved(*loop(4, 2, 6))
    assert refused.value.remedy == "8 micro-batches, or schedule 'looped-bfs'"
    with pytest.raises(UnsupportedRequest, match="'interleaved' needs stages in a loop"):
        interleaved(*loop(4, 1, 4))
    with pytest.raises(UnsupportedRequest, match="'zb-v' needs 8 micro-batches"):
        zb_v(*vee(4, 7))
    with pytest.raises(UnsupportedRequest, match="'v-min' needs stages in a V"):
        v_min(*loop(2, 2, 4))
    with pytest.raises(UnsupportedRequest, match="'looped-bfs' needs stages in a loop"):
        looped_bfs(*vee(2, 4))
    with pytest.raises(UnsupportedRequest, match="'zb-h1' needs one pipeline of stages on separate devices"):
        zb_h1(*vee(2, 4))
    problem, allocation = line(2, 4)
    turns = single_pipeline((Stage(0, 0, (0, 1), "round_robin"), Stage(1, 1, (2,))), 4)
    with pytest.raises(UnsupportedRequest, match="replicas that split each micro-batch"):
        zb_h2(problem, turns)
    halves = Allocation((Pipeline(allocation.stages, (0, 1)), Pipeline(allocation.stages, (2, 3))), 4)
    with pytest.raises(UnsupportedRequest, match="one pipeline"):
        looped_bfs(problem, halves)


@pytest.mark.parametrize("generator", [interleaved, looped_bfs, zb_h1, zb_h2, zb_v, v_half, v_min])
def test_torchs_csv_takes_them_and_gives_them_back(generator: Generator) -> None:
    plans = {interleaved: loop(4, 2, 8), looped_bfs: loop(4, 3, 8), zb_h1: line(4, 8), zb_h2: line(4, 8)}
    problem, allocation = plans.get(generator, vee(4, 8))
    orders = generator(problem, allocation)
    written = to_csv(allocation, orders)
    _, copy = onto(written, allocation)
    for row, other in zip(orders.rows, copy.rows, strict=True):
        assert row.devices == other.devices
        assert np.array_equal(row.operations, other.operations)
    span = simulate(problem, allocation, orders).time_per_global_batch_ns
    assert simulate(problem, allocation, copy).time_per_global_batch_ns == span
    with pytest.raises(InvalidDocument, match="1FOO3"):
        onto(written.replace("1F3", "1FOO3", 1), allocation)


def again(delay: int, recompute: bool) -> tuple[Problem, Allocation]:
    """Build four stages, F = 100, B = 200, transfers of ``delay``; the last stage awaits no gradient and keeps all."""
    problem = make_problem([100] * 4, boundary_bytes=delay, nodes=(4,), channel="full", global_batch_size=64)
    stages = tuple(Stage(s, s, (s,), recompute=((s, s),) if recompute and s < 3 else ()) for s in range(4))
    return problem, single_pipeline(stages, 64)


@pytest.mark.parametrize("generator", [zb_h1, zb_h2])
def test_recomputation_stands_before_each_gradient(generator: Generator) -> None:
    problem, allocation = again(10, True)
    orders = recomputed(allocation, generator(problem, allocation))
    for row in orders.rows:
        kinds = row.operations.tolist()
        for place, (kind, s, m) in enumerate(kinds):
            if kind == INPUT and s < 3:
                assert kinds[place - 1] == [KINDS.index("R"), s, m]
    apart, together = (judged(problem, allocation, each) for each in (orders, generator(problem, allocation)))
    assert apart.time_per_global_batch_ns <= together.time_per_global_batch_ns
    plain = again(10, False)
    untouched = generator(*plain)
    same = recomputed(plain[1], untouched)
    assert all(np.array_equal(a.operations, b.operations) for a, b in zip(same.rows, untouched.rows, strict=True))


@pytest.mark.parametrize("generator", [early_backward, zb_h1])
@pytest.mark.parametrize("delay", [100, 150])
def test_recomputation_hides_in_the_wait_for_a_gradient(generator: Generator, delay: int) -> None:
    """WPipe figure 13: where a transfer takes a forward's time or more, recomputing apart costs 5 % at most.

    The stages wait for their gradients there; R inside of B or I would cost its full time. All stages for which that
    saves memory recompute: between a forward and its gradient the last one never sees another forward. Split backwards
    leave less of the wait, so R overtakes within the memory that is left.
    """
    problem, allocation = again(delay, False)
    orders = generator(problem, allocation)
    plain = judged(problem, allocation, orders).time_per_global_batch_ns
    wanted = recomputing(allocation, orders)
    assert [bool(stage.recompute) for stage in wanted.stages] == [True, True, True, False]
    inside = judged(problem, wanted, orders).time_per_global_batch_ns
    hidden = recomputed(wanted, orders)
    if generator is zb_h1:
        chained = Chained(problem, wanted)
        hidden = improved(chained, [hidden], chained.peak_bytes(hidden))[0].orders
    assert judged(problem, wanted, hidden).time_per_global_batch_ns <= 1.05 * plain < inside


@pytest.mark.parametrize("generator", [early_backward, zb_h1, zb_h2])
def test_recomputation_where_nothing_waits_saves_no_memory(generator: Generator) -> None:
    problem = make_problem([100] * 4, stash_bytes=1000, boundary_bytes=1, nodes=(4,), global_batch_size=8)
    allocation = straight(problem, 8)
    orders = generator(problem, allocation)
    some, every = recomputing(allocation, orders), recomputing(allocation, None)
    few, all_of_it = (simulate(problem, each, recomputed(each, orders)).uses[3].memory.total for each in (some, every))
    assert few <= all_of_it + 1, "the stage's input stands beside what is rebuilt from it"


def test_recomputation_apart_is_no_longer_on_busy_devices_either() -> None:
    """Interleaved 1F1B has no wait in which recomputation could hide."""
    problem = make_problem([100] * 8, boundary_bytes=100, nodes=(4,), channel="full", global_batch_size=64)
    allocation = single_pipeline(tuple(Stage(s, s, (s % 4,)) for s in range(8)), 64)
    orders = interleaved(problem, allocation)
    wanted = recomputing(allocation, orders)
    inside = judged(problem, wanted, orders).time_per_global_batch_ns
    assert judged(problem, wanted, recomputed(wanted, orders)).time_per_global_batch_ns <= inside


def test_stages_without_work_add_nothing_to_the_bound_of_their_device() -> None:
    """Device 1 has stage 1, which takes no time, and stage 3: it waits for the latter's first input once, not twice."""
    problem = make_problem([0, 0, 0, 1], [0] * 4, 1, nodes=(2,), channel="half", global_batch_size=2)
    allocation = single_pipeline(tuple(Stage(s, s, (s % 2,)) for s in range(4)), 2)
    judged(problem, allocation, interleaved(problem, allocation))


@settings(max_examples=60)
@given(st.data())
def test_bounds_hold_for_drawn_costs(data: st.DataObject) -> None:
    """Several stages on a device, split backwards: no bound above the simulated time (``judged`` checks that)."""
    p, number = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 9))
    generator = data.draw(st.sampled_from([interleaved, looped_bfs, zb_h1, zb_h2, zb_v, v_half, v_min]))
    stages = p if generator in (zb_h1, zb_h2) else 2 * p
    number = {interleaved: p * number, zb_v: 2 * p + number}.get(generator, number)
    cost = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    weights, inputs = data.draw(cost), data.draw(cost)
    problem = make_problem(
        data.draw(cost),
        [i + w for i, w in zip(inputs, weights, strict=True)],
        data.draw(st.integers(0, 5)),
        data.draw(st.integers(0, 9)),
        weight_ns=weights,
        update_ns=data.draw(st.integers(0, 9)),
        nodes=(p,),
        channel=data.draw(st.sampled_from(["half", "full", "none"])),
        shared=data.draw(st.booleans()),
        global_batch_size=number,
    )
    place = (
        (lambda s: s % p)
        if generator in (interleaved, looped_bfs, zb_h1, zb_h2)
        else (lambda s: min(s, stages - 1 - s))
    )
    allocation = single_pipeline(tuple(Stage(s, s, (place(s),)) for s in range(stages)), number)
    judged(problem, allocation, generator(problem, allocation))


def test_operations_are_each_there_once() -> None:
    """Operations are counted without the simulator."""
    problem, allocation = vee(3, 7)
    for row in v_min(problem, allocation).rows:
        operations = [tuple(each) for each in row.operations.tolist()]
        assert len(set(operations)) == len(operations) == 2 * 3 * 7
        assert {kind for kind, _s, _m in operations} == {FORWARD, INPUT, WEIGHT}
        assert BACKWARD not in row.operations[:, 0]
