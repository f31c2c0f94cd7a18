"""WPipe: double-grouped updates over d:w, layouts, recomputation and micro-batches (equation 3, ALGORITHMS 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.grid.pinned_cuts import keeping_pins
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.options import PAPER, Option, unlimited
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.proposal import Proposal, in_order
from penstock.solvers.planners.setting import Setting
from penstock.solvers.planners.wpipe.configurations import Wanted, climb, exhaustive
from penstock.solvers.planners.wpipe.cut_search import RatedCut, priced, rank
from penstock.solvers.planners.wpipe.throughput import Links
from penstock.solvers.schedules.periodic.wpipe import wpipe

DEPTH = Option("depth", 0, "devices of a pipeline; 0 tries each depth that chain and cluster allow", low=0)
OPTIONS = (PAPER, DEPTH)
MAX_JUDGED = 32
MAX_OPERATIONS = 30_000
SHORT = 3


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield the most promising configurations; none if all layers stay together, since one stage runs them."""
    problem = setting.problem
    if not problem.cuttable.any() and unlimited(OPTIONS, options):
        return
    for each in configurations(problem, options, groups=2):
        pattern = wpipe(problem, each.allocation, policy=each.shape.policy)
        yield in_order(problem, each.allocation, pattern, "double_grouped")


def configurations(problem: Problem, options: Mapping[str, object], groups: int) -> Iterator[RatedCut]:
    """Yield the configurations to simulate.

    The paper climbs, with its warm-up, and recomputes everything or nothing.
    """
    depth = DEPTH.of(options)
    if PAPER.of(options):
        rated = climb(problem, Wanted(groups, ("A",), depth=depth, by_group=False))
    else:
        rated = exhaustive(problem, Wanted(groups, ("A", "B"), depth=depth))
    yield from worth_judging(keeping(problem, rated))


def keeping(problem: Problem, rated: list[RatedCut]) -> list[RatedCut]:
    """Return the configurations on devices that keep the pins, some of them cut again.

    Configurations that cannot keep them are left out.
    """
    if not problem.pins:
        return rated
    kept: dict[Allocation, RatedCut] = {}
    links = lru_cache(maxsize=None)(lambda places: Links(problem, places))
    for each in rated:
        stages, depth = each.allocation.stages, each.shape.depth
        with suppress(UnsupportedRequest):
            rank_of = [s % depth for s in range(len(stages))]
            allocation = keeping_pins(problem, each.allocation, rank_of, each.shape.width)
            places = tuple(stage.devices for stage in allocation.stages[:depth])
            bounds = (*(stage.first for stage in allocation.stages), problem.num_layers)
            again = priced(problem, each.shape, each.layout, places, bounds, links(places))
            kept.setdefault(again.allocation, again)
    return sorted(kept.values(), key=rank)


def worth_judging(rated: list[RatedCut]) -> Iterator[RatedCut]:
    """Yield the most promising configurations that may fit, and some that certainly fit.

    If none may fit, yield the ones that lack least, so that the answer has a reason. After ``MAX_OPERATIONS`` in one
    period of all of them, yield only the next that certainly fits.
    """
    fitting = [each for each in rated if each.missing_bytes <= 0] or rated[:SHORT]
    left = MAX_OPERATIONS
    for number, each in enumerate(fitting):
        if left > 0 and number < MAX_JUDGED:
            left -= each.allocation.num_micro_batches * len(each.allocation.stages)
            yield each
        elif each.buffers_missing_bytes <= 0:
            yield each
            return
