"""What binds the plan of a solve, and what would help it most, in a few words for ``why``.

Each figure is a re-timing of the plan by simulation (links twice as wide), its stages reordered
again (half as much memory again, recomputation on the fullest device), or, where layers times devices are at most
``SMALL``, a new plan with one more node. Of plans with more than ``MAX_OPERATIONS`` operations only what
binds is said, and nothing is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from penstock.schemas.errors import PenstockError
from penstock.solvers.explanation.binding import binding, more_memory
from penstock.solvers.explanation.changes import change, last_node_size
from penstock.solvers.explanation.critical_path import path_of_run
from penstock.solvers.explanation.idle import Idle, idle_split
from penstock.solvers.explanation.run import Run
from penstock.solvers.explanation.what_if import Replan, tried
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Candidate

WIDE_GAP = 2
"""The multiple of the bound on every plan from which on it is said where the difference goes."""

LOSSES = {
    "computing above the least, as with small slices, recomputation or slow devices": ("busy_ns",),
    "devices that the plan does not use": (),
    "waiting for slower devices of the same stage": ("slower_ns",),
    "filling and draining pipelines": ("fill_ns", "drain_ns"),
    "waiting for transfers": ("transfer_ns",),
    "waiting for all-reduces": ("all_reduce_ns",),
    "waiting for stages that have more work": ("other_stages_ns", "order_ns"),
    "waiting for memory": ("memory_ns",),
}
"""Names for where devices' time goes, each with its fields of ``Idle``."""

SMALL = 128
MAX_OPERATIONS = 50_000
LEAST_GAIN = 0.001


class Gain(NamedTuple):
    """A change, and the time that it leads to."""

    sentence: str
    time_ns: int


def hints(problem: Problem, plan: Candidate, replan: Replan, bound_ns: int = 0) -> list[str]:
    """Return what binds; and the change that helps most, where one helps at all. ``replan`` plans a changed problem.

    ``bound_ns``: of every plan. Where the plan takes ``WIDE_GAP`` times as long, it is said what most of that is.
    """
    run = Run(problem, plan)
    path, idle = path_of_run(run), idle_split(run)
    found = [binding(problem, plan, path, idle).sentence]
    if 0 < WIDE_GAP * bound_ns <= plan.value_ns:
        found.append(_largest_loss(problem, idle, bound_ns / plan.value_ns))
    if run.first_transfer > MAX_OPERATIONS:
        return found
    best = min(_gains(problem, plan, replan), key=lambda gain: gain.time_ns, default=None)
    if best is not None and best.time_ns < (1 - LEAST_GAIN) * plan.value_ns:
        found.append(f"{best.sentence} would help most: {100 * (1 - best.time_ns / plan.value_ns):.1f} % less time")
    return found


def _largest_loss(problem: Problem, idle: tuple[Idle, ...], least: float) -> str:
    """Return what most of the time above the bound goes into; ``least``: the bound as a part of the plan's time."""
    span_ns = idle[0].busy_ns + idle[0].idle_ns
    whole_ns = span_ns * sum(len(problem.gpus(device)) for device in range(problem.num_devices))
    losses = {
        name: sum(getattr(each, field) * len(each.gpus) for each in idle for field in fields)
        for name, fields in LOSSES.items()
    }
    computing, unused = list(LOSSES)[:2]
    losses[computing] -= least * whole_ns
    losses[unused] = whole_ns - span_ns * sum(len(each.gpus) for each in idle)
    largest = max(losses, key=lambda name: losses[name])
    share = losses[largest] / ((1 - least) * whole_ns)
    return f"{100 * share:.0f} % of what it is above the bound is {largest}"


def _gains(problem: Problem, plan: Candidate, replan: Replan) -> Iterator[Gain]:
    if (more := more_memory(problem, plan)) is not None:
        yield Gain("half as much memory again on its fullest devices (re-drafted)", more.time_ns)
    node = last_node_size(problem)
    texts = ["bandwidth=2", "recompute=here"] if problem.recompute != "never" else ["bandwidth=2"]
    planned = problem.num_layers * problem.num_devices <= SMALL and plan.update_rule == "synchronous"
    for text in [*texts, f"devices=+{node}"] if planned else texts:
        with suppress(PenstockError):  # a change that this request cannot have
            row = tried(change(problem, plan, text), plan, replan if planned else None, text.startswith("devices"))
            if row.plan is not None:
                yield Gain(f"{row.sentence} ({row.how})", row.plan.value_ns)
