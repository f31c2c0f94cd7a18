"""The limit of a solve's plan, and the change that would help it most, in a few words for ``why``.

Each figure is a re-timing of the plan by simulation (links twice as wide), a new order of its stages (1.5 times the
memory, recomputation on the fullest device), or, where layers times devices are at most ``SMALL``, a new plan with one
more node. For plans with more than ``MAX_OPERATIONS`` operations only the limit is named, and no change is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from penstock.schemas.errors import PenstockError
from penstock.solvers.degrees.shares import exposed_share
from penstock.solvers.explanation.binding import binding, more_memory
from penstock.solvers.explanation.changes import change, last_node_size
from penstock.solvers.explanation.critical_path import path_of_run
from penstock.solvers.explanation.idle import Idle, idle_split
from penstock.solvers.explanation.run import JudgedRun
from penstock.solvers.explanation.what_if import Replan, tried
from penstock.solvers.model.problem import Device, Problem
from penstock.solvers.model.result import JudgedPlan

WIDE_GAP = 2
"""The multiple of the bound on every plan from which on the largest loss is named."""

LOW_USE = 0.1
"""The fraction of the GPUs' peak (MFU) below which the largest loss is named."""

COMPUTING = "computing above the least, as with small slices, recomputation or slow devices"
COMMUNICATION = "communication among GPUs that hold layers together, which computation does not hide"
UNUSED = "devices that the plan does not use"

LOSSES = {
    COMPUTING: ("busy_ns",),
    COMMUNICATION: (),
    UNUSED: (),
    "waiting for slower devices of the same stage": ("slower_ns",),
    "filling and draining pipelines": ("fill_ns", "drain_ns"),
    "waiting for transfers": ("transfer_ns",),
    "waiting for all-reduces": ("all_reduce_ns",),
    "waiting for stages that have more work": ("other_stages_ns", "order_ns"),
    "waiting for memory": ("memory_ns",),
}
"""Names of the losses of devices' time, each with its fields of ``Idle``."""

SMALL = 128
MAX_OPERATIONS = 50_000
LEAST_GAIN = 0.001


class Gain(NamedTuple):
    """A change, and the plan's time with it."""

    sentence: str
    time_ns: int


def hints(problem: Problem, plan: JudgedPlan, replan: Replan | None, bound_ns: int = 0) -> list[str]:
    """Return the plan's limit, and the change that helps most, if any helps. ``replan`` plans a changed problem.

    ``bound_ns``: the bound on every plan. Where the plan takes ``WIDE_GAP`` times as long, or uses less than
    ``LOW_USE`` of the GPUs' peak, the largest loss is named. Without ``replan`` only low use is named.
    """
    used = [gpu for device in plan.timeline.uses for gpu in problem.gpus(device)]
    use = problem.peak_share(used, plan.value_ns)
    low = use is not None and use < LOW_USE
    if replan is None and not low:
        return []
    run = JudgedRun(problem, plan)
    path, idle = path_of_run(run), idle_split(run)
    sentences = [] if replan is None else [binding(problem, plan, path, idle).sentence]
    if use is not None and low:
        largest, share = _largest_loss(problem, plan, idle, used, use, problem.peak_ns)
        sentences.append(f"MFU is {100 * use:.1f} %, and {100 * share:.0f} % of the rest is {largest}")
    elif 0 < WIDE_GAP * bound_ns <= plan.value_ns:
        every = [gpu for device in range(problem.num_devices) for gpu in problem.gpus(device)]
        largest, share = _largest_loss(problem, plan, idle, every, bound_ns / plan.value_ns, {})
        sentences.append(f"{100 * share:.0f} % of what it is above the bound is {largest}")
    if replan is None or run.first_transfer > MAX_OPERATIONS:
        return sentences
    best = min(_gains(problem, plan, replan), key=lambda gain: gain.time_ns, default=None)
    if best is not None and best.time_ns < (1 - LEAST_GAIN) * plan.value_ns:
        sentences.append(f"{best.sentence} would help most: {100 * (1 - best.time_ns / plan.value_ns):.1f} % less time")
    return sentences


def _largest_loss(
    problem: Problem,
    plan: JudgedPlan,
    idle: tuple[Idle, ...],
    gpus: Sequence[Device],
    least: float,
    peak_ns: Mapping[str, float],
) -> tuple[str, float]:
    """Return the largest loss of the time of ``gpus``, and its fraction of all time beyond the least.

    ``least``: the necessary time, as a fraction of the plan's time. ``peak_ns``: the time of equal work on each kind,
    which weighs the kinds' times; empty: all times count alike.
    """

    def weight(those: Sequence[Device]) -> float:
        return sum(1 / peak_ns[gpu.kind] if peak_ns else 1.0 for gpu in those)

    span_ns = idle[0].busy_ns + idle[0].idle_ns
    whole = span_ns * weight(gpus)
    losses = {
        name: sum(getattr(each, field) * weight(each.gpus) for each in idle for field in fields)
        for name, fields in LOSSES.items()
    }
    losses[COMMUNICATION] = float(exposed_share(problem, plan.allocation)) * losses[COMPUTING]
    losses[COMPUTING] -= least * whole + losses[COMMUNICATION]
    losses[UNUSED] = whole - span_ns * sum(weight(each.gpus) for each in idle)
    largest = max(losses, key=lambda name: losses[name])
    return largest, losses[largest] / ((1 - least) * whole)


def _gains(problem: Problem, plan: JudgedPlan, replan: Replan) -> Iterator[Gain]:
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
