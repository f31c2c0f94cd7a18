"""Comparison of a timeline with a run of the page's simulator, to the nanosecond and the byte."""

from __future__ import annotations

import numpy as np
from page_clock import Run
from page_costs import STEP
from page_memory import Use, fill_and_drain, uses

from penstock.solvers.model.timeline import Timeline


def assert_same(timeline: Timeline, run: Run) -> None:
    """Check every number that the page defines."""
    _assert_same_times(timeline, run)
    by_device = uses(run)
    assert set(timeline.uses) == set(by_device)
    for device, use in timeline.uses.items():
        mine: Use = by_device[device]
        assert tuple(use[:3]) == (mine.busy, mine.communication, mine.idle)
        times, sizes = timeline.memory_curve(device)
        points = np.asarray(sorted({*mine.curve, *times.tolist()}))
        assert points[0] == 0
        at = np.searchsorted(times, points, side="right") - 1
        instants = np.asarray(sorted(mine.curve))
        place = np.searchsorted(instants, points, side="right") - 1
        assert sizes[at].tolist() == [mine.curve[t] for t in instants[place].tolist()]
        assert use.memory._asdict() == mine.breakdown
    assert timeline.peak_memory_bytes == max(sum(mine.breakdown.values()) for mine in by_device.values())
    assert (timeline.fill_ns, timeline.drain_ns) == fill_and_drain(run)
    if run.time:
        assert timeline.bubble == 1 - sum(mine.busy for mine in by_device.values()) / (run.time * len(by_device))


def _assert_same_times(timeline: Timeline, run: Run) -> None:
    lanes = {
        (frozenset(lane.devices), lane.row[0] if run.rule == "elastic_averaging" else None): k
        for k, lane in enumerate(run.lanes)
    }
    assert len(timeline.tracks) == len(lanes)
    for track in timeline.tracks:
        operations = [tuple(each) for each in track.operations.tolist()]
        k = lanes[frozenset(track.devices), operations[0] if run.rule == "elastic_averaging" else None]
        assert operations == run.lanes[k].row
        spans = list(zip(track.start_ns.tolist(), track.end_ns.tolist(), strict=True))
        assert spans == [run.operations[k, each] for each in operations]
    sent = timeline.transfers
    columns = (sent.stage, sent.direction, sent.micro_batch, sent.start_ns, sent.end_ns)
    moved = {(s, way, m): (a, b) for s, way, m, a, b in zip(*(each.tolist() for each in columns), strict=True)}
    assert moved == run.transfers
    assert sorted(timeline.reductions) == sorted(reductions_of(run))
    assert sorted(timeline.ties) == sorted((run.tied[k].stages[0], k, *span) for (k, _t), span in run.ties.items())
    steps = [(s, -1, *span) for (s, _lane), span in run.steps.items()]
    steps += [(op[1], -1, *span) for (_lane, op), span in run.operations.items() if op[0] == STEP]
    assert sorted(timeline.updates) == sorted(steps)
    assert timeline.time_per_global_batch_ns == run.time
    assert timeline.window_ns == run.window
    assert (timeline.rounds, timeline.window_rounds) == (run.rounds, run.batches)


def reductions_of(run: Run) -> list[tuple[int, int, int, int]]:
    """Return (lowest stage, bucket number counted on through the rounds, start, end) of each reduction."""
    reductions = []
    for (g, t, k), span in run.reductions.items():
        group = run.costs.groups[g]
        reductions.append((group.stages[0], t * len(group.buckets) + group.buckets[k].number, *span))
    return reductions
