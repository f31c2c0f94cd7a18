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
    """Yield the configurations that promise most; none of layers that stay together, which one stage runs."""
    problem = setting.problem
    if not problem.cuttable.any() and unlimited(OPTIONS, options):
        return
    for each in configurations(problem, options, groups=2):
        pattern = wpipe(problem, each.allocation, policy=each.shape.policy)
        yield in_order(problem, each.allocation, pattern, "double_grouped")


def configurations(problem: Problem, options: Mapping[str, object], groups: int) -> Iterator[RatedCut]:
    """Yield the configurations to judge; the paper climbs, with its warm-up, and recomputes everything or nothing."""
    depth = DEPTH.of(options)
    if PAPER.of(options):
        found = climb(problem, Wanted(groups, ("A",), depth=depth, by_group=False))
    else:
        found = exhaustive(problem, Wanted(groups, ("A", "B"), depth=depth))
    yield from worth_judging(keeping(problem, found))


def keeping(problem: Problem, found: list[RatedCut]) -> list[RatedCut]:
    """The same on devices that keep the pins, some of them cut again; without those that cannot keep them."""
    if not problem.pins:
        return found
    kept: dict[Allocation, RatedCut] = {}
    links = lru_cache(maxsize=None)(lambda places: Links(problem, places))
    for each in found:
        stages, depth = each.allocation.stages, each.shape.depth
        with suppress(UnsupportedRequest):
            rank_of = [s % depth for s in range(len(stages))]
            allocation = keeping_pins(problem, each.allocation, rank_of, each.shape.width)
            places = tuple(stage.devices for stage in allocation.stages[:depth])
            bounds = (*(stage.first for stage in allocation.stages), problem.num_layers)
            again = priced(problem, each.shape, each.layout, places, bounds, links(places))
            kept.setdefault(again.allocation, again)
    return sorted(kept.values(), key=rank)


def worth_judging(found: list[RatedCut]) -> Iterator[RatedCut]:
    """The most promising that may fit, and some that fit for certain; else those that lack least, for a reason.

    After ``MAX_OPERATIONS`` in one period of all of them only the next that fits for certain.
    """
    fitting = [each for each in found if each.missing_bytes <= 0] or found[:SHORT]
    left = MAX_OPERATIONS
    for number, each in enumerate(fitting):
        if left > 0 and number < MAX_JUDGED:
            left -= each.allocation.num_micro_batches * len(each.allocation.stages)
            yield each
        elif each.buffers_missing_bytes <= 0:
            yield each
            return
