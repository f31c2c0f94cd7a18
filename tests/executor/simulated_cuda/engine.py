"""A decision whether the devices of all ranks can execute their logs, with the time at which each entry is done.

A host goes through its log and stops where it has to wait. A stream executes one entry after the other. The k-th stream
that a rank opens is served by hardware queue k modulo their number. A queue starts its entries in the order in which
the host gave them, whatever their streams, so an entry that cannot start yet holds up entries of other streams behind
it (measured on an H100 with CUDA_DEVICE_MAX_CONNECTIONS of 1, 8 and 32: docs/extending.md). A host that launches a
kernel for the first time waits until its device is idle, as in CUDA's lazy loading and in libraries that load kernels
at their first use (CUDA programming guide, Lazy loading; seen on an H100: docs/running.md). A kernel of a communicator
ends when the kernels of all members run, and occupies its blocks until then; computation needs one free block. The n-th
kernels of a communicator's members have to fit each other.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simulated_cuda.entries import (
    Awaits,
    Drains,
    Entry,
    Gathers,
    Joins,
    Loads,
    Log,
    Makes,
    Meets,
    Opens,
    Records,
    Waits,
    Works,
    words,
)
from simulated_cuda.hangs import stuck


class Device(NamedTuple):
    """A device. ``queues``: hardware queues. ``blocks``: blocks that run at once, one per multiprocessor (H100: 132).

    Times are arbitrary, to order events: of a host call, an operation, a kernel of a communicator, in ns.
    """

    queues: int = 32
    blocks: int = 132
    call_ns: int = 2_000
    operation_ns: int = 5_000
    message_ns: int = 10_000
    bytes_per_us: int = 50_000


H100 = Device()


@dataclass(frozen=True, slots=True)
class Outcome:
    """``faults``: why not all ranks come to the end of their logs, a sentence each; none if they do.

    ``done_ns[r][i]``: when entry i of rank r was done: for what a host calls when it went on, else when the device had
    done it; -1 where it never was.
    """

    faults: tuple[str, ...]
    done_ns: tuple[tuple[int, ...], ...]


def run(logs: Sequence[Log], device: Device = H100) -> Outcome:
    """Return the outcome of all ranks' logs on devices of this kind."""
    return Run(logs, device).outcome()


@dataclass
class _Kernel:
    """The n-th kernels of a communicator's members: where each is, and which of them run."""

    entries: dict[int, tuple[int, Joins]] = field(default_factory=dict)


class RankState:
    """A host and its device."""

    def __init__(self, number: int, log: Log, device: Device) -> None:
        self.number = number
        self.log = log
        self.at = 0
        self.host_ns = 0
        self.free = device.blocks
        self.queues: list[deque[int]] = []
        self.queue_of: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.before: dict[int, int] = {}
        self.given_ns: dict[int, int] = {}
        self.event_at: dict[int, int] = {}
        self.done_ns = [-1] * len(log)
        self.running: set[int] = set()
        self.expected: set[int] = set()

    def is_past(self, event: int) -> bool:
        """Return whether an event is over; an event that was never recorded is."""
        at = self.event_at.get(event)
        return at is None or self.done_ns[at] >= 0

    def give(self, index: int, stream: int) -> None:
        """Give an entry to a stream."""
        if stream in self.last:
            self.before[index] = self.last[stream]
        self.last[stream] = index
        self.given_ns[index] = self.host_ns
        self.queues[self.queue_of[stream]].append(index)

    def unfinished(self) -> Iterator[int]:
        """Yield the entries that the device was given and has not done."""
        yield from sorted({*self.running, *(index for queue in self.queues for index in queue)})


