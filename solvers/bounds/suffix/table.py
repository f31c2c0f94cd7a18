"""Bounds on the suffixes of a line without search, and the bound on the whole line that follows (BOUNDS Part II, 1)."""

from __future__ import annotations

import numpy as np

from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.suffix.stage_line import line_of
from penstock.solvers.bounds.suffix.state_kernel import Line
from penstock.solvers.bounds.suffix.table_kernel import fill


def fill_table(line: Line) -> None:
    """Write the bounds on all suffix problems to ``line.phi``."""
    fill(line, np.zeros(line.forward.size, dtype=np.int64))


def whole_bound_ns(line: Line) -> int:
    """Return the largest head plus suffix plus tail over all stages: max_s [hf_s + phi_s(M) + tb_s]."""
    head, best = 0, 0
    for s in range(line.forward.size):
        best = max(best, head + int(line.phi[s, -1] + line.tail[s]))
        head += int(line.forward[s] + line.out[s])
    return best


def suffix_bound_ns(times: StageTimes) -> int:
    """Return a bound on steps with whole backwards on stages apart: windows joined by the rules of suffixes."""
    line = line_of(times)
    fill_table(line)
    return whole_bound_ns(line)
