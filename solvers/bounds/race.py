"""A race of alternatives by their lower bounds, which are raised only while they decide what is evaluated next.

Layouts of even stages and choices of degrees are alternatives. The caller evaluates the next one that may still win,
and so lowers the limit for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Any, Generic, Protocol, Self, TypeVar

from penstock.solvers.costs.infinity import NEVER_NS


class Alternative(Protocol):
    """A thing to evaluate, whose results take ``least_ns`` or more."""

    @property
    def least_ns(self) -> int:
        """The highest bound so far."""

    def raised(self, below_ns: float) -> Self | None:
        """Return the alternative with a higher bound, or with the same bound if no higher one is known below a time.

        None: it has no results.
        """


A = TypeVar("A", bound=Alternative)


class Race(Generic[A]):
    """Alternatives that were not evaluated yet.

    ``order``: the key whose least comes next; by default the bound. Of equal alternatives the first comes first.
    """

    def __init__(self, alternatives: Iterable[A], order: Callable[[A], Any] = attrgetter("least_ns")) -> None:
        self._order = order
        self._waiting = [(order(each), number, each) for number, each in enumerate(alternatives)]
        self._entered = len(self._waiting)
        heapify(self._waiting)

    def copy(self) -> Race[A]:
        """Return the same race, to be run apart from this one."""
        other = Race[A]((), self._order)
        other._waiting, other._entered = list(self._waiting), self._entered
        return other

    def enter(self, alternative: A) -> None:
        """Add an alternative."""
        heappush(self._waiting, (self._order(alternative), self._entered, alternative))
        self._entered += 1

    def next_below(self, limit_ns: Callable[[A], float]) -> A | None:
        """Return the next alternative whose highest bound is below its limit; None at the end of the race.

        An alternative above its limit is out of the race, so limits may fall from one call to the next, but not rise.
        """
        while self._waiting:
            _, number, each = heappop(self._waiting)
            below_ns, least_ns = limit_ns(each), each.least_ns
            if least_ns >= below_ns or (higher := each.raised(below_ns)) is None:
                continue
            if higher.least_ns == least_ns:
                return higher
            heappush(self._waiting, (self._order(higher), number, higher))
        return None

    def least_ns(self, below_ns: float = NEVER_NS, raises: float = float("inf")) -> int:
        """Return a bound on all results, of a race by bounds; NEVER_NS if no alternative is left.

        The bound is raised while it is below a time, ``raises`` times at most.
        """
        while self._waiting and raises > 0 and (least_ns := self._waiting[0][2].least_ns) < below_ns:
            _, number, each = self._waiting[0]
            higher = each.raised(below_ns)
            if higher is None:
                heappop(self._waiting)
                continue
            heapreplace(self._waiting, (self._order(higher), number, higher))
            if higher.least_ns == least_ns:
                break
            raises -= 1
        return self._waiting[0][2].least_ns if self._waiting else NEVER_NS
