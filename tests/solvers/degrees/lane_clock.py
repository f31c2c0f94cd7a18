"""The clock of real GPUs: the lanes between two replicas send in one transfer, as in the simulator, or separately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from lane_costs import Lane, read_file
from page_clock import Clock, Moved, Run
from page_costs import Bucket, Operation, Tie, Transfer, time
from page_simulator import check_rows, finish_flushed, refuse_unreachable

Json = dict[str, Any]
Which = tuple[str, Hashable]
"""A transfer, bucket or tie, as the clock identifies it."""


def run_file(file: Json) -> Run:
    """Run the plan of a plan file on the clock."""
    run = read_file(file)
    check_rows(run)
    refuse_unreachable(run)
    Clock(run, run.costs.M).run_all()
    finish_flushed(run)
    return run


def run_apart(file: Json) -> tuple[Run, int]:
    """Run the same plan with a separate transfer for each lane of every pair of replicas; bound the cost of that.

    Links serve messages in the same order as before. The second result is the sum over messages of how much longer the
    lanes take one by one than all at once.
    """
    whole, run = run_file(file), read_file(file)
    clock = LanesApart(run, run.costs.M, whole)
    clock.run_all()
    finish_flushed(run)
    return run, sum(max(0, clock.alone_ns(moved) - (end - start)) for moved, (start, end) in whole.transfers.items())


def alone_ns(lanes: list[Lane], width: dict[Hashable, int]) -> int:
    """Return the time that the lanes of a message take without other traffic: in turn where they share a link."""
    free: Counter[Hashable] = Counter()
    waiting, now, end = list(lanes), 0, 0
    while waiting:
        for lane in list(waiting):
            if all(free[link] <= now for link in lane.route):
                over = now + lane_ns(lane, width)
                free.update({link: over - free[link] for link in lane.route})
                end = max(end, over)
                waiting.remove(lane)
        now = min((at for at in free.values() if at > now), default=now)
    return end


def lane_ns(lane: Lane, width: dict[Hashable, int]) -> int:
    """Return the time that one lane takes by itself."""
    return lane.latency + max(time(lane.bytes, width[link]) for link in lane.route)


class LanesApart(Clock):
    """A clock on which each lane begins when its links are free; a message arrives when its last lane does.

    A lane, bucket or tie waits for everything that uses one of its links and began before it in the run ``whole``.
    """

    def __init__(self, run: Run, total: int, whole: Run) -> None:
        super().__init__(run, total)
        self.under_way: Counter[Moved] = Counter()
        self.over: set[Which] = set()
        parts = (("transfer", whole.transfers), ("bucket", whole.reductions), ("tie", whole.ties))
        began = sorted(
            (start, n, what, which) for n, (what, of) in enumerate(parts) for which, (start, _) in of.items()
        )
        used = {(what, which): super(LanesApart, self)._needs(what, which).resources for *_, what, which in began}
        self.earlier: dict[Which, set[Which]] = {}
        for each, links in used.items():
            self.earlier[each] = {other for other in self.earlier if used[other] & links}

    def lanes(self, moved: Moved) -> list[Lane]:
        """List the lanes of a message: bytes and links."""
        s, direction, m = moved
        return list(self.costs.lanes(s, self.costs.neighbour(s, direction), direction, self.costs.rows(m)))

    def alone_ns(self, moved: Moved) -> int:
        """Return the time that a message takes lane by lane."""
        return alone_ns(self.lanes(moved), self.costs.links.bandwidth)

    def _end_operation(self, which: tuple[int, Operation]) -> None:
        before = len(self.waiting)
        super()._end_operation(which)
        whole, self.waiting = self.waiting[before:], self.waiting[:before]
        for key, what, moved in whole:
            self.under_way[moved] = len(self.lanes(moved))
            self.waiting += [((*key, lane), what, (*moved, lane)) for lane in range(self.under_way[moved])]

    def _start_waiting(self) -> None:
        turn, later = [], []
        for entry in self.waiting:
            _key, what, which = entry
            mine = self.earlier[what, which[:3] if what == "transfer" else which]
            (turn if mine <= self.over else later).append(entry)
        self.waiting = turn
        super()._start_waiting()
        self.waiting += later

    def _needs(self, what: str, which: Hashable) -> Transfer | Bucket | Tie:
        if what != "transfer":
            return super()._needs(what, which)
        *moved, number = which
        lane = self.lanes(tuple(moved))[number]
        return Transfer(lane_ns(lane, self.costs.links.bandwidth), frozenset(lane.route))

    def _end_transfer(self, which: tuple[int, int, int, int]) -> None:
        self.busy -= self._needs("transfer", which).resources
        moved = which[:3]
        self.under_way[moved] -= 1
        if self.under_way[moved] == 0:
            self.arrived.add(moved)
            self.over.add(("transfer", moved))

    def _end_bucket(self, which: tuple[int, int, int]) -> None:
        self.over.add(("bucket", which))
        super()._end_bucket(which)

    def _end_tie(self, which: tuple[int, int]) -> None:
        self.over.add(("tie", which))
        super()._end_tie(which)
