"""An allocation as one line of stages and channels with limits in flight: the input of the suffix search."""

from __future__ import annotations

import numpy as np

from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import channel_kinds, effective_limits
from penstock.solvers.bounds.suffix.state_kernel import DELAY, QUEUE, SHARED, Line
from penstock.solvers.bounds.windows_kernel import APART, SERIAL


def line_of(times: StageTimes) -> Line:
    """Return the line of an allocation whose stages share no devices; every micro-batch counts as a small one.

    No schedule of the allocation is shorter than the best one of its line:

    * operations and transfers of a small micro-batch are never longer, and a schedule stays valid when they shrink;
    * two transfers of an edge exclude each other if they share a channel, or in a shared network a link: a transfer
      holds all its links for its whole duration, whatever else they carry. Traffic of other edges and all-reduces over
      the same links is left out, which only allows more;
    * no more micro-batches are in flight than memory holds on the stage and on each before it (``effective_limits``): a
      micro-batch in flight on a stage is in flight on the one before;
    * identical micro-batches can go in index order everywhere: call the k-th operation of each kind k. So the limit K
      is a precedence: forward m + K of a stage after its backward m.

    The line leaves out that the judge's channels carry first the transfer that is ready first, larger micro-batches,
    and contention of all-reduces.
    """
    stages = len(times.forward)
    after = [exposed + update for exposed, update in zip(times.exposed, times.update_ns, strict=True)]
    out, home = [*times.out[:-1], 0], [*times.back[1:], 0]
    lanes = [DELAY] * stages
    for e, kind in enumerate(channel_kinds(times)):
        if kind == SERIAL and out[e] > 0 and home[e] > 0:
            lanes[e] = SHARED
        elif kind in (SERIAL, APART):
            lanes[e] = QUEUE
    columns = (times.forward, times.backward, out, home, lanes, effective_limits(times), after)
    forward, backward, out_ns, home_ns, lane, limit, after_ns = (np.asarray(c, dtype=np.int64) for c in columns)
    phi = np.zeros((stages, times.allocation.num_micro_batches + 1), dtype=np.int64)
    return with_tails(Line(forward, backward, out_ns, home_ns, lane, limit, after_ns, after_ns, phi))


def with_tails(line: Line) -> Line:
    """Return the line with the time that follows the last backward of each stage."""
    tail = line.after.copy()
    for s in range(1, tail.size):
        tail[s] = max(tail[s], line.home[s - 1] + line.backward[s - 1] + tail[s - 1])
    return line._replace(tail=tail)


def suffix_line(line: Line, first: int) -> Line:
    """Return the line of a suffix problem, which ends with stage ``first``'s last backward; a view where possible."""
    suffix = Line(*(column[first:] for column in line))
    return with_tails(suffix._replace(after=np.zeros_like(suffix.after)))
