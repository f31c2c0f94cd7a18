"""Head, work, windows and tail of every stage and channel of a chain: docs/theory/bounds.md, section 2.

Every micro-batch counts with the quicker row class (a schedule stays valid when its operations shrink). For a resource
q, which is a stage or a channel: ``a`` is the longest forward step of it and all before it, ``b`` the longest
backward step between the judged stage and it, ``rt`` a micro-batch's round trip after it, ``k`` the most that may be
in flight. No backward can run in the window F + rt after its first start, no forward in the window rt + B before its
last end, and only a limited number of operations of the other direction fit there (``windows_kernel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.windows_kernel import APART, FREE, SERIAL, Chains, window_bounds
from penstock.solvers.costs.transfer import Transfer
from penstock.solvers.model.problem import NetworkRules


def window_bound_ns(times: StageTimes) -> int:
    """Return the largest end over all stages x: last backward, exposed all-reduce and update, in ns."""
    count = len(times.forward)
    columns = (times.forward, times.backward, times.out, times.back, [*channel_kinds(times), FREE])
    ends = (times.exposed, times.update_ns, effective_limits(times), [0] * count)
    chains = Chains(*(np.array([column], dtype=np.int64) for column in (*columns, *ends)))
    bound, scratch = np.empty(1, dtype=np.int64), np.zeros((2, count), dtype=np.int64)
    window_bounds(chains, times.allocation.num_micro_batches, bound, scratch[0], scratch[1])
    return int(bound[0])


def effective_limits(times: StageTimes) -> list[int]:
    """Return each stage's limit in flight: micro-batches in flight on a stage are in flight on all stages before it."""
    limits: list[int] = []
    for s in range(len(times.forward)):
        limits.append(min(times.in_flight(s), times.allocation.num_micro_batches, *limits[-1:]))
    return limits


def channel_kinds(times: StageTimes) -> list[int]:
    """Return how the transfers of each edge exclude each other."""
    moves = [(out, back) for (out, _), (_, back) in pairwise(times.moves)]
    return [channel_kind(times.problem.rules, *ways) for ways in moves]


def channel_kind(rules: NetworkRules, out: Sequence[Transfer | None], back: Sequence[Transfer | None]) -> int:
    """Return how the transfers of one edge exclude each other; ``out`` and ``back``: one for each micro-batch size."""
    if not rules.shared:
        return {"half": SERIAL, "full": APART, "none": FREE}[rules.channel]
    ways = [set.intersection(*(set(move.resources if move else ()) for move in moves)) for moves in (out, back)]
    if ways[0] & ways[1]:
        return SERIAL
    return APART if ways[0] and ways[1] else FREE