class Run:
    """All ranks on their way through their logs."""

    def __init__(self, logs: Sequence[Log], device: Device) -> None:
        self.device = device
        self.ranks = [RankState(number, log, device) for number, log in enumerate(logs)]
        self.now = 0
        self.heap: list[tuple[int, int, int]] = []
        self.woken: deque[int] = deque(range(len(logs)))
        self.kernels: dict[tuple[str, int], _Kernel] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self.blocks: dict[str, int] = {}
        self.created: list[list[Makes]] = [[] for _ in logs]
        self.met: dict[tuple[str, int], dict[int, Meets]] = {}
        self.faults: list[str] = []

    def outcome(self) -> Outcome:
        while not self.faults:
            while self.woken and not self.faults:
                rank = self.ranks[self.woken.popleft()]
                while self._host(rank) | self._device(rank):
                    pass
            if not self.heap:
                break
            self.now, number, index = heapq.heappop(self.heap)
            if index >= 0:
                self._finish(self.ranks[number], index)
            self.woken.append(number)
        if not self.faults:
            self.faults += stuck(self)
        return Outcome(tuple(self.faults), tuple(tuple(rank.done_ns) for rank in self.ranks))

    # The host

    def _host(self, rank: RankState) -> bool:
        """Go through the log up to where the host has to wait; whether it made progress."""
        begin = rank.at
        while rank.at < len(rank.log) and not self.faults and self._goes_on(rank, rank.log[rank.at]):
            rank.at += 1
        return rank.at > begin

    def _goes_on(self, rank: RankState, entry: Entry) -> bool:
        match entry:
            case Awaits(event):
                over = rank.is_past(event)
            case Drains() | Loads():
                over = not any(True for _ in rank.unfinished())
            case Makes():
                over = self._is_created(rank, entry)
            case Gathers(group, number):
                over = len(self.met[group, number]) == len(self.met[group, number][rank.number].members)
            case _:
                rank.host_ns += self.device.call_ns
                self._call(rank, entry)
                return True
        if over:
            rank.host_ns = rank.done_ns[rank.at] = max(rank.host_ns, self.now)
        return over

    def _call(self, rank: RankState, entry: Entry) -> None:
        """Execute an entry for which the host does not wait."""
        match entry:
            case Opens(stream):
                rank.queue_of[stream] = len(rank.queue_of) % self.device.queues
                if len(rank.queues) < self.device.queues:
                    rank.queues.append(deque())
            case Meets(group, members, number, kind):
                others = self.met.setdefault((group, number), {})
                others[rank.number] = entry
                wrong = next((other for other in others.values() if other.kind != kind), None)
                if wrong is not None:
                    self.faults.append(f"rank {rank.number} enters {words(entry)}, others {words(wrong)}")
                self.woken.extend(members)
            case Works() | Joins() | Waits() | Records():
                if isinstance(entry, Records):
                    rank.event_at[entry.event] = rank.at
                rank.give(rank.at, entry.stream)
                return
            case _:
                raise AssertionError(entry)
        rank.done_ns[rank.at] = rank.host_ns

    def _is_created(self, rank: RankState, entry: Makes) -> bool:
        """Return whether all members create a communicator; all ranks must create communicators in one order."""
        sequence = self.created[rank.number]
        if not sequence or sequence[-1] is not entry:
            place = len(sequence)
            sequence.append(entry)
            for other, theirs in enumerate(self.created):
                if place < len(theirs) and theirs[place] != entry:
                    self.faults.append(
                        f"communicators are made in different orders: as number {place} rank {rank.number} is "
                        f"{words(entry)}, rank {other} {words(theirs[place])}"
                    )
            self.members[entry.communicator] = entry.members
            self.blocks[entry.communicator] = entry.blocks
            self.woken.extend(entry.members)
        place = len(sequence) - 1
        return rank.number not in entry.members or all(len(self.created[other]) > place for other in entry.members)

    # The device

    def _device(self, rank: RankState) -> bool:
        """Start what can be started now; whether anything could."""
        progress = False
        for queue in rank.queues:
            while queue and not self.faults and self._starts(rank, queue[0]):
                queue.popleft()
                progress = True
        return progress

    def _starts(self, rank: RankState, index: int) -> bool:
        if rank.given_ns[index] > self.now:
            if index not in rank.expected:
                rank.expected.add(index)
                heapq.heappush(self.heap, (rank.given_ns[index], rank.number, -1))
            return False
        if self.holds(rank, index) is not None:
            return False
        entry = rank.log[index]
        if isinstance(entry, Records | Waits):
            rank.done_ns[index] = self.now
            return True
        rank.running.add(index)
        if isinstance(entry, Works):
            length = entry.operations * self.device.operation_ns + entry.size_bytes * 1000 // self.device.bytes_per_us
            heapq.heappush(self.heap, (self.now + length, rank.number, index))
        elif isinstance(entry, Joins):
            rank.free -= self.blocks[entry.communicator]
            self._join(rank.number, index, entry)
        return True

    def holds(self, rank: RankState, index: int) -> str | None:
        """Return why an entry at the head of its queue cannot start; None where it can."""
        entry = rank.log[index]
        before = rank.before.get(index)
        if before is not None and rank.done_ns[before] < 0:
            return f"{words(rank.log[before])} before it in its stream is not done"
        if isinstance(entry, Waits) and not rank.is_past(entry.event):
            recorded_by = rank.log[rank.event_at[entry.event]]
            return (
                f"the event, of stream {recorded_by.stream if isinstance(recorded_by, Records) else '?'}, is not over"
            )
        needed = 0
        if isinstance(entry, Works):
            needed = int(entry.what == "compute")
        elif isinstance(entry, Joins):
            needed = self.blocks[entry.communicator]
        if needed > rank.free:
            return f"it needs {needed} of {self.device.blocks} blocks, of which {rank.free} are free"
        return None

    def _join(self, number: int, index: int, entry: Joins) -> None:
        """Run a kernel; when the kernels of all members run, they end together."""
        key = entry.communicator, entry.number
        kernel = self.kernels.setdefault(key, _Kernel())
        for other, (_, there) in kernel.entries.items():
            if not _fit(entry, there):
                self.faults.append(
                    f"kernels {entry.number} of {entry.communicator} do not fit each other: {words(entry)} of message "
                    f"{entry.meant} on rank {number}, {words(there)} of message {there.meant} on rank {other}"
                )
        kernel.entries[number] = index, entry
        if len(kernel.entries) == len(self.members[entry.communicator]):
            end = self.now + self.device.message_ns + entry.size_bytes * 1000 // self.device.bytes_per_us
            for rank, (place, _) in kernel.entries.items():
                heapq.heappush(self.heap, (end, rank, place))

    def _finish(self, rank: RankState, index: int) -> None:
        rank.running.remove(index)
        rank.done_ns[index] = self.now
        entry = rank.log[index]
        if isinstance(entry, Joins):
            rank.free += self.blocks[entry.communicator]


def _fit(one: Joins, other: Joins) -> bool:
    if {one.kind, other.kind} & {"send", "receive"}:
        sizes_fit = (one.size_bytes, one.meant) == (other.size_bytes, other.meant)
        return {one.kind, other.kind} == {"send", "receive"} and sizes_fit
    if one.kind == other.kind == "all_to_all":  # each sends as much as it has
        return True
    return (one.kind, one.size_bytes, one.root) == (other.kind, other.size_bytes, other.root)
