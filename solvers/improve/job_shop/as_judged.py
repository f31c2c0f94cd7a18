"""The judge's rules as constraints, for private half-duplex channels and micro-batches of one size.

In the plain model a transfer or an operation may wait on purpose, so that another goes first; the judge (``simulate``)
starts each as soon as it is ready. Here each starts exactly when its input and the work before it on its device or
channel have ended. A channel carries the transfer that is ready first; of two at the same instant, the forward one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.improve.job_shop.model import Model, Scheduled
from penstock.solvers.improve.job_shop.shop import Operation


def keep_the_judges_rules(model: Model) -> None:
    """Add the judge's rules to a model that is built."""
    rows = {shop_stage: row for row in range(len(model.shop.devices)) for shop_stage in model.shop.stages_of(row)}
    number = model.shop.allocation.num_micro_batches

    def steps(kind: int, s: int) -> list[Scheduled]:
        return [model.steps[Operation(kind, s, m, rows[s])] for m in range(number)]

    for s in range(len(model.shop.allocation.stages)):
        forwards, backwards = steps(FORWARD, s), steps(BACKWARD, s)
        previous, after = model.shop.allocation.previous(s), model.shop.allocation.next(s)
        gradient_from = forwards if after is None else steps(BACKWARD, after)
        input_from = [None] * number if previous is None else steps(FORWARD, previous)
        arrived = [
            model.transfers.get((0, -1 if previous is None else previous, m), input_from[m]) for m in range(number)
        ]
        returned = [
            model.transfers.get((1, -1 if after is None else after, m), gradient_from[m]) for m in range(number)
        ]
        _self_timed(model, (forwards, arrived), (backwards, returned), _orders(model, forwards, backwards))
        if after is None or (0, s, 0) not in model.transfers or (1, after, 0) not in model.transfers:
            continue
        there = [model.transfers[0, s, m] for m in range(number)]
        back = [model.transfers[1, after, m] for m in range(number)]
        ahead = _orders(model, there, back)
        for (m, k), first in ahead.items():
            model.cp.add(forwards[m].end <= gradient_from[k].end).only_enforce_if(first)
            model.cp.add(gradient_from[k].end + 1 <= forwards[m].end).only_enforce_if(~first)
        _self_timed(model, (there, forwards), (back, gradient_from), ahead)


def _end(step: Scheduled | None) -> Any:
    return 0 if step is None else step.end


def _orders(model: Model, there: list[Scheduled], back: list[Scheduled]) -> dict[tuple[int, int], Any]:
    """Return a literal for each (m, k), k earlier: the step ``there`` of m runs before the step ``back`` of k."""
    literals = {}
    for m in range(len(there)):
        for k in range(m):
            first = model.cp.new_bool_var("")
            model.cp.add(back[k].start >= there[m].end).only_enforce_if(first)
            model.cp.add(there[m].start >= back[k].end).only_enforce_if(~first)
            literals[m, k] = first
    for (m, k), first in literals.items():
        for sooner in ((m - 1, k), (m, k + 1)):
            if sooner in literals:
                model.cp.add_implication(first, literals[sooner])
    return literals


def _self_timed(
    model: Model,
    there: tuple[Sequence[Scheduled], Sequence[Scheduled | None]],
    back: tuple[Sequence[Scheduled], Sequence[Scheduled | None]],
    ahead: dict[tuple[int, int], Any],
) -> None:
    """Start each step when it is ready, or when a step before it on the same device or channel ends."""
    for m, (step, ready) in enumerate(zip(*there, strict=True)):
        ends = [there[0][m - 1]] if m else []
        others = [(back[0][k], ~ahead[m, k]) for k in range(m)]
        _starts_at_one_of(model, step, [ready, *ends], others)
    for k, (step, ready) in enumerate(zip(*back, strict=True)):
        ends = [back[0][k - 1]] if k else []
        others = [(there[0][m], ahead[m, k]) for m in range(k + 1, len(there[0]))]
        _starts_at_one_of(model, step, [ready, *ends, there[0][k]], others)


def _starts_at_one_of(
    model: Model, step: Scheduled, ends: list[Scheduled | None], others: list[tuple[Scheduled, Any]]
) -> None:
    """Let a step start exactly when one of ``ends`` ends, or one of the ``others`` whose literal holds."""
    chosen = []
    for each in ends:
        literal = model.cp.new_bool_var("")
        model.cp.add(step.start == _end(each)).only_enforce_if(literal)
        chosen.append(literal)
    for each, condition in others:
        literal = model.cp.new_bool_var("")
        model.cp.add(step.start == each.end).only_enforce_if(literal)
        model.cp.add_implication(literal, condition)
        chosen.append(literal)
    model.cp.add_bool_or(chosen)
