"""The limit of a plan: a stage, a link or memory; and the gain from more of each.

*Sensitivities* are simulations of the plan's order with one input changed: a stage that computes in nine tenths of the
time, a link twice as wide, free transfers or all-reduces, no latency. More memory is tried on the devices of the
fullest stage, with the best order that then fits. At most ``STAGES`` stages with most of the critical path are tried,
and at most ``LINKS`` links with most traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidPlan
from penstock.solvers.explanation.changes import fullest_device, link_of, with_layers, with_memory, with_network
from penstock.solvers.explanation.critical_path import CriticalPath
from penstock.solvers.explanation.idle import Idle
from penstock.solvers.explanation.reordering import best_order, can_be_reordered, schedules_of
from penstock.solvers.explanation.run import JudgedRun
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders

STAGES, LINKS = 4, 3
LESS = Fraction(9, 10)
MORE_MEMORY = Fraction(3, 2)

Thing = Literal["stage", "link", "cut", "transfers", "all-reduces", "latency", "memory"]


class Sensitivity(NamedTuple):
    """One changed input and the plan's time with it; ``place``: a stage, or the stage before a cut."""

    thing: Thing
    sentence: str
    time_ns: int
    how: Literal["re-timed", "re-drafted"]
    place: int = -1


class Binding(NamedTuple):
    """The plan's limit, as a sentence; ``place`` is the stage, or the stage before the cut."""

    thing: Literal["stage", "transfers", "all-reduces", "memory"]
    place: int
    sentence: str


def sensitivities(run: JudgedRun, path: CriticalPath) -> Iterator[Sensitivity]:
    """Yield the plan's time with each change, stages first."""
    problem, plan = run.plan_problem, run.plan
    shares = path.shares()
    for share in [share for share in shares if share.what == "operation"][:STAGES]:
        stage = plan.allocation.stages[share.place]
        changed = with_layers(problem, stage.first, stage.last, LESS)
        yield _timed("stage", f"stage {share.place} computes in 10 % less time", changed, plan, share.place)
    yield from _links(run, path)
    moved = [share for share in shares if share.what == "transfer"]
    if len(run.timeline.transfers.start_ns):
        free = replace(problem, forward_bytes=0 * problem.forward_bytes, backward_bytes=0 * problem.backward_bytes)
        yield _timed("transfers", "transfers take no time", free, plan, moved[0].place if moved else -1)
    if run.timeline.reductions or run.timeline.ties:
        yield _timed(
            "all-reduces",
            "all-reduces take no time",
            replace(problem, trainable_bytes=0 * problem.trainable_bytes, copies=None),
            plan,
        )
    if any(c.latency_ns for c in problem.network.cables) or any(i and i.latency_ns for i in problem.network.insides):
        yield _timed("latency", "links have no latency", with_network(problem, latency=Fraction(0)), plan)
    if (more := more_memory(problem, plan)) is not None:
        yield more


def _timed(thing: Thing, sentence: str, problem: Problem, plan: JudgedPlan, place: int = -1) -> Sensitivity:
    time = makespan_ns(
        problem, plan.allocation, plan.schedule, overlap=plan.overlap_all_reduce, update_rule=plan.update_rule
    )
    return Sensitivity(thing, sentence, time, "re-timed", place)


def _links(run: JudgedRun, path: CriticalPath) -> Iterator[Sensitivity]:
    """Yield the links of a shared network by their load, or the channels between stages of a private network."""
    problem, plan = run.plan_problem, run.plan
    if not problem.rules.shared:
        for share in [share for share in path.shares() if share.what == "transfer"][:LINKS]:
            cut = plan.allocation.stages[share.place].last
            half = np.ones(problem.num_layers - 1, dtype=np.int64)
            half[cut] = 2
            changed = replace(
                problem, forward_bytes=problem.forward_bytes // half, backward_bytes=problem.backward_bytes // half
            )
            sentence = f"the channel between stages {share.place} and {share.place + 1} is twice as wide"
            yield _timed("cut", sentence, changed, plan, share.place)
        return
    for link in _busiest_links(run)[:LINKS]:
        changed = with_network(problem, Fraction(2), link=link)
        yield _timed("link", f"{link} is twice as wide", changed, plan)


