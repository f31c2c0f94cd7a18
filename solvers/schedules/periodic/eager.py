"""``eager``: one forward and one backward in turn without a flush, PipeDream's 1F1B and 1F1B-RR [1]_ (ALGORITHMS 5.1).

Stage s keeps ``depth[s]`` micro-batches in flight. Where its replicas work in turn that counts all of them, in whole
turns: on each replica F_k is followed by B_{k - ahead}, ``ahead`` = depth - turns, which may not grow along the
pipeline. PipeDream's depth is NOAM, ceil(machines from the stage on / machines of the stage) per replica, which is
N - s for a straight pipeline.

The pattern's period is the largest cycle ratio of the dependencies: a stage's work, and for stages s <= t the
round trip of a micro-batch from s to t over the micro-batches that s may have in flight in the meantime. Its starts
are the earliest ones for that period; transfers wait for nothing but their channel's load.

.. [1] Narayanan et al., PipeDream (SOSP 2019), section 3.2, figure 8 and 3.3; PipeDream-2BW (ICML 2021), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.costs.buckets import buckets, exposed_ns, leads_ns
from penstock.solvers.costs.memory import activation_bytes, free_bytes, static_bytes, transient_bytes, weight_bytes
from penstock.solvers.costs.stage import stage_costs, update_ns
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Pattern, PatternOperation
from penstock.solvers.model.update_rules import UpdateRule, group_of, micro_batches_per_update, weight_copies
from penstock.solvers.schedules.support.rows import refuse_shared_devices

RULES: frozenset[UpdateRule] = frozenset({"weight_stashing", "double_buffered", "double_grouped"})
DEEPER = (2, 3, 4, 6)
"""Depths that planners try, as halves of NOAM's."""
LONGEST_TURN = 2_000
"""Micro-batches after which replicas and the global batch begin their turn again; longer turns take too long."""


class Work(NamedTuple):
    """A stage's times per micro-batch, its slowest replica: ``step_ns`` is the share of a step and its reduction.

    ``out_ns`` and ``back_ns`` are the transfers to and from the next stage, ``channel_ns`` what they load their
    channel with; ``turns`` replicas work in turn.
    """

    forward_ns: int
    backward_ns: int
    step_ns: int
    out_ns: int
    back_ns: int
    channel_ns: int
    turns: int


