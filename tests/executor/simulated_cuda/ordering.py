"""What is known to come before what, on one device: clocks of streams and of the host, and accesses that none orders.

Each stream counts its launches; an event carries the counts that its stream has seen, and what waits for it takes them
over (vector clocks: Fidge 1988, Mattern 1989). Two accesses to the same bytes, one of which writes, are a fault unless
one of them is known to come first, whichever way this run happens to go.
"""

from __future__ import annotations

from typing import NamedTuple

Clock = dict[int, int]
"""By stream: how many of its launches have been done."""

GRANULE_BYTES = 512
HOST = -1
"""The host among the streams: what it touches itself."""


class Touch(NamedTuple):
    """Launch ``place`` of a stream reads or writes bytes [low, high)."""

    stream: int
    place: int
    low: int
    high: int
    writes: bool
    what: str


class Ordering:
    """Of one device. ``races``: what was found, a sentence each."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: dict[int, Clock] = {}
        self._names: dict[int, str] = {HOST: "the host"}
        self._host: Clock = {}
        self._events: list[tuple[int, Clock]] = []
        self._touches: dict[int, list[Touch]] = {}

    def open(self, stream: int, name: str) -> None:
        """A new stream."""
        self._clocks[stream] = {stream: 0}
        self._names[stream] = name

    def launch(self, stream: int) -> int:
        """The next launch of a stream; its number."""
        clock = self._clocks[stream]
        _join(clock, self._host)
        clock[stream] += 1
        return clock[stream]

    def record(self, stream: int) -> int:
        """An event after what the stream has been given; its number."""
        self._events.append((stream, dict(self._clocks[stream])))
        return len(self._events) - 1

    def wait(self, stream: int, event: int) -> None:
        """The stream goes on after an event."""
        _join(self._clocks[stream], self._events[event][1])

    def host_waits(self, event: int) -> None:
        """The host goes on after an event."""
        _join(self._host, self._events[event][1])

    def host_drains(self) -> None:
        """The host goes on when all streams have done what they have been given."""
        for clock in self._clocks.values():
            _join(self._host, clock)

    def is_over(self, event: int) -> bool:
        """Whether the host knows that an event is over."""
        stream, clock = self._events[event]
        return self._host.get(stream, 0) >= clock[stream]

    def is_past(self, stream: int, place: int) -> bool:
        """Whether the host knows that a stream has done its launch ``place``."""
        return self._host.get(stream, 0) >= place

    def place(self, stream: int) -> int:
        """The number of the stream's last launch."""
        return self._clocks[stream][stream]

    def touch(self, stream: int, low: int, high: int, *, writes: bool, what: str) -> None:
        """The stream's last launch, or the host, reads or writes bytes; notes a race with what is not ordered."""
        clock = self._host if stream == HOST else self._clocks[stream]
        one = Touch(stream, clock.get(stream, 0), low, high, writes, what)
        for granule in range(low // GRANULE_BYTES, -(-high // GRANULE_BYTES)):
            kept = []
            for other in self._touches.get(granule, ()):
                ordered = other.stream in (stream, HOST) or other.place <= clock.get(other.stream, 0)
                if other.low < high and low < other.high and (writes or other.writes) and not ordered:
                    self._race(one, other)
                covered = low <= other.low and other.high <= high
                if not (covered and ordered and (writes or not other.writes)):
                    kept.append(other)
            kept.append(one)
            self._touches[granule] = kept

    def touch_nothing(self, stream: int, *, writes: bool, what: str) -> None:
        """The stream's last launch reads or writes what has been let go of, and has no place any more."""
        text = f"{what} in {self._names[stream]} {'writes' if writes else 'reads'} memory that was given back"
        if text not in self.races:
            self.races.append(text)

    def _race(self, one: Touch, other: Touch) -> None:
        text = (
            f"{one.what} in {self._names[one.stream]} {'writes' if one.writes else 'reads'} what {other.what} in "
            f"{self._names[other.stream]} {'writes' if other.writes else 'reads'}, and does not wait for it"
        )
        if text not in self.races:
            self.races.append(text)


def _join(clock: Clock, other: Clock) -> None:
    for stream, place in other.items():
        if place > clock.get(stream, 0):
            clock[stream] = place
