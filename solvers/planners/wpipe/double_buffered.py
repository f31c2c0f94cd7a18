"""PipeDream-2BW: double-buffered weights, a part per device, 1F1B without a flush, over d:w (ALGORITHMS 5.1).

The search is WPipe's with a single group, so that the two compare: M ≥ N, N - i micro-batches in flight on stage i.

.. [1] Narayanan et al., Memory-efficient pipeline-parallel DNN training (ICML 2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.solvers.planners.proposal import Proposal, in_order
from penstock.solvers.planners.setting import Setting
from penstock.solvers.planners.wpipe.planner import OPTIONS, configurations
from penstock.solvers.schedules.periodic.eager import eager

__all__ = ["OPTIONS", "proposals"]


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield the most promising configurations."""
    problem = setting.problem
    for each in configurations(problem, options, groups=1):
        depth = [each.shape.ahead(i) for i in range(each.shape.depth)]
        pattern = eager(problem, each.allocation, update_rule="double_buffered", depth=depth)
        yield in_order(problem, each.allocation, pattern, "double_buffered")
