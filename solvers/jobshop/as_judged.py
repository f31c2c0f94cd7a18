"""The judge's rules as constraints, for private half-duplex channels and micro-batches of one size.

In the plain model a transfer or an operation may wait on purpose, so that another goes first; the judge (``simulate``)
starts what is ready. Here everything starts exactly when what it waits for has ended: its input, what its device or
channel ran before; and a channel carries first what is ready first, at one instant the forward transfer.
"""

from __future__ import annotations

from typing import Any

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.jobshop.model import Model, Step


def keep_the_judges_rules(model: Model) -> None:
    """Add them to a model that is built."""
    number = model.allocation.num_micro_batches
    for s in model.stages:
        forwards = [model.operations[FORWARD, s, m] for m in range(number)]
        backwards = [model.operations[BACKWARD, s, m] for m in range(number)]
        arrived = [_arrival(model, FORWARD, s, m) for m in range(number)]
        returned = [_arrival(model, BACKWARD, s, m) for m in range(number)]
        _self_timed(model, (forwards, arrived), (backwards, returned), _orders(model, forwards, backwards))
        after = model.allocation.next(s)
        if after is None or (0, s, 0) not in model.transfers or (1, after, 0) not in model.transfers:
            continue
        there = [model.transfers[0, s, m] for m in range(number)]
        back = [model.transfers[1, after, m] for m in range(number)]
        made = [step.end for step in forwards]
        graded = [model.operations[BACKWARD, after, m].end for m in range(number)]
        ahead = _orders(model, there, back)
        for (m, k), first in ahead.items():
            model.cp.add(made[m] <= graded[k]).only_enforce_if(first)
            model.cp.add(graded[k] + 1 <= made[m]).only_enforce_if(~first)
        _self_timed(model, (there, made), (back, graded), ahead)


def _arrival(model: Model, kind: int, s: int, m: int) -> Any:
    """When an operation's input is there: at 0, or when a transfer or the operation that makes it has ended."""
    other = model.allocation.previous(s) if kind == FORWARD else model.allocation.next(s)
    if other is None:
        return 0 if kind == FORWARD else model.operations[FORWARD, s, m].end
    direction = 0 if kind == FORWARD else 1
    step = model.transfers.get((direction, other, m))
    return model.operations[kind, other, m].end if step is None else step.end


def _orders(model: Model, there: list[Step], back: list[Step]) -> dict[tuple[int, int], Any]:
    """For what goes forward of micro-batch m and back of an earlier one k, a literal: m first."""
    found = {}
    for m in range(len(there)):
        for k in range(m):
            first = model.cp.new_bool_var("")
            model.cp.add(back[k].start >= there[m].end).only_enforce_if(first)
            model.cp.add(there[m].start >= back[k].end).only_enforce_if(~first)
            found[m, k] = first
    for (m, k), first in found.items():
        for sooner in ((m - 1, k), (m, k + 1)):
            if sooner in found:
                model.cp.add_implication(first, found[sooner])
    return found


def _self_timed(
    model: Model,
    there: tuple[list[Step], list[Any]],
    back: tuple[list[Step], list[Any]],
    ahead: dict[tuple[int, int], Any],
) -> None:
    """Each step starts when it is ready, or when a step before it on the same device or channel ends."""
    for m, (step, ready) in enumerate(zip(*there, strict=True)):
        ends = [there[0][m - 1].end] if m else []
        others = [(back[0][k].end, ~ahead[m, k]) for k in range(m)]
        _starts_at_one_of(model, step, [ready, *ends], others)
    for k, (step, ready) in enumerate(zip(*back, strict=True)):
        ends = [back[0][k - 1].end] if k else []
        others = [(there[0][m].end, ahead[m, k]) for m in range(k + 1, len(there[0]))]
        _starts_at_one_of(model, step, [ready, *ends, there[0][k].end], others)


def _starts_at_one_of(model: Model, step: Step, times: list[Any], others: list[tuple[Any, Any]]) -> None:
    """Equal to one of ``times``, or of the others whose literal holds."""
    chosen = []
    for time in times:
        literal = model.cp.new_bool_var("")
        model.cp.add(step.start == time).only_enforce_if(literal)
        chosen.append(literal)
    for time, condition in others:
        literal = model.cp.new_bool_var("")
        model.cp.add(step.start == time).only_enforce_if(literal)
        model.cp.add_implication(literal, condition)
        chosen.append(literal)
    model.cp.add_bool_or(chosen)
