"""The engine of the simulated CUDA on logs written by hand: what runs, in which order, and why something does not."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from simulated_cuda.engine import H100, Device, Outcome, run
from simulated_cuda.entries import (
    Awaits,
    Drains,
    Entry,
    Gathers,
    Joins,
    Kind,
    Makes,
    Meets,
    Opens,
    Records,
    Waits,
    Works,
)

pytestmark = pytest.mark.tier("quick")

BOTH = (0, 1)
EDGE = Makes("edge", BOTH, 2)
SUM = Makes("sum", BOTH, 32)


def opened(count: int) -> list[Entry]:
    return [Opens(stream, f"s{stream}") for stream in range(count)]


def joins(stream: int, kind: Kind, number: int = 0, communicator: str = "edge", size_bytes: int = 4) -> Joins:
    return Joins(stream, communicator, number, kind, size_bytes)


def only(outcome: Outcome) -> str:
    """Return the faults, after checking that some exist."""
    assert outcome.faults
    return "\n".join(outcome.faults)


def ends(logs: Iterable[list[Entry]], device: Device = H100) -> Outcome:
    """Return the outcome, after checking that it is good."""
    outcome = run(list(logs), device)
    assert outcome.faults == ()
    assert all(moment >= 0 for done in outcome.done_ns for moment in done)
    return outcome


def test_a_stream_keeps_its_order_and_two_do_not_wait_for_each_other() -> None:
    log = [*opened(2), Works(0, "compute", 100), Works(1, "compute"), Works(0, "compute"), Records(1, 0), Awaits(0)]
    done = ends([log]).done_ns[0]
    assert done[3] < done[2] < done[4], "the other stream is through first"
    assert done[6] < done[2], "and the host with it"


def test_a_stream_waits_for_an_event_and_the_host_does_not() -> None:
    log = [*opened(2), Works(0, "compute", 100), Records(0, 0), Waits(1, 0), Works(1, "copy"), Drains()]
    done = ends([log]).done_ns[0]
    assert done[5] > done[2]
    assert done[6] == max(done)


def test_kernels_of_a_communicator_end_together() -> None:
    first = [*opened(1), EDGE, joins(0, "send"), Drains()]
    second = [*opened(1), EDGE, Works(0, "compute", 1000), joins(0, "receive"), Drains()]
    done = ends([first, second]).done_ns
    assert done[0][2] == done[1][3] > 1000 * H100.operation_ns


def test_hosts_meet() -> None:
    first = [Meets("all", BOTH, 0, "barrier"), Gathers("all", 0)]
    second = [*opened(1), Works(0, "compute", 50), Drains(), *first]
    done = ends([first, second]).done_ns
    assert done[0][1] >= done[1][2]
    assert "ranks [1] have not entered" in only(run([first, opened(1)]))


def held_up(blocked: int) -> list[list[Entry]]:
    """Build logs: rank 0 waits for a free stream that was opened after streams which wait for rank 1.

    Rank 1 waits for rank 0.
    """
    gate, free = 0, blocked + 1
    first = [*opened(free + 1), EDGE, joins(gate, "receive"), Records(gate, 0)]
    for stream in range(1, free):
        first += [Waits(stream, 0), Works(stream, "compute")]
    first += [Works(free, "compute"), Records(free, 1), Awaits(1), Meets("all", BOTH, 0, "barrier"), Drains()]
    second = [*opened(1), EDGE, Meets("all", BOTH, 0, "barrier"), Gathers("all", 0), joins(0, "send"), Drains()]
    return [first, second]


@pytest.mark.parametrize(
    ("queues", "blocked", "is_held_up"),
    [
        pytest.param(1, 1, True, id="one-queue"),
        pytest.param(8, 6, False, id="fewer-than-queues"),
        pytest.param(8, 8, True, id="as-many-as-queues"),
        pytest.param(32, 8, False, id="many-queues"),
        pytest.param(32, 30, False, id="all-queues"),
        pytest.param(32, 32, True, id="more-than-queues"),
    ],
)
def test_blocked_streams_hold_up_free_ones_of_their_queues(queues: int, blocked: int, is_held_up: bool) -> None:
    """As measured on an H100 with CUDA_DEVICE_MAX_CONNECTIONS of 1, 8 and 32."""
    outcome = run(held_up(blocked), Device(queues=queues))
    assert bool(outcome.faults) == is_held_up
    if is_held_up:
        assert "waiting for event 1" in only(outcome)


def test_a_running_kernel_holds_up_what_follows_in_its_queue_only_if_it_is_of_its_stream() -> None:
    """A receive that runs has left its queue; the next of its stream has not."""
    first = [*opened(3), EDGE, joins(0, "receive"), Works(2, "compute"), Records(2, 0), Awaits(0)]
    more = [Meets("all", BOTH, 0, "barrier"), Drains()]
    second = [*opened(1), EDGE, Meets("all", BOTH, 0, "barrier"), Gathers("all", 0), joins(0, "send")]
    ends([[*first, *more], second], Device(queues=2))
    behind = [*first[:5], joins(0, "receive", 1), *first[5:], *more]
    outcome = run([behind, [*second, joins(0, "send", 1)]], Device(queues=2))
    assert "receive 0 of edge (4 bytes) before it in its stream is not done" in only(outcome)


def in_opposite_orders() -> list[list[Entry]]:
    creations = [Makes("a", BOTH, 32), Makes("b", BOTH, 32)]
    kernels = [joins(0, "all_reduce", 0, "a"), joins(1, "all_reduce", 0, "b")]
    return [[*opened(2), *creations, *kernels], [*opened(2), *creations, *reversed(kernels)]]


def test_opposite_orders_of_two_communicators_hang_where_both_do_not_fit() -> None:
    ends(in_opposite_orders(), Device(blocks=64))
    faults = only(run(in_opposite_orders(), Device(blocks=63)))
    assert "it needs 32 of 63 blocks, of which 31 are free" in faults
    assert "waiting for rank 1 (which has not started its own)" in faults


def test_computation_needs_a_block_and_a_copy_does_not() -> None:
    logs = [
        [*opened(2), EDGE, joins(0, "receive"), Works(1, "copy"), Records(1, 0), Awaits(0), Works(1, "compute")],
        [*opened(1), EDGE, Meets("one", (1,), 0, "barrier"), Gathers("one", 0)],
    ]
    faults = only(run(logs, Device(blocks=2)))
    assert "operations of compute in stream 1: it needs 1 of 2 blocks, of which 0 are free" in faults


@pytest.mark.parametrize(
    ("one", "other", "fault"),
    [
        pytest.param(joins(0, "send"), joins(0, "send"), "send 0 of edge", id="both-send"),
        pytest.param(joins(0, "send"), joins(0, "receive", size_bytes=8), r"\(8 bytes\)", id="sizes"),
        pytest.param(joins(0, "all_reduce"), joins(0, "broadcast"), "broadcast 0", id="kinds"),
        pytest.param(
            Joins(0, "edge", 0, "reduce", 4, 0),
            Joins(0, "edge", 0, "reduce", 4, 1),
            "do not fit each other",
            id="roots",
        ),
        pytest.param(
            Joins(0, "edge", 0, "send", 4, -1, 7),
            Joins(0, "edge", 0, "receive", 4, -1, 9),
            "of message 9",
            id="messages",
        ),
    ],
)
def test_kernels_that_do_not_fit_each_other_are_named(one: Joins, other: Joins, fault: str) -> None:
    outcome = run([[*opened(1), EDGE, one], [*opened(1), EDGE, other]])
    assert re.search(fault, only(outcome))


def test_communicators_have_one_order() -> None:
    faults = only(run([[EDGE, SUM], [SUM, EDGE]]))
    assert "different orders: as number 0" in faults
    assert "ranks [1] have not come to" in only(run([[EDGE], []]))


def test_a_kernel_that_a_peer_never_launches_is_waited_for() -> None:
    faults = only(run([[*opened(1), EDGE, joins(0, "send"), Drains()], [*opened(1), EDGE]]))
    assert "rank 0 hangs: its host is waiting for the whole device" in faults
    assert "send 0 of edge (4 bytes) runs, waiting for rank 1 (which has not launched its own)" in faults
