"""Proven lower bounds on the time per global batch: of one allocation's schedules, and of all plans of a request.

Scope ``schedule of this allocation``: the largest of

* head, work and tail of a device: it cannot begin before a first micro-batch has come through the stages before it. It
  has to do its work, and the result of its last operation has to travel back. Then reductions and updates follow;
* load of a link or channel, between the earliest start and the shortest rest of what it carries;
* windows (``stage_windows.py``, ``split_windows.py``; BOUNDS section 2 and Part II): how long a stage, or a device with
  several, must idle during the first micro-batch's round trip, and under memory's limit on micro-batches in flight;
* the same windows for any number of micro-batches on the stages from one on, joined: by the least that one more stage,
  one more micro-batch, or a full set of in-flight ones adds (``suffix/table.py``; BOUNDS Part II, 1);
* for a periodic plan, whose global batches overlap, the load of each on devices, links and reductions, and the round
  trip that in-flight micro-batches share (``steady_state.py``);
* for pipelines that average on shared devices, the processor time of all their operations.

Scope ``all plans of this request``: for every plan, the work of all layers at their cheapest, shared by all devices at
best (load), and one slice that has to pass through every layer forwards and backwards (fill). Load holds for every
plan: several stages per device, several pipelines, replicas, recomputation, split backwards, any order and any update
rule only add to it. The same holds for layers that pins confine to some devices, on these, from the time when a first
slice has reached them in a flushed step. Only where measured pipelines may share a processor, of which each uses a
part, it counts with the smallest part. Fill holds where every allowed update rule has a flush; so does, for plans that
fit into memory, what the activations before the first backward leave to do (``first_backward.py``), or what samples
hold over time (``over_time.py``). For plans of one pipeline, also the time that devices wait before their first and
after their last micro-batch, for transfers and all-reduces, and what samples hold meanwhile (``one_pipeline``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from penstock.solvers.bounds.contiguous.least_bound import least_bound_ns
from penstock.solvers.bounds.coverage import (
    class_bound,
    contiguous,
    every_plan,
    features_of,
    fitting,
    one_pipeline,
    orders_of,
)
from penstock.solvers.bounds.first_backward import first_backward_ns
from penstock.solvers.bounds.one_pipeline.bound import TimeBisection
from penstock.solvers.bounds.one_pipeline.confined import holders
from penstock.solvers.bounds.one_pipeline.load import Around, load_ns
from penstock.solvers.bounds.split_windows import shared_device_ns, split_bound_ns
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import window_bound_ns
from penstock.solvers.bounds.steady_state import SteadyTimes
from penstock.solvers.bounds.suffix.table import suffix_bound_ns
from penstock.solvers.costs.stage import least_update_ns
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.costs.utilisation import WHOLE, rank_share, utilisation_ppm
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import batches_tried
from penstock.solvers.model.problem import Problem, per_problem, prefix_sums
from penstock.solvers.model.result import SCHEDULE_SCOPE, Bound
from penstock.solvers.model.schedule import Orders, Pattern, Schedule
from penstock.solvers.model.update_rules import UpdateRule

LOAD, LOAD_OF_PINNED = (
    "load: all work at its cheapest, on all devices",
    "load: layers at their cheapest, on the devices that may hold them",
)
MEMORY = "memory: what is computed before the first backward is kept, or computed twice"


@per_problem
def request_bound(problem: Problem, *, fits: bool = True) -> Bound:
    """Return a bound that no plan of the request beats, under any update rule that it allows.

    ``fits``: whether the bound is on the plans that fit into memory only, else on plans that exceed it as well.
    """
    share = _least_share(problem) if "elastic_averaging" in problem.update_rules else Fraction(1)
    flushed = problem.update_rules <= {"synchronous"}
    heads = _around(problem, tails=False) if flushed else None
    load, path = load_ns(problem, share, heads), _path_ns(problem) if flushed else 0
    working = LOAD_OF_PINNED if problem.pins else LOAD
    method = working if load >= path else "fill: one slice through all layers"
    bound = class_bound(problem, every_plan(problem), max(load, path), method)
    if not (fits and flushed):
        return bound
    kept_ns = first_backward_ns(problem, first_slice_ns(problem))
    return class_bound(problem, fitting(problem), kept_ns, MEMORY) if kept_ns > bound.bound_ns else bound


MOST_LABELLED = 256
"""The most devices for which the label search of ``one_pipeline_bound`` takes no longer than planners do."""
MOST_SPLIT, SPLIT_EFFORT = 64, 16_000_000
"""The most devices of the search over plans with stages apart and split backwards, and its points of labels."""


def one_pipeline_bound(problem: Problem, *, split: bool = False, fits: bool = True) -> Bound:
    """Return a bound on flushed plans of one pipeline with replicas by rows and whole backwards.

    A device may hold any number of stages, which may recompute, in any place and any order; the bound holds for every
    number of micro-batches that the request allows. ``split``: backwards are whole or split. ``fits``: of the plans
    that fit into memory, else of all.
    """
    known_ns = max(load_ns(problem, Fraction(1), _around(problem, tails=not split)), _path_ns(problem))
    search = TimeBisection(problem, split=split, fits=fits)
    bound_ns, covers = search.bound_ns(known_ns), one_pipeline(problem, split=split)
    if search.priced:
        covers = replace(covers, memory=fitting(problem).memory)
    method = "label search over the devices' lowest layers"
    return class_bound(problem, covers, bound_ns, method + (", backwards split" if split else ""))


def split_apart_bound(problem: Problem, stopped: Callable[[], bool] = lambda: False) -> Bound | None:
    """Return a bound on plans of one pipeline with stages apart whose backwards are whole or split.

    It covers the numbers of micro-batches that planners try; ``stopped``: whether to end with the bound proven so far.
    None: there is no such plan, or there are too many devices to search.
    """
    few = problem.num_devices <= MOST_SPLIT
    bound_ns = least_bound_ns(problem, SPLIT_EFFORT, split=True, stopped=stopped) if few else None
    if not bound_ns:
        return None
    numbers = (batch.num_micro_batches for batch in batches_tried(problem))
    method = "label search over all plans, backwards split"
    return class_bound(problem, contiguous(problem, numbers, split=True), bound_ns, method)


def first_slice_ns(problem: Problem) -> int:
    """Return the time of the quickest slice forward through all layers, before which a flushed step has no backward."""
    return int(_least_held(problem, _slices(problem)[0]).sum())


def _path_ns(problem: Problem) -> int:
    """Return the time of the cheapest slice through all layers, its gradients back, then layer 0's weights and update.

    Weight gradients of the other layers may wait until devices are free (split backwards).
    """
    forward, gradient, weight = _slices(problem)
    there_and_back = _least_held(problem, forward + gradient)
    return int(there_and_back.sum()) + int(_least_held(problem, weight)[0]) + int(least_update_ns(problem)[1])


def _around(problem: Problem, *, tails: bool) -> Around:
    """Return for each layer the cheapest slice through earlier layers; if backwards are whole, also the time after it.

    The time after it is the way back through earlier layers, and the update. In a flushed step no operation of a layer
    can begin before a first slice has come there. With whole backwards (``tails``) a device's last operation for a
    layer after others is a backward, whose gradient travels back through those.
    """
    forward, gradient, weight = _slices(problem)
    there = prefix_sums(_least_held(problem, forward))[:-1]
    back = np.zeros_like(there)
    if tails:
        back[1:] = np.cumsum(_least_held(problem, gradient + weight))[:-1] + int(least_update_ns(problem)[1])
    return Around(there.tolist(), back.tolist())


@per_problem
def _slices(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (kinds, sizes, L) forward, input gradient and weight gradient times of slices, one of which is quickest.

    A layer's times are piecewise linear in the rows of a slice, so they are smallest at one row or at a measured size;
    the difference of two rounded times is above the difference of the exact times less 1.
    """
    sizes = sorted({1, *(p.rows for points in problem.measured.values() for p in points)})
    kinds = sorted({device.kind for device in problem.devices})
    costs = [[problem.costs(kind, rows) for rows in sizes] for kind in kinds]
    forward = [[np.diff(each.forward_ns) for each in costs_of_kind] for costs_of_kind in costs]
    weight = [[np.diff(each.weight_ns) for each in costs_of_kind] for costs_of_kind in costs]
    backward = [[np.diff(each.backward_ns) for each in costs_of_kind] for costs_of_kind in costs]
    gradient = np.maximum(0, np.asarray(backward) - np.asarray(weight) - 1)
    return np.asarray(forward), gradient, np.asarray(weight)


