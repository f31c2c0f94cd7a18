"""The simulated CUDA's allocator and its order of accesses, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulated_cuda.allocator import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, Allocator
from simulated_cuda.ordering import HOST, Ordering

pytestmark = pytest.mark.tier("quick")

MIB = 1 << 20


def allocator(done: int = 0) -> Allocator:
    """Create the allocator of a device whose streams have one launch each, of which the host knows ``done``."""
    return Allocator(lambda stream, place: place <= done, lambda stream: 1)


@pytest.mark.parametrize(
    ("size_bytes", "active", "reserved"),
    [
        pytest.param(1, 512, SMALL_SEGMENT_BYTES, id="rounded"),
        pytest.param(MIB, MIB, SMALL_SEGMENT_BYTES, id="small"),
        pytest.param(MIB + 1, MIB + 512, LARGE_SEGMENT_BYTES, id="large"),
        pytest.param(11 * MIB, 12 * MIB, 12 * MIB, id="of-its-own"),
    ],
)
def test_sizes_are_rounded_as_torch_does(size_bytes: int, active: int, reserved: int) -> None:
    memory = allocator()
    memory.allocate(size_bytes, 0)
    assert (memory.active, memory.reserved) == (active, reserved)


def test_memory_is_given_out_again_to_its_stream_alone() -> None:
    memory = allocator()
    first = memory.allocate(1000, 0)
    memory.free(first)
    assert memory.active == 0
    assert memory.reserved == SMALL_SEGMENT_BYTES
    assert memory.allocate(1000, 1) != first
    assert memory.allocate(1024, 0) == first
    assert memory.peak_active == 2048


def test_free_neighbours_are_one_block() -> None:
    memory = allocator()
    first, second, third = [memory.allocate(512 << 10, 0) for _ in range(3)]
    memory.allocate(512 << 10, 0)
    for address in (first, third, second):
        memory.free(address)
    assert memory.allocate(MIB, 0) == first
    assert memory.reserved == SMALL_SEGMENT_BYTES


def test_memory_that_another_stream_reads_waits_for_it() -> None:
    for done, again in ((0, False), (1, True)):
        memory = allocator(done)
        address = memory.allocate(512, 0)
        memory.record(address, 1)
        memory.free(address)
        assert (memory.allocate(512, 0) == address) == again


def test_peaks_count_from_when_they_were_reset() -> None:
    memory = allocator()
    memory.free(memory.allocate(4096, 0))
    memory.reset_peaks()
    assert memory.peak_active == 0
    memory.allocate(512, 0)
    assert memory.peak_active == 512


def two_streams() -> Ordering:
    ordering = Ordering()
    ordering.open(0, "stream 0")
    ordering.open(1, "stream 1")
    return ordering


def touched(ordering: Ordering, stream: int, *, writes: bool, low: int = 0) -> None:
    ordering.launch(stream)
    ordering.touch(stream, low, low + 8, writes=writes, what="a launch")


def nothing(_: Ordering) -> None:
    """Order nothing."""


def by_event(ordering: Ordering) -> None:
    ordering.wait(1, ordering.record(0))


def by_host(ordering: Ordering) -> None:
    ordering.host_waits(ordering.record(0))


def by_draining(ordering: Ordering) -> None:
    ordering.host_drains()


@pytest.mark.parametrize(
    ("order", "raced"),
    [
        pytest.param(nothing, True, id="nothing"),
        pytest.param(by_event, False, id="event"),
        pytest.param(by_host, False, id="host"),
        pytest.param(by_draining, False, id="device"),
    ],
)
@pytest.mark.parametrize("writes", [(True, False), (False, True), (True, True)])
def test_accesses_that_nothing_orders_are_found(
    order: Callable[[Ordering], None], raced: bool, writes: tuple[bool, bool]
) -> None:
    ordering = two_streams()
    touched(ordering, 0, writes=writes[0])
    order(ordering)
    touched(ordering, 1, writes=writes[1])
    assert bool(ordering.races) == raced


def test_reads_and_other_bytes_race_with_nothing() -> None:
    ordering = two_streams()
    touched(ordering, 0, writes=False)
    touched(ordering, 1, writes=False)
    touched(ordering, 0, writes=True, low=8)
    touched(ordering, 1, writes=True, low=16)
    assert ordering.races == []


def test_an_event_that_was_recorded_before_orders_nothing() -> None:
    ordering = two_streams()
    event = ordering.record(0)
    touched(ordering, 0, writes=True)
    ordering.wait(1, event)
    touched(ordering, 1, writes=False)
    assert ordering.races == [
        "a launch in stream 1 reads what a launch in stream 0 writes, and does not wait for it",
    ]


def test_the_host_waits_before_it_reads() -> None:
    ordering = two_streams()
    touched(ordering, 0, writes=True)
    event = ordering.record(0)
    assert not ordering.is_over(event)
    ordering.touch(HOST, 0, 8, writes=False, what="the host")
    assert len(ordering.races) == 1
    ordering.host_waits(event)
    assert ordering.is_over(event)
    ordering.touch(HOST, 0, 8, writes=False, what="the host")
    assert len(ordering.races) == 1
