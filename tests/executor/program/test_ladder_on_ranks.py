"""The ladder of forwards in advance on ranks: what is trained is the same on every rung, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rule_jobs
import torch
from pipelines import Part, averaging_programs_of
from rank_pool import RankPool

STAGES = [Part(2, (0,)), Part(2, (1,)), Part(2, (2,))]
RUNGS = 3


def same(one: Any, other: Any) -> bool:
    """Return whether two records are the same down to each bit of each tensor."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_gradients_weights_and_losses_are_the_same_on_every_rung(pool: RankPool, tmp_path: Path) -> None:
    """Three stages, six micro-batches: δ = 0, 1, 2 keep 3, 4 and 5 in flight on the first stage; and a climb."""
    ladder = [averaging_programs_of(rule_jobs.adam, STAGES, 6, 1, delta=delta) for delta in range(RUNGS)]
    uses = [(rung,) * 4 for rung in range(RUNGS)] + [(0, 1, 2, 1)]
    records = [pool.record(ladder, "adam", tmp_path, uses=chosen) for chosen in uses]
    for rank in range(len(STAGES)):
        kept = [{what: records[i][rank][what] for what in ("losses", "gradients", "weights")} for i in range(len(uses))]
        assert all(same(kept[0], other) for other in kept[1:])
        assert len(kept[0]["losses"]) == 4
        assert kept[0]["gradients"]
    assert len({tuple(map(str, rung[0].prologue)) for rung in ladder}) == RUNGS, "each rung is another order"
