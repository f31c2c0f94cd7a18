"""PipeDream-2BW: double-buffered weights, a part per device, 1F1B without a flush, over d:w (ALGORITHMS 5.1).

The search is WPipe's with a single group, so that the two compare: M ≥ N, N - i micro-batches in flight on stage i.

.. [1] Narayanan et al., Memory-efficient pipeline-parallel DNN training (ICML 2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.proposal import Proposal, in_order
from penstock.solvers.planners.wpipe.configurations import climb, exhaustive
from penstock.solvers.planners.wpipe.planner import DEPTH, LAYOUT, MODE, WARMUP, keeping, wanted_by, worth_judging
from penstock.solvers.schedules.periodic.eager import eager

OPTIONS = (MODE, LAYOUT, DEPTH, WARMUP)


def proposals(problem: Problem, options: Mapping[str, object]) -> Iterator[Proposal]:
    """The configurations that promise most."""
    wanted = wanted_by(options, groups=1)
    found = climb(problem, wanted) if MODE.of(options) == "paper" else exhaustive(problem, wanted)
    for each in worth_judging(keeping(problem, found)):
        depth = [each.shape.ahead(i) for i in range(each.shape.depth)]
        pattern = eager(problem, each.allocation, update_rule="double_buffered", depth=depth)
        yield in_order(problem, each.allocation, pattern, "double_buffered")
