"""Proven lower bounds on the time per global batch: of one allocation's schedules, and of all plans of a request.

Scope ``schedule of this allocation``: the largest of

* head, work and tail of a device: it cannot begin before a first micro-batch has come through the stages before it,
  has to do its work, and what it does last has to travel back; then reductions and updates follow;
* load of a link or channel, between the earliest start and the shortest rest of what it carries;
* windows (``windows.py``; BOUNDS section 2): where every stage has devices of its own, also what a stage must
  idle while the first micro-batch goes round, and the limit that memory sets on micro-batches in flight.

Scope ``all plans of this request``: the work of all layers at their cheapest is shared by all devices at best (load),
and one slice has to pass through every layer forwards and backwards (fill). Both hold for every plan: several stages
per device, several pipelines, replicas, recomputation, split backwards and any order only add.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from penstock.solvers.allocation import Allocation
from penstock.solvers.problem import Problem
from penstock.solvers.result import REQUEST_SCOPE, SCHEDULE_SCOPE, Bound
from penstock.solvers.schedule import Pattern, Schedule
from penstock.solvers.stage_times import StageTimes
from penstock.solvers.update_rules import UpdateRule
from penstock.solvers.windows import window_bound_ns


def request_bound(problem: Problem) -> Bound:
    """No plan of the request takes less time than this."""
    load = _load_ns(problem)
    path = _path_ns(problem)
    method = "load: all work at its cheapest, on all devices" if load >= path else "fill: one slice through all layers"
    return Bound(REQUEST_SCOPE, "every plan, in any network", max(load, path), method)


def _load_ns(problem: Problem) -> int:
    """Every sample passes every layer, at best as cheaply as in the best measurement; ceil(total / devices).

    A layer's time over its samples is smallest at a measured size: between two of them the time is linear in the
    samples, below the smallest it is constant or proportional, above the largest proportional, and always rounded up.
    """
    total = Fraction(int(problem.update_ns[-1]))
    used = {problem.kind_source[device.kind] for device in problem.devices}
    for layer in range(problem.num_layers):
        cheapest = min(
            Fraction(int(point.forward_ns[layer] + point.backward_ns[layer]), point.rows) / Fraction(speed)
            for source, speed in used
            for point in problem.measured[source]
        )
        total += problem.global_batch_size * cheapest
    return -int(-total // problem.num_devices)


def _path_ns(problem: Problem) -> int:
    """The cheapest slice through every layer and, as gradients alone, back; then the first layer's weights and update.

    Weight gradients of the other layers may wait until devices are free (split backwards). A layer's times are
    piecewise linear in the rows of a slice, so they are smallest at one row or at a measured size; the difference
    of two rounded times is above the difference of the exact ones less 1.
    """
    sizes = {1, *(p.rows for points in problem.measured.values() for p in points)}
    there_and_back, first = [], []
    for kind in {device.kind for device in problem.devices}:
        for rows in sizes:
            costs = problem.costs(kind, rows)
            gradient = np.maximum(0, np.diff(costs.backward_ns) - np.diff(costs.weight_ns) - 1)
            there_and_back.append(np.diff(costs.forward_ns) + gradient)
            first.append(int(costs.weight_ns[1]))
    return int(np.min(there_and_back, axis=0).sum()) + min(first) + int(problem.update_ns[1])


def schedule_bound(
    problem: Problem, allocation: Allocation, schedule: Schedule, update_rule: UpdateRule = "synchronous"
) -> Bound:
    """No order of this allocation's operations takes less time than this, in this network.

    ``schedule`` says which operations there are: whether backwards are split, and whether recomputations run apart.
    For a periodic schedule only loads count, because its steps overlap.
    """
    times = StageTimes(problem, allocation, schedule)
    steady = isinstance(schedule, Pattern)
    bounds = {"load of a link or channel": max((times.resource_ns(r, steady) for r in times.resources), default=0)}
    used = {device for stage in allocation.stages for device in stage.devices}
    if steady:
        bounds["work of a device"] = max(times.work_ns(device, updates=False) for device in used)
    else:
        bounds["head, work and tail of a device"] = max(times.device_ns(device) for device in used)
        if times.stages_apart and not times.split:
            bounds["head, work, windows and tail of a stage"] = window_bound_ns(times)
    method, value = max(bounds.items(), key=lambda item: item[1])
    return Bound(SCHEDULE_SCOPE, _model(problem, times), value, method)


def _model(problem: Problem, times: StageTimes) -> str:
    backward = "split backwards" if times.split else "whole backwards"
    network = "shared" if problem.rules.shared else f"private ({problem.rules.channel})"
    return f"this allocation, any order of its operations, {backward}, {network} network"
