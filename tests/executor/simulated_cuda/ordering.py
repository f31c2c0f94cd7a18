"""The known order on one device: clocks of streams and of the host, and accesses that no order separates.

Each stream counts its launches. An event carries the counts that its stream has seen, and a stream that waits for it
takes them over (vector clocks: Fidge 1988, Mattern 1989). Two accesses to the same bytes, one of which writes, are a
fault unless one of them is known to come first, whichever way this run happens to go.
"""

from __future__ import annotations

from typing import NamedTuple

Clock = dict[int, int]
"""The number of launches that have been done, by stream."""

GRANULE_BYTES = 512
HOST = -1
"""The host among the streams, for its own accesses."""


class Touch(NamedTuple):
    """Launch ``place`` of a stream reads or writes bytes [low, high)."""

    stream: int
    place: int
    low: int
    high: int
    writes: bool
    what: str


class Ordering:
    """The order of one device. ``races``: the faults, a sentence each."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: dict[int, Clock] = {}
        self._names: dict[int, str] = {HOST: "the host"}
        self._host: Clock = {}
        self._events: list[tuple[int, Clock]] = []
        self._touches: dict[int, list[Touch]] = {}

    def open(self, stream: int, name: str) -> None:
        """Open a new stream."""
        self._clocks[stream] = {stream: 0}
        self._names[stream] = name

    def launch(self, stream: int) -> int:
        """Launch the next work of a stream; return its number."""
        clock = self._clocks[stream]
        _join(clock, self._host)
        clock[stream] += 1
        return clock[stream]

    def record(self, stream: int) -> int:
        """Record an event after a stream's present work; return its number."""
        self._events.append((stream, dict(self._clocks[stream])))
        return len(self._events) - 1

    def wait(self, stream: int, event: int) -> None:
        """Let the stream continue after an event."""
        _join(self._clocks[stream], self._events[event][1])

    def host_waits(self, event: int) -> None:
        """Let the host continue after an event."""
        _join(self._host, self._events[event][1])

    def host_drains(self) -> None:
        """Let the host continue when all streams have done their present work."""
        for clock in self._clocks.values():
            _join(self._host, clock)

    def is_over(self, event: int) -> bool:
        """Return whether the host knows that an event is over."""
        stream, clock = self._events[event]
        return self._host.get(stream, 0) >= clock[stream]

    def is_past(self, stream: int, place: int) -> bool:
        """Return whether the host knows that a stream has done its launch ``place``."""
        return self._host.get(stream, 0) >= place

    def place(self, stream: int) -> int:
        """Return the number of the stream's last launch."""
        return self._clocks[stream][stream]

    def touch(self, stream: int, low: int, high: int, *, writes: bool, what: str) -> None:
        """Let the stream's last launch, or the host, read or write bytes; note races with unordered accesses."""
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
        """Note that the stream's last launch reads or writes memory that was given back."""
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
