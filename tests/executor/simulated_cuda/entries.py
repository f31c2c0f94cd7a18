"""The log of a rank: what its host asks of its device, of communicators and of other hosts, in the order of asking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["send", "receive", "all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "all_to_all"]
"""The operations of a communicator."""


class Works(NamedTuple):
    """Computation, or a copy: ``operations`` in one go, of ``size_bytes``."""

    stream: int
    what: Literal["compute", "copy"]
    operations: int = 1
    size_bytes: int = 0


class Joins(NamedTuple):
    """A communicator's kernel, the ``number``-th of this rank on it; ``root``: its member who has it, or gets it.

    ``meant``: which message the program means, though communicators know no tags.
    """

    stream: int
    communicator: str
    number: int
    kind: Kind
    size_bytes: int
    root: int = -1
    meant: int = 0


class Records(NamedTuple):
    """Event ``event`` is over once the stream has come to this place."""

    stream: int
    event: int


class Waits(NamedTuple):
    """The stream goes on after an event."""

    stream: int
    event: int


class Awaits(NamedTuple):
    """The host goes on after an event."""

    event: int


class Drains(NamedTuple):
    """The host goes on when the device has nothing to do."""


class Loads(NamedTuple):
    """The host loads a kernel that it has not launched before: it goes on when the device has nothing to do."""

    name: str


class Opens(NamedTuple):
    """A new stream."""

    stream: int
    name: str


class Makes(NamedTuple):
    """A communicator of ``members`` (ranks), whose kernels have ``blocks`` blocks each; all ranks of the run log it."""

    communicator: str
    members: tuple[int, ...]
    blocks: int


class Meets(NamedTuple):
    """The host enters the ``number``-th collective of a group of hosts, and goes on."""

    group: str
    members: tuple[int, ...]
    number: int
    kind: str


class Gathers(NamedTuple):
    """The host goes on when all hosts of the group have entered its ``number``-th collective."""

    group: str
    number: int


Entry = Works | Joins | Records | Waits | Awaits | Drains | Loads | Opens | Makes | Meets | Gathers
Log = Sequence[Entry]


def words(entry: Entry) -> str:
    """Describe an entry for people."""
    match entry:
        case Works(stream, what, operations):
            return f"{operations} operations of {what} in stream {stream}"
        case Joins(_, communicator, number, kind, size_bytes):
            return f"{kind} {number} of {communicator} ({size_bytes} bytes)"
        case Records(stream, event):
            return f"event {event} of stream {stream}"
        case Waits(stream, event):
            return f"stream {stream} waiting for event {event}"
        case Awaits(event):
            return f"waiting for event {event}"
        case Drains():
            return "waiting for the whole device"
        case Loads(name):
            return f"loading the kernel of {name}, for which the device has to be idle"
        case Opens(stream, name):
            return f"opening stream {stream} ({name})"
        case Makes(communicator, members):
            return f"making {communicator} of ranks {list(members)}"
        case Meets(group, _, number, kind):
            return f"{kind} {number} of hosts ({group})"
        case Gathers(group, number):
            return f"waiting for collective {number} of hosts ({group})"