def _least_held(problem: Problem, times: np.ndarray) -> np.ndarray:
    """Return (L,) each layer's least time over all sizes, on the kinds of devices that may hold it."""
    kinds = sorted({device.kind for device in problem.devices})
    quickest = times.min(axis=1)
    kinds_of = {
        devices: sorted({kinds.index(problem.devices[d].kind) for d in devices}) for devices in set(holders(problem))
    }
    return np.asarray([quickest[kinds_of[devices], layer].min() for layer, devices in enumerate(holders(problem))])


def _least_share(problem: Problem) -> Fraction:
    """Return the least share of a processor of any rank of the measured pipeline, for micro-batches of one sample."""
    ranks = range(len(problem.pipeline_run.ranks)) if problem.pipeline_run is not None else ()
    return Fraction(min((rank_share(problem, rank, 1) for rank in ranks), default=WHOLE), WHOLE)


def schedule_bound(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    update_rule: UpdateRule = "synchronous",
    overlap: bool | None = None,
) -> Bound:
    """Return a bound that no order of this allocation's operations beats, in this network.

    ``overlap``: whether all-reduces overlap the last backward; None: as the request says.

    ``schedule`` defines which operations exist: whether backwards are split, and whether recomputations are separate.
    A pattern also defines how many micro-batches are in flight.
    """
    if overlap is not None and overlap != problem.rules.overlap_all_reduce:
        problem = replace(problem, rules=replace(problem.rules, overlap_all_reduce=overlap))
    if update_rule == "elastic_averaging":
        bounds = _sharing_bounds(problem, allocation)
    elif isinstance(schedule, Pattern):
        bounds = _steady_bounds(problem, allocation, schedule, update_rule)
    else:
        bounds = _flushed_bounds(problem, allocation, schedule)
    method, value = max(bounds.items(), key=lambda item: item[1])
    plan = features_of(problem, allocation, schedule, update_rule, problem.rules.overlap_all_reduce)
    return Bound(SCHEDULE_SCOPE, orders_of(plan), value, method)


