"""Sets of free hosts that are worth evaluating, for one number of hosts.

For few hosts these are all sets. For many they are of three kinds. The most compact sets (in a leaf, a rack, a pod …)
of each kind of place that can hold them. Sets spread evenly over more and more children of such a place, which use more
uplinks. Sets of each group of equal hosts alone, or of two groups in quarters. Places already fragmented come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from math import comb

from penstock.solvers.placement.site import Chosen, Place, Site, places_of

MOST_SETS = 2048
"""The largest number of sets of hosts that are all examined."""
GROUPS = 4
"""Number of groups of equal hosts that are used alone: the groups with most hosts."""
ANCHORS = 6
"""Number of places in which a compact set is searched."""
QUARTERS = 4


@dataclass
class Families:
    """Sets of a site with between ``least`` and ``most`` hosts; ``hosts``: the hosts that the job may use."""

    site: Site
    hosts: Collection[int]
    least: int
    most: int
    every_set: bool = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = frozenset(self.hosts)
        count = len(self.hosts)
        self.most = min(self.most, count)
        self.every_set = sum(comb(count, n) for n in range(self.least, self.most + 1)) <= MOST_SETS

    def numbers(self) -> list[int]:
        """Return the numbers of hosts to evaluate: all, or if many, the ends, powers of two and 3/2 of them."""
        if self.every_set or self.most - self.least < 12:
            return list(range(self.least, self.most + 1))
        steps = {step for power in range(self.most.bit_length()) for step in (1 << power, 3 << power >> 1)}
        return sorted({self.least, self.most, *(step for step in steps if self.least <= step <= self.most)})

    def sets(self, number: int) -> list[Chosen]:
        """Return one set of each class, the most compact one first."""
        by_class: dict[int, tuple[tuple[int, int], Chosen]] = {}
        for place, hosts in enumerate(self._sets(number)):
            chosen = self.site.whole_hosts(hosts)
            key = (self.site.newly_broken(chosen), place)
            first = by_class.setdefault(self.site.alike(chosen), (key, chosen))
            if key < first[0]:
                by_class[self.site.alike(chosen)] = (key, chosen)
        return [chosen for _key, chosen in by_class.values()]

    def _sets(self, number: int) -> Iterator[Sequence[int]]:
        every = _Part(self.site, self.hosts)
        yield from every.compact(number)
        if self.every_set:
            yield from combinations(sorted(self.hosts), number)
            return
        groups = Counter(self.site.hosts[host].group for host in self.hosts)
        parts = [
            _Part(self.site, {host for host in self.hosts if self.site.hosts[host].group == group})
            for group, _count in groups.most_common(GROUPS)
        ]
        for part in parts if len(groups) > 1 else []:
            yield from part.compact(number)
        yield from every.spread(number)
        for one, other in combinations(parts, 2):
            for quarter in range(1, QUARTERS):
                share = number * quarter // QUARTERS
                if 0 < share <= len(one.hosts) and 0 < number - share <= len(other.hosts):
                    yield [*next(one.compact(share)), *next(other.compact(number - share))]


class _Part:
    """A subset of a site's hosts, treated as if the site had no other hosts."""

    def __init__(self, site: Site, hosts: Collection[int]) -> None:
        self.hosts = hosts
        self._places = places_of(site.root)
        self._free = {id(place): 0 for place in self._places}
        for place in reversed(self._places):
            self._free[id(place)] += place.host in hosts
            if place.parent is not None:
                self._free[id(place.parent)] += self._free[id(place)]

    def compact(self, number: int) -> Iterator[list[int]]:
        """Yield sets below the deepest places that can hold them, one per number of free hosts; the tightest first."""
        for anchor in self._anchors(number):
            yield self._fill(anchor, number)

    def spread(self, number: int) -> Iterator[list[int]]:
        """Yield sets spread evenly over 2, 4, … and all children of the places above a compact set."""
        anchor = next(iter(self._anchors(number)), None)
        while anchor is not None:
            inside = sorted((c for c in anchor.children if self._free[id(c)]), key=self._largest)
            width = 1
            while len(inside) > 1 and width < len(inside):
                width = min(2 * width, len(inside))
                if sum(self._free[id(child)] for child in inside[:width]) >= number:
                    yield self._evenly(inside[:width], number)
            anchor = anchor.parent

    def _anchors(self, number: int) -> list[Place]:
        fits = [
            place
            for place in self._places
            if self._free[id(place)] >= number and all(self._free[id(c)] < number for c in place.children)
        ]
        tightest: dict[int, Place] = {}
        for place in sorted(fits, key=lambda place: (self._free[id(place)], place.free, place.name)):
            tightest.setdefault(self._free[id(place)], place)
        return list(islice(tightest.values(), ANCHORS))

    def _largest(self, place: Place) -> tuple[int, str]:
        return -self._free[id(place)], place.name

    def _tightest(self, place: Place) -> tuple[int, bool, str]:
        return self._free[id(place)], place.free == place.hosts, place.name

    def _fill(self, place: Place, number: int) -> list[int]:
        """Return hosts from the fewest children: whole children, the largest first, and the rest where it fits best."""
        if number == 0:
            return []
        filled = [place.host] if place.host in self.hosts and place.host is not None else []
        left = number - len(filled)
        waiting = sorted((child for child in place.children if self._free[id(child)]), key=self._largest)
        while left > 0:
            fitting = [child for child in waiting if self._free[id(child)] >= left]
            child = min(fitting, key=self._tightest) if fitting else waiting[0]
            part = min(left, self._free[id(child)])
            filled += self._fill(child, part)
            left -= part
            waiting.remove(child)
        return filled

    def _evenly(self, children: Sequence[Place], number: int) -> list[int]:
        """Return hosts in numbers as equal as possible below each child; children with fewest come first."""
        filled, left = [], number
        for place, child in enumerate(reversed(children)):
            part = min(self._free[id(child)], -(-left // (len(children) - place)))
            filled += self._fill(child, part)
            left -= part
        return filled
