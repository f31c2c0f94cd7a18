"""Devices for a plan of the label search, whose stages only have a number of devices and the runs that share a node."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.solvers.bounds.contiguous.label_pool import JOINED
from penstock.solvers.bounds.contiguous.label_search import Path
from penstock.solvers.costs.memory_budget import with_room
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.pins import keep_pins
from penstock.solvers.model.problem import Problem


def allocations(problem: Problem, path: Path, num_micro_batches: int) -> Iterator[Allocation]:
    """Yield the plan with stages across nodes where labels have them, then with all packed, then with devices in their
    order.

    Devices of each plan are exchanged for pins or unequal memories; plans that break pins are left out.
    """
    seen = set()
    packed = (_packed(problem, path, spans=spans) for spans in (True, False))
    for order in (*packed, list(range(problem.num_devices))):
        stages, used = [], 0
        for part in path:
            again = problem.recompute == "always" or part.variant > 0
            segments = ((part.first, part.stop - 1),) if again else ()
            devices = tuple(order[used : used + part.replicas])
            stages.append(Stage(part.first, part.stop - 1, devices, recompute=segments))
            used += part.replicas
        placed = keep_pins(problem, with_room(problem, single_pipeline(tuple(stages), num_micro_batches)))
        if placed is not None and placed not in seen:
            seen.add(placed)
            yield placed


def _packed(problem: Problem, path: Path, *, spans: bool) -> list[int]:
    """Return devices in the order of the stages: the longest runs first, each in the node that they fill best.

    ``spans``: whether a stage across nodes has a device of each in turn even if a node could hold it.
    """
    runs: list[list[int]] = []
    for number in range(len(path)):
        if number > 0 and path[number - 1].placed == JOINED:
            runs[-1].append(number)
        else:
            runs.append([number])
    free = [list(node) for node in problem.nodes()]
    devices_of_stage: dict[int, list[int]] = {}
    for run in sorted(runs, key=lambda each: -sum(path[n].replicas for n in each)):
        needed = sum(path[n].replicas for n in run)
        across = spans and not path[run[0]].in_node
        fitting = [] if across else [node for node in free if len(node) >= needed]
        home = min(fitting, key=len) if fitting else []
        for number in run:
            devices_of_stage[number] = []
            while len(devices_of_stage[number]) < path[number].replicas:
                node = home or max(free, key=len)
                devices_of_stage[number].append(node.pop(0))
    return [device for number in range(len(path)) for device in sorted(devices_of_stage[number])]
