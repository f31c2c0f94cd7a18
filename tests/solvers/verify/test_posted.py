"""Posting times of receives, against the rule applied to one operation after the other."""

from __future__ import annotations

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Track
from penstock.solvers.verify.memory import LOOK_AHEAD, _posted


def one_by_one(track: Track) -> list[int]:
    """Apply the rule of `_posted`: the ends of operations that run, without steps, and each way's latest reader."""
    times, ends, latest = [], [0], dict[tuple[int, bool], int]()
    for (kind, stage, _batch), end in zip(track.operations.tolist(), track.end_ns.tolist(), strict=True):
        number = len(ends) - 1
        times.append(0)
        if kind in (FORWARD, BACKWARD, INPUT):
            way = stage, kind == FORWARD
            times[-1] = ends[max(latest.get(way, 0), number - LOOK_AHEAD, 0)]
            latest[way] = number
        if kind != STEP:
            ends.append(end)
    return times


def test_receives_are_posted_before_the_later_of_two_operations() -> None:
    random = np.random.default_rng(0)
    seen = 0
    for _ in range(300):
        size = int(random.integers(0, 40))
        drawn = [random.integers(0, most, size) for most in (STEP + 1, 4, 8)]
        end = np.cumsum(random.integers(1, 9, size)).astype(np.int64)
        track = Track((0,), np.column_stack(drawn).astype(np.int32), end - 1, end)
        assert _posted(track).tolist() == one_by_one(track)
        seen += sum(map(bool, one_by_one(track)))
    assert seen > 1000
