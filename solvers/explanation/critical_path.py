"""The chain of operations, transfers, reductions and updates that decides when a judged plan ends.

The chain is built backwards from the last end: each link ended at the instant at which the next one began (a bucket
begins when the gradients of its layers are ready, inside the operation that computes them). So the links' lengths add
up to the time, to the nanosecond. Of several nodes that ended at that instant, the device's previous work comes first,
then the input, then the node that released the channel.

A periodic plan has no end: the chain goes back from the end of its steady window. Where it meets the same operation
again some rounds earlier, that part is the *critical cycle*: its length over its rounds is the time per global batch.
Otherwise the result is the chain of the whole window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from penstock.solvers.explanation.run import GRADIENTS, Because, Cause, JudgedRun, What
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan

LOOKED_BACK = 3
"""Number of windows of a periodic plan that are searched for a critical cycle."""

Span = Literal["step", "iteration", "cycle", "window"]


class PathLink(NamedTuple):
    """One link: a node that ran from ``start_ns`` until the next link began, and why it did not begin earlier.

    ``detail`` is an operation's kind or a transfer's direction, 1 for the sum of a tie; ``number`` its micro-batch,
    bucket or tie. ``devices``: the row's that computes; empty for transfers and all-reduces. ``whole_ns``: how long it
    ran altogether.
    """

    what: What
    detail: int
    stage: int
    number: int
    devices: tuple[int, ...]
    start_ns: int
    end_ns: int
    because: Because
    whole_ns: int

    @property
    def length_ns(self) -> int:
        """Return the link's share of the time, in ns."""
        return self.end_ns - self.start_ns


class Share(NamedTuple):
    """The total of all links of one sort: computing or updates of a stage, transfers over a cut, all-reduces.

    ``place``: the stage; for transfers the stage before the cut.
    """

    what: What
    place: int
    length_ns: int


@dataclass(frozen=True)
class CriticalPath:
    """The chain in the order of time. It spans ``rounds`` global batches; lengths add up to ``length_ns``."""

    steps: tuple[PathLink, ...]
    span: Span
    rounds: int

    @property
    def length_ns(self) -> int:
        """Return the time from the first link's start to the last one's end."""
        return sum(step.length_ns for step in self.steps)

    def shares(self) -> tuple[Share, ...]:
        """Return the shares of the length, the largest first."""
        totals: dict[tuple[What, int], int] = {}
        for step in self.steps:
            place = step.stage - step.detail if step.what == "transfer" else step.stage
            totals[step.what, place] = totals.get((step.what, place), 0) + step.length_ns
        ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Share(what, place, length) for (what, place), length in ranked if length)


def critical_path(problem: Problem, plan: JudgedPlan) -> CriticalPath:
    """Return the chain that ends when the plan does."""
    return path_of_run(JudgedRun(problem, plan))


def path_of_run(run: JudgedRun) -> CriticalPath:
    """Return the critical path, as ``critical_path`` does."""
    first, last = run.timeline.window_ns
    if not run.periodic:
        until = int(run.end[run.first_update :].max())
        end = run.first_update + int(np.argmax(run.end[run.first_update :]))
        steps = _walked(run, end, until, 0)
        sharing = run.shares_processors
        return CriticalPath(
            steps, "iteration" if sharing else "step", len(run.plan.allocation.pipelines) if sharing else 1
        )
    operations = slice(0, run.first_transfer)
    ending = (run.end[operations] == last) & np.isin(run.kind, GRADIENTS)
    since = max(0, last - LOOKED_BACK * (last - first))
    steps = _walked(run, int(np.flatnonzero(ending)[0]), last, since)
    inside = tuple(s._replace(start_ns=max(s.start_ns, first)) for s in steps if s.end_ns > first)
    return _cycle(run, steps) or CriticalPath(inside, "window", run.timeline.window_rounds)


def _walked(run: JudgedRun, node: int, until: int, since: int) -> tuple[PathLink, ...]:
    """Return the links between two instants; the last link is ``node``."""
    links: list[tuple[int, int, Because]] = []
    while True:
        chain = _back(run, node)
        for cause in (*chain, None):
            links.append((node, until, cause.because if cause else "start"))
            until = int(run.start[node])
            node = cause.node if cause else node
            if cause is not None and cause is chain[-1]:
                break
        if not chain or until <= since:
            break
    return tuple(_step(run, *link, since) for link in reversed(links) if link[1] > since or since == 0)


def _back(run: JudgedRun, node: int) -> list[Cause]:
    """Return the nodes that delayed ``node``, through nodes of zero duration to one that began earlier; empty: none."""
    at = run.start[node]
    chain: list[tuple[Cause | None, Iterator[Cause]]] = [(None, run.causes(node))]
    seen = {node}
    while chain:
        for cause in chain[-1][1]:
            if cause.node in seen:
                continue
            seen.add(cause.node)
            chain.append((cause, run.causes(cause.node)))
            if run.start[cause.node] < at:
                return [each for each, _more in chain if each is not None]
            break
        else:
            chain.pop()
    assert at == 0, f"nothing kept node {node} waiting until {at}"
    return []


def _step(run: JudgedRun, node: int, until: int, because: Because, since: int) -> PathLink:
    lane = run.lane(node)
    return PathLink(
        run.what(node),
        run.detail(node),
        run.stage(node),
        run.number(node),
        () if lane is None else run.lane_devices[lane],
        max(int(run.start[node]), since),
        until,
        because,
        int(run.end[node] - run.start[node]),
    )


def _cycle(run: JudgedRun, steps: tuple[PathLink, ...]) -> CriticalPath | None:
    """Return the last part of the chain from an operation to itself some global batches later, of the mean length."""
    number, time = run.plan.allocation.num_micro_batches, run.timeline
    first, last = time.window_ns
    seen: dict[tuple[object, ...], list[int]] = {}
    for i in range(len(steps) - 1, 0, -1):  # the very first link may have been cut off
        step = steps[i]
        if step.what != "operation":
            continue
        key = (step.detail, step.stage, step.devices, step.number % number)
        for later in seen.setdefault(key, []):
            batches = (steps[later].number - step.number) // number
            length = steps[later].start_ns - step.start_ns
            if batches > 0 and length * time.window_rounds == batches * (last - first):
                return CriticalPath(steps[i:later], "cycle", batches)
        seen[key].append(i)
    return None
