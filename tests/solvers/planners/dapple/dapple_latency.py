"""DAPPLE's latency of one global batch: warm-up, steady phase of a pivot stage, ending (formulas 1-3).

Symbols, network stages included, 0-based:

- F_s, B_s are ``forward_ns``, ``backward_ns``.
- AR(P_s, g_s) is ``all_reduce_ns``.
- M is ``num_micro_batches``, and Q is ``pivot``.
- T_w, T_s, T_e are ``warmup_ns``, ``steady_ns``, ``ending_ns``.

Differs from [1]_ (ALGORITHMS R-4): the printed T_e forgets the pivot's own last backward. It is
``AR_s + sum_{a=s..Q} B_a`` for s <= Q and ``AR_s - sum_{a=Q+1..s-1} B_a`` for s > Q. Formula (3) is read as its text
says (R-5); ``pivot="max"`` takes the largest latency over all pivots instead.

.. [1] DAPPLE, section IV-A, formulas (1), (2), (3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from penstock.solvers.planners.dapple.search import Channel

Pivot = Literal["max", "formula"]


class Latency(NamedTuple):
    """Estimated time of one global batch, in ns, and the pivot stage that it turns on."""

    value_ns: int
    pivot: int
    warmup_ns: int
    steady_ns: int
    ending_ns: int


def latency(
    forward_ns: Sequence[int],
    backward_ns: Sequence[int],
    all_reduce_ns: Sequence[int],
    num_micro_batches: int,
    *,
    pivot: Pivot = "max",
    network: Sequence[bool] | None = None,
    channel: Channel = "half",
) -> Latency:
    """Return the latency of stages given in order, network stages between computation stages.

    ``network[s]`` marks a network stage; without it the channel kind does not matter. Under ``full`` its load is
    the busier direction's load; under ``none`` it is no resource and no pivot.
    """
    marks = network or [False] * len(forward_ns)
    loads = [
        (num_micro_batches - 1) * _load(f, b, mark, channel)
        for f, b, mark in zip(forward_ns, backward_ns, marks, strict=True)
    ]
    legal = [s for s, mark in enumerate(marks) if not (mark and channel == "none")]
    if pivot == "formula":
        return _at(forward_ns, backward_ns, all_reduce_ns, loads, _pivot(forward_ns, backward_ns, loads, legal))
    each = [_at(forward_ns, backward_ns, all_reduce_ns, loads, q) for q in legal]
    return max(each, key=lambda candidate: (candidate.value_ns, candidate.pivot))


def _load(forward_ns: int, backward_ns: int, network: bool, channel: Channel) -> int:
    return max(forward_ns, backward_ns) if network and channel == "full" else forward_ns + backward_ns


def _pivot(forward_ns: Sequence[int], backward_ns: Sequence[int], loads: list[int], legal: list[int]) -> int:
    """Return the pivot of formula (3): from the last stage back, the stage whose steady phase outlasts all others."""
    best = legal[-1]
    for s in reversed(legal):
        between = sum(forward_ns[a] + backward_ns[a] for a in range(s + 1, best))
        if loads[s] > loads[best] + between:
            best = s
    return best


def _at(
    forward_ns: Sequence[int], backward_ns: Sequence[int], all_reduce_ns: Sequence[int], loads: list[int], q: int
) -> Latency:
    warmup = sum(forward_ns[: q + 1])
    ending = max(ar + _after(backward_ns, s, q) for s, ar in enumerate(all_reduce_ns))
    return Latency(warmup + loads[q] + ending, q, warmup, loads[q], ending)


def _after(backward_ns: Sequence[int], s: int, q: int) -> int:
    """Return the end of stage s's last backward, from the start of the pivot's."""
    return sum(backward_ns[s : q + 1]) if s <= q else -sum(backward_ns[q + 1 : s])
