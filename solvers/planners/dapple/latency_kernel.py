"""DAPPLE's latency for the search's kernel: as four numbers that grow with a plan, or over arrays of stages.

Four numbers summarise a prefix of stages. From them follows the latency over all pivots
(docs/theory/algorithms.md, section 2.1) of any completion:

- X: the sum of the forwards;
- C: the largest latency closed so far;
- R: the largest start of a pivot's ending, less the backwards after it;
- P: the largest all-reduce plus the backwards from its stage on.

The latency rises with each of them, so domination is exact. X, C and P never fall along a plan, so pruning by them is
exact too. With the pivot of formula (3) no such numbers exist, and the stages themselves are needed.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import plain
from penstock.solvers.costs.infinity import NEVER_NS

X, C, R, P = range(4)
Label = tuple[int, int, int, int]


@plain
def push(label: Label, forward: int, backward: int, reduce: int, load: int, may_pivot: bool) -> Label:
    """Return the label (X, C, R, P) of a prefix with one more stage; ``load`` is its steady phase, (M - 1)(F + B)."""
    x, c, r, p = label
    c = max(c, r + reduce)
    p = max(p, reduce) + backward
    r -= backward
    base = x + forward + load
    if may_pivot:
        c = max(c, base + p)
        r = max(r, base)
    return x + forward, c, r, p


@plain
def latency_of(
    forward: np.ndarray, backward: np.ndarray, reduce: np.ndarray, load: np.ndarray, legal: np.ndarray, count: int
) -> int:
    """Return the latency of a line of ``count`` stages at the pivot of formula (3)."""
    q = count - 1
    for s in range(count - 2, -1, -1):
        if legal[s]:
            limit = load[q]
            for a in range(s + 1, q):
                limit += forward[a] + backward[a]
            if load[s] > limit:
                q = s
    warmup = 0
    for s in range(q + 1):
        warmup += forward[s]
    ending = -NEVER_NS
    after = 0
    for s in range(q + 1, count):
        ending = max(ending, reduce[s] + after)
        after -= backward[s]
    after = 0
    for s in range(q, -1, -1):
        after += backward[s]
        ending = max(ending, reduce[s] + after)
    return warmup + load[q] + ending