def _flushed_bounds(problem: Problem, allocation: Allocation, schedule: Orders) -> dict[str, int]:
    times = StageTimes(problem, allocation, schedule)
    used = _unlike(allocation)
    bounds = {
        "load of a link or channel": max((times.resource_ns(r) for r in times.resources), default=0),
        "head, work and tail of a device": max(times.device_ns(device) for device in used),
    }
    if times.stages_apart:
        bounds["head, work, windows and tail of a stage"] = window_bound_ns(times)
        if times.split:
            bounds["head, work, windows and tail of a split stage"] = split_bound_ns(times)
        else:
            bounds["windows of the stages behind, joined"] = suffix_bound_ns(times)
    else:
        bounds["head, window, work and tail of a device"] = max(shared_device_ns(times, device) for device in used)
    return bounds


def _unlike(allocation: Allocation) -> list[int]:
    """Return devices that compute different things: one of each set with the same stages and the same turns."""
    holds: dict[int, list[tuple[int, int]]] = {}
    for s, stage in enumerate(allocation.stages):
        for turn, device in enumerate(stage.devices):
            holds.setdefault(device, []).append((s, turn if stage.dispatch == "round_robin" else 0))
    return list({tuple(stages): device for device, stages in holds.items()}.values())


def _steady_bounds(problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule) -> dict[str, int]:
    """Bound every order without a flush that has the same number of micro-batches in flight."""
    steady = SteadyTimes(problem, allocation, pattern, rule)
    used = _unlike(allocation)
    bounds = {
        "work of a device": max(steady.work_ns(device) for device in used),
        "load of a link or channel": steady.resource_ns(),
        "all-reduces of a stage": steady.reduction_ns(),
        "way round, shared by the micro-batches in flight": steady.way_round_ns(),
    }
    return {name: -int(-value // 1) for name, value in bounds.items()}


def _sharing_bounds(problem: Problem, allocation: Allocation) -> dict[str, int]:
    """Return each device's processor time, and each pipeline's work on it, over an iteration's global batches."""
    graph = StepGraph(problem, allocation)
    processor: dict[int, int] = {}
    alone = 0
    for s, stage in enumerate(allocation.stages):
        shares = [utilisation_ppm(problem, allocation, s, rows) for rows, _count in graph.classes]
        work = [count * cost.passes_ns for cost, (_rows, count) in zip(graph.costs[s], graph.classes, strict=True)]
        update = graph.update_ns[s]
        alone = max(alone, sum(work) + update)
        used = sum(each * share for each, share in zip(work, shares, strict=True))
        for device in stage.devices:
            processor[device] = processor.get(device, 0) + used + update * WHOLE
    batches = len(allocation.pipelines)
    return {
        "processor time of a device": -(-max(processor.values()) // (WHOLE * batches)),
        "work of a pipeline on a device": -(-alone // batches),
    }
