"""``auto``: every planner in turn, the simple ones first, so that a plan is there within a second.

All contained planners share one session: each proposal that one of them would judge alone is judged here, or
ruled out by a proven bound, so ``auto`` is never worse than any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penstock.solvers.planners import dapple, dp, gpipe, model_parallel
from penstock.solvers.planners.options import Option, checked
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.problem import Problem

Proposals = Callable[[Problem, Mapping[str, object]], Iterator[Proposal]]

CONTAINED: tuple[tuple[str, Proposals, tuple[Option, ...]], ...] = (
    ("dp", dp.proposals, dp.OPTIONS),
    ("gpipe", gpipe.proposals, gpipe.OPTIONS),
    ("model-parallel", model_parallel.proposals, model_parallel.OPTIONS),
    ("dapple", dapple.proposals, dapple.OPTIONS),
)
OPTIONS: tuple[Option, ...] = ()


def contained(problem: Problem) -> Iterator[tuple[str, Iterator[Proposal]]]:
    """Each planner's name and proposals, with its default options."""
    for name, proposals, options in CONTAINED:
        yield name, proposals(problem, checked(name, options, {}))