def _busiest_links(run: JudgedRun) -> list[str]:
    """Return the shared network's links by the busy time of their busiest direction, the busiest first."""
    loads: dict[frozenset[int], int] = {}
    for node, time in run.loads():
        used = run.network_resources(node)
        loads[used] = loads.get(used, 0) + time
    carried: dict[int, int] = {}
    for used, time in loads.items():
        for resource in used:
            carried[resource] = carried.get(resource, 0) + time
    busiest: dict[str, int] = {}
    for resource, time in carried.items():
        link = link_of(run.problem.network, resource)
        if link is not None:
            busiest[link] = max(busiest.get(link, 0), time)
    return [link for link, _time in sorted(busiest.items(), key=lambda item: (-item[1], item[0]))]


def more_memory(problem: Problem, plan: JudgedPlan) -> Sensitivity | None:
    """Try 1.5 times the memory on the devices of the fullest stage, as more micro-batches in flight may help."""
    if not can_be_reordered(plan):
        return None
    device = fullest_device(problem, plan)
    s = plan.allocation.held_stages[device][0]
    roomier = with_memory(problem, MORE_MEMORY, frozenset(plan.allocation.stages[s].devices))
    with suppress(InvalidPlan):
        reordered = best_order(roomier, plan.allocation, schedules_of(plan), overlap=plan.overlap_all_reduce)
        if reordered.fits and reordered.plan is not None:
            best = min(plan, reordered.plan, key=lambda each: each.value_ns)
            deeper = _depth(best, s)
            before = _depth(plan, s)
            flying = f" (K of stage {s}: {before} → {deeper})" if before and deeper and deeper != before else ""
            sentence = f"the devices of stage {s} have 1.5 times the memory{flying}"
            return Sensitivity("memory", sentence, best.value_ns, "re-drafted", s)
    return None


def _depth(plan: JudgedPlan, s: int) -> int | None:
    if isinstance(plan.schedule, Orders) and s < len(plan.schedule.warmup):
        return plan.schedule.warmup[s]
    return None


def binding(problem: Problem, plan: JudgedPlan, path: CriticalPath, idle: tuple[Idle, ...]) -> Binding:
    """Return the stage, cut or all-reduces with most of the critical path; or memory, where it makes devices idle.

    Memory is the limit where devices wait for it longer than any transfer or all-reduce takes on the path.
    """
    shares = path.shares()
    largest = shares[0] if shares else None
    moved = max((share.length_ns for share in shares if share.what in ("transfer", "all-reduce")), default=0)
    waiting = max(idle, key=lambda each: each.memory_ns)
    span = plan.timeline.window_ns[1] - plan.timeline.window_ns[0]
    if waiting.memory_ns > max(moved, span // 20):
        device = problem.devices[waiting.devices[0]].name
        s = plan.allocation.held_stages[waiting.devices[0]][0]
        share = 100 * waiting.memory_ns / span
        return Binding(
            "memory", s, f"memory of {device} (stage {s}) binds: it idles {share:.0f} % of the time for lack of it"
        )
    if largest is None:
        return Binding("stage", 0, "nothing takes any time")
    part = f"{100 * largest.length_ns / path.length_ns:.0f} % of the critical path"
    if largest.what == "transfer":
        after = largest.place + 1
        sentence = f"the link between stages {largest.place} and {after} binds: its transfers are {part}"
        return Binding("transfers", largest.place, sentence)
    if largest.what == "all-reduce":
        return Binding("all-reduces", largest.place, f"the all-reduces of stage {largest.place} bind: they are {part}")
    stage = plan.allocation.stages[largest.place]
    what = "updates" if largest.what == "update" else "computing"
    waits = "" if largest.what == "update" else _waiting(problem, stage)
    sentence = f"stage {largest.place} (layers {stage.first}–{stage.last}) binds: its {what} is {part}{waits}"
    return Binding("stage", largest.place, sentence)


def _waiting(problem: Problem, stage: Stage) -> str:
    """Return which kind of a stage's GPUs waits for which, if they run parts of the same micro-batches; else "".

    The kinds are compared by the time of the stage's layers for one sample on one GPU.
    """
    gpus = problem.real or problem
    kinds = sorted({gpu.kind for device in stage.devices for gpu in problem.gpus(device)})
    if len(kinds) < 2 or stage.dispatch != "rows":
        return ""

    def alone_ns(kind: str) -> int:
        sums = gpus.costs(kind, 1).passes_ns
        return int(sums[stage.last + 1] - sums[stage.first])

    quick, slow = min(kinds, key=alone_ns), max(kinds, key=alone_ns)
    if alone_ns(quick) == alone_ns(slow):
        return ""
    share = f"{100 * alone_ns(quick) / alone_ns(slow):.0f} %"
    return f", in which its {quick} wait for its {slow}: for one sample they compute in {share} of the time"