def eager(
    problem: Problem,
    allocation: Allocation,
    *,
    update_rule: UpdateRule = "weight_stashing",
    depth: Sequence[int] | None = None,
) -> Pattern:
    """Return the pattern with ``depth[s]`` in-flight micro-batches of stage s.

    None: NOAM's depths, reduced where memory is short. Depths are rounded up to whole turns. Raises ``InvalidPlan`` for
    depths that deadlock (``ahead`` grows along the pipeline), that ask two weight versions for a third, or that begin a
    micro-batch before the only version that it may use. Raises ``UnsupportedRequest`` for several pipelines, and for
    devices that hold several stages.
    """
    if len(allocation.pipelines) > 1:
        raise UnsupportedRequest(
            f"schedule 'eager' runs one pipeline, but the plan has {len(allocation.pipelines)}",
            remedy="one pipeline with replicated stages, or schedule early-backward",
        )
    refuse_shared_devices(problem, allocation)
    wanted = fitted_depth(problem, allocation, update_rule, noam(allocation)) if depth is None else tuple(depth)
    _refuse(allocation, update_rule, wanted)
    vector = tuple(_whole(stage, each) for stage, each in zip(allocation.stages, wanted, strict=True))
    works = stage_works(problem, allocation, update_rule)
    period = period_ns(works, vector)
    operations = []
    for number, (forward, backward) in enumerate(_earliest_starts(works, vector, period)):
        for kind, start in ((FORWARD, forward), (BACKWARD, backward)):
            operations.append(PatternOperation(kind, number, start % period, start // period))
    return Pattern("eager", period, 1, tuple(operations))


def noam(allocation: Allocation) -> tuple[int, ...]:
    """Return PipeDream's in-flight micro-batches (section 3.2): enough for one per replica from the stage on."""
    depths: list[int] = []
    after = 0
    for stage in reversed(allocation.stages):
        turns = _turns(stage)
        after += turns
        depths.append(-(-after // turns) * turns)
    return tuple(depths[::-1])


def fitted_depth(
    problem: Problem, allocation: Allocation, update_rule: UpdateRule, wanted: Sequence[int]
) -> tuple[int, ...]:
    """Return ``wanted`` in whole turns, clamped by the memory of stashes and weight versions; ``ahead`` never grows.

    At least one micro-batch per replica stays; the simulation checks whether it fits. Two weight versions allow
    forwards to be a global batch ahead (M >= in-flight - 1), a single one none.
    """
    depths: list[int] = []
    ahead = max(wanted) if update_rule == "weight_stashing" else allocation.num_micro_batches
    for number, (stage, want) in enumerate(zip(allocation.stages, wanted, strict=True)):
        turns = _turns(stage)
        ahead = 0 if _has_one_version(allocation, update_rule, number) else ahead
        rounds = min(want - 1, ahead) // turns
        depths.append(_depth_that_fits(problem, allocation, update_rule, number, (rounds + 1) * turns))
        ahead = depths[-1] - turns
    return tuple(depths)


def bytes_needed(problem: Problem, allocation: Allocation, update_rule: UpdateRule, number: int, depth: int) -> int:
    """Return the bytes on a stage's device with ``depth`` in-flight micro-batches, weight versions included."""
    stage = allocation.stages[number]
    rows = most_rows(problem, allocation)
    trainable = weight_bytes(problem, stage)[1]
    resident = static_bytes(problem, stage).total + transient_bytes(problem, stage, rows)
    resident += (weight_copies(update_rule, allocation, number, depth) - 1) * trainable
    return resident + -(-depth // _turns(stage)) * activation_bytes(problem, stage, rows)


def lacking_bytes(problem: Problem, allocation: Allocation, update_rule: UpdateRule, number: int, depth: int) -> int:
    """Return the bytes (at least 0) that a stage's smallest device lacks for ``depth`` micro-batches, no buffers."""
    room = free_bytes(problem, allocation.stages[number].devices)
    return max(0, bytes_needed(problem, allocation, update_rule, number, depth) - room)


def turn_of(allocation: Allocation) -> int:
    """Return the number of micro-batches after which all round-robin replicas, and the global batch, begin again."""
    return lcm(allocation.num_micro_batches, *(_turns(stage) for stage in allocation.stages))


def usual_depths(problem: Problem, allocation: Allocation, update_rule: UpdateRule) -> set[tuple[int, ...]]:
    """Return NOAM's depths and multiples of them (``DEEPER``), reduced where memory is short."""
    base = noam(allocation)
    return {fitted_depth(problem, allocation, update_rule, [each * half // 2 for each in base]) for half in DEEPER}


def shortest_depths(
    problem: Problem, allocation: Allocation, update_rule: UpdateRule, depths: Iterable[tuple[int, ...]]
) -> tuple[int, list[tuple[int, ...]]]:
    """Return the shortest period of some depths, and the depths with that period that are worth simulating.

    These are the shallowest. Replicas that step together send their micro-batches in bursts, which the period does
    not model: for them also the deepest.
    """
    works = stage_works(problem, allocation, update_rule)
    ranked = sorted((period_ns(works, depth), depth) for depth in depths)
    best = [depth for period, depth in ranked if period == ranked[0][0]]
    bursts = any(_turns(stage) > 1 for stage in allocation.stages)
    return ranked[0][0], list(dict.fromkeys((best[0], best[-1]))) if bursts else best[:1]


def stage_works(problem: Problem, allocation: Allocation, update_rule: UpdateRule) -> tuple[Work, ...]:
    """Return the times of every stage, for the largest micro-batch of the request."""
    rows = most_rows(problem, allocation)
    works = []
    for number, stage in enumerate(allocation.stages):
        costs = stage_costs(problem, stage, rows)
        turns = _turns(stage)
        every = micro_batches_per_update(update_rule, stage, allocation.num_micro_batches)
        chain = buckets(problem, stage)
        ready = [lead for lead, _weight in leads_ns(problem, stage, rows, chain)]
        step = update_ns(problem, stage) + exposed_ns(chain, ready)
        out, back, channel = _edge(problem, allocation, number, rows)
        forward, backward, *_split = costs.durations_ns()
        works.append(Work(max(1, forward), max(1, backward), -(-step * turns // every), out, back, channel, turns))
    return tuple(works)


def period_ns(works: Sequence[Work], depth: Sequence[int]) -> int:
    """Return the time per micro-batch of the steady state if transfers wait only for their channel's load."""
    best = 1
    for s, work in enumerate(works):
        best = max(best, work.channel_ns, -(-(work.forward_ns + work.backward_ns + work.step_ns) // work.turns))
        around = work.step_ns
        for t in range(s, len(works)):
            around += works[t].forward_ns + works[t].backward_ns
            under_way = depth[s] - depth[t] + works[t].turns
            best = max(best, -(-around // under_way))
            around += works[t].out_ns + works[t].back_ns
    return best


def _earliest_starts(works: Sequence[Work], depth: Sequence[int], period: int) -> list[tuple[int, int]]:
    """Return the starts of micro-batch 0's F and B on every stage: longest paths, swept until they converge."""
    count = len(works)
    forward, backward = [0] * count, [0] * count
    moved = True
    while moved:
        before = (*forward, *backward)
        for s, work in enumerate(works):
            if s > 0:
                forward[s] = max(forward[s], forward[s - 1] + works[s - 1].forward_ns + works[s - 1].out_ns)
            ahead = (depth[s] - work.turns) * period
            backward[s] = max(backward[s], forward[s] + work.forward_ns + ahead)
        for s in reversed(range(count)):
            work = works[s]
            if s < count - 1:
                backward[s] = max(backward[s], backward[s + 1] + works[s + 1].backward_ns + work.back_ns)
            forward[s] = max(forward[s], backward[s] + work.backward_ns + work.step_ns - depth[s] * period)
        moved = before != (*forward, *backward)
    return list(zip(forward, backward, strict=True))


def _edge(problem: Problem, allocation: Allocation, number: int, rows: int) -> tuple[int, int, int]:
    """Return the transfers of a micro-batch to and from the next stage, and their load on the busiest channel."""
    after = allocation.next(number)
    if after is None:
        return 0, 0, 0
    ways = [transfer(problem, allocation, *each) for each in ((number, rows, 0), (after, rows, 1))]
    out, back = (0 if way is None else way.duration_ns for way in ways)
    if problem.rules.shared:
        one, other = (set() if way is None else set(way.resources) for way in ways)
        together = bool(one & other)
    else:
        together = problem.rules.channel == "half"
    free = not problem.rules.shared and problem.rules.channel == "none"
    return out, back, 0 if free else out + back if together else max(out, back)


def _depth_that_fits(
    problem: Problem, allocation: Allocation, update_rule: UpdateRule, number: int, wanted: int
) -> int:
    turns = _turns(allocation.stages[number])
    depth = wanted
    while depth > turns and lacking_bytes(problem, allocation, update_rule, number, depth) > 0:
        depth -= turns
    return depth


def _turns(stage: Stage) -> int:
    return stage.replicas if stage.dispatch == "round_robin" else 1


def _refuse(allocation: Allocation, update_rule: UpdateRule, vector: tuple[int, ...]) -> None:
    if update_rule not in RULES:
        raise InvalidPlan(
            f"schedule 'eager' is for {' and '.join(sorted(RULES))}, not for {update_rule!r}",
            remedy="early-backward runs the same order with a flush",
        )
    if len(vector) != len(allocation.stages) or min(vector) < 1:
        raise InvalidPlan(
            f"depth {list(vector)} has to be {len(allocation.stages)} numbers of at least 1, one per stage"
        )
    whole = [_whole(stage, depth) for stage, depth in zip(allocation.stages, vector, strict=True)]
    ahead = [depth - _turns(stage) for stage, depth in zip(allocation.stages, whole, strict=True)]
    for number, (before, after) in enumerate(pairwise(ahead), 1):
        if after > before:
            raise InvalidPlan(
                f"stage {number} keeps {whole[number]} micro-batches in flight, but stage {number - 1} sends too few "
                "before it waits for a backward: a deadlock",
                remedy=f"at most {before // _turns(allocation.stages[number]) + 1} per replica for stage {number}",
            )
    for number, each in enumerate(ahead):
        if each > 0 and _has_one_version(allocation, update_rule, number):
            raise InvalidPlan(
                f"stage {number} keeps {whole[number]} micro-batches in flight, but stages of the second half have "
                "one weight version: a micro-batch may begin only after the previous global batch has ended",
                remedy=f"{_turns(allocation.stages[number])} micro-batches in flight for stage {number}",
            )
    most = allocation.num_micro_batches
    if update_rule != "weight_stashing" and max(ahead) > most:
        raise InvalidPlan(
            f"{max(whole)} micro-batches in flight need a third weight version; with two versions, forwards may be "
            f"at most one global batch ahead, {most} micro-batches",
            remedy=f"at least {max(ahead)} micro-batches per global batch, or fewer in flight",
        )


def _has_one_version(allocation: Allocation, update_rule: UpdateRule, number: int) -> bool:
    """Return whether a global batch's micro-batches all use the newest weights, so that one turn may be in flight."""
    return update_rule == "double_grouped" and group_of(allocation, number) == 1


def _whole(stage: Stage, depth: int) -> int:
    turns = _turns(stage)
    return -(-depth // turns) * turns
