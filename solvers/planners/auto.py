"""``auto``: every planner in turn, the simple ones first, so that a plan is there within a second.

All contained planners share one session: each proposal that one of them would judge alone is judged here, or
ruled out by a proven bound, so ``auto`` is never worse than any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penstock.solvers.planners import (
    avgpipe,
    dapple,
    dp,
    gpipe,
    hetpipe,
    madpipe,
    model_parallel,
    pipedream,
    pipedream_2bw,
    spp,
    wpipe,
)
from penstock.solvers.planners.options import Option, checked
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.problem import Problem

Proposals = Callable[[Problem, Mapping[str, object]], Iterator[Proposal]]

CONTAINED: tuple[tuple[str, Proposals, tuple[Option, ...]], ...] = (
    ("dp", dp.proposals, dp.OPTIONS),
    ("gpipe", gpipe.proposals, gpipe.OPTIONS),
    ("model-parallel", model_parallel.proposals, model_parallel.OPTIONS),
    ("dapple", dapple.proposals, dapple.OPTIONS),
    ("spp", spp.proposals, spp.OPTIONS),
    ("hetpipe", hetpipe.proposals, hetpipe.OPTIONS),
    ("pipedream", pipedream.proposals, pipedream.OPTIONS),
    ("pipedream-2bw", pipedream_2bw.proposals, pipedream_2bw.OPTIONS),
    ("wpipe", wpipe.proposals, wpipe.OPTIONS),
    ("avgpipe", avgpipe.proposals, avgpipe.OPTIONS),
    ("madpipe", madpipe.proposals, madpipe.OPTIONS),
)
OPTIONS: tuple[Option, ...] = ()


def contained(problem: Problem) -> Iterator[tuple[str, Iterator[Proposal]]]:
    """Each planner's name and proposals, with its default options; DAPPLE's plans under GPipe's schedule too."""
    for name, proposals, options in CONTAINED:
        found = proposals(problem, checked(name, options, {}))
        yield name, (_under_gpipe(found) if name == "dapple" else found)


def _under_gpipe(proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    for proposal in proposals:
        yield proposal
        if len(proposal.allocation.stages) > 1:
            yield proposal._replace(schedules=("gpipe",))
