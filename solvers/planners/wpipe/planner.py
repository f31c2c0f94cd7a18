"""WPipe: double-grouped updates over d:w, layouts, recomputation and micro-batches (equation 3, ALGORITHMS 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.grid.pinned_cuts import keeping_pins
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.options import Option, unlimited
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.proposal import Proposal, in_order
from penstock.solvers.planners.wpipe.configurations import Wanted, climb, exhaustive
from penstock.solvers.planners.wpipe.cut_search import Found, priced, rank
from penstock.solvers.planners.wpipe.throughput import Links
from penstock.solvers.schedules.periodic.wpipe import WarmUp, wpipe

DEPTH = Option("depth", 0, "devices of a pipeline; 0 tries each depth that chain and cluster allow", low=0)
LAYOUT = Option(
    "layout",
    "all",
    "A: a pipeline's neighbours in one node; B: a stage's replicas; mixed: some of both",
    choices=("all", "A", "B", "mixed"),
)
WARMUP = Option(
    "warmup",
    "best",
    "micro-batches ahead: A, the paper's N - i; B, 2 (N - i) - 1, which hides transfers; or what the judge finds best",
    choices=("best", "A", "B"),
)
MODE = Option(
    "mode",
    "exhaustive",
    "search every d:w, layout, recomputation and M; or climb by C_WPipe against C_DP with warm-up A, as the paper does",
    choices=("exhaustive", "paper"),
)
OPTIONS = (MODE, LAYOUT, DEPTH, WARMUP)
MAX_JUDGED = 32
MAX_OPERATIONS = 30_000
SHORT = 3


def proposals(problem: Problem, options: Mapping[str, object]) -> Iterator[Proposal]:
    """The configurations that promise most; none of layers that stay together, which one stage runs (``simple``)."""
    if not problem.cuttable.any() and unlimited(OPTIONS, options):
        return
    wanted = wanted_by(options, groups=2)
    found = climb(problem, wanted) if MODE.of(options) == "paper" else exhaustive(problem, wanted)
    for each in worth_judging(keeping(problem, found)):
        pattern = wpipe(problem, each.allocation, policy=each.shape.policy)
        yield in_order(problem, each.allocation, pattern, "double_grouped")


def wanted_by(options: Mapping[str, object], groups: int) -> Wanted:
    """The search that the options ask for; the paper's mode has the paper's warm-up and recomputation."""
    paper = MODE.of(options) == "paper"
    policies: dict[str, tuple[WarmUp, ...]] = {"best": ("A",) if paper else ("A", "B"), "A": ("A",), "B": ("B",)}
    policy = policies[WARMUP.of(options)]
    return Wanted(groups, policy, LAYOUT.of(options), DEPTH.of(options), by_group=not paper)


def keeping(problem: Problem, found: list[Found]) -> list[Found]:
    """The same on devices that keep the pins, some of them cut again; without those that cannot keep them."""
    if not problem.pins:
        return found
    kept: dict[Allocation, Found] = {}
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


def worth_judging(found: list[Found]) -> Iterator[Found]:
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
