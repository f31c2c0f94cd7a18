"""Bounds on a periodic plan per global batch: loads, reductions in turn, round trips (BOUNDS 8.1).

A stage steps after every E micro-batches, so M / E times per global batch, and each of n replicas that take turns gets
one micro-batch in n: shares are fractions, of a run without end. If at most K micro-batches are between forward and
backward on a device, each for at least the round trip after the stage, M of them take at least M times that over K
(Little's law): so the order of the pattern bounds how much communication can be hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product

from penstock.schemas.program import BACKWARD, FORWARD, INPUT
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.model.update_rules import UpdateRule, micro_batches_per_update


class SteadyTimes:
    """Loads of a pattern's steady state; every micro-batch counts as the largest of the request."""

    def __init__(self, problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule) -> None:
        number = allocation.num_micro_batches
        even = replace(problem, global_batch_size=most_rows(problem, allocation) * number)
        self.times = StageTimes(even, allocation, pattern, rule)
        self.pattern = pattern
        self._updates = [Fraction(number, micro_batches_per_update(rule, each, number)) for each in allocation.stages]

    def _batches(self, s: int) -> Fraction:
        """Return the micro-batches of a global batch that one device of a stage computes."""
        stage = self.times.allocation.stages[s]
        turns = stage.replicas if stage.dispatch == "round_robin" else 1
        return Fraction(self.times.allocation.num_micro_batches, turns)

    def work_ns(self, device: int) -> Fraction:
        """Return the time that a device computes, including updates and the ties that it waits for."""
        total = Fraction(0)
        for s in self.times.allocation.held_stages[device]:
            total += self._batches(s) * self.times.costs[s][0].passes_ns + self._updates[s] * self.times.update_ns[s]
        return total + sum(
            self._updates[tie.stages[0]] * tie.duration_ns for tie in self.times.ties if device in tie.devices
        )

    def reduction_ns(self) -> Fraction:
        """Return the largest total of a stage's all-reduces, which run one after the other."""
        totals = [
            self._updates[group.stages[0]] * sum(bucket.duration_ns for bucket in chain)
            for group, chain in self.times.reductions
        ]
        return max(totals, default=Fraction(0))

    def resource_ns(self) -> Fraction:
        """Return the largest load of a link, port or private channel."""
        loads: dict[int, Fraction] = {}
        for resource, load in self._loads():
            loads[resource] = loads.get(resource, Fraction(0)) + load
        return max(loads.values(), default=Fraction(0))

    def _loads(self) -> Iterator[tuple[int, Fraction]]:
        allocation, times = self.times.allocation, self.times
        for s, direction in product(range(len(allocation.stages)), (0, 1)):
            load = Fraction(allocation.num_micro_batches * times.lags_ns(s, direction)[0])
            yield from ((resource, load) for resource in times.channels(s, direction))
        for group, chain in times.reductions if times.problem.rules.shared else ():
            for bucket in chain:
                load = self._updates[group.stages[0]] * bucket.duration_ns
                yield from ((resource, load) for resource in bucket.resources)
        for tie in times.ties:
            yield from ((resource, self._updates[tie.stages[0]] * tie.duration_ns) for resource in tie.resources)

    def way_round_ns(self) -> Fraction:
        """Return the largest round trip of all stages, divided by the micro-batches that its devices have in flight."""
        times, longest = self.times, Fraction(0)
        for s, stage in enumerate(times.allocation.stages):
            around = times.forward[s] + times.rounds[s] + times.backward[s]
            turns = stage.replicas if stage.dispatch == "round_robin" else 1
            for turn in range(turns):
                longest = max(longest, self._batches(s) * around / most_in_flight(self.pattern, s, turn, turns))
        return longest


def most_in_flight(pattern: Pattern, s: int, turn: int = 0, turns: int = 1) -> int:
    """Return the most micro-batches that a device has between a forward of the stage and the gradient of its input.

    Only micro-batches with number ``turn`` modulo ``turns`` count, in the order of the pattern's starts.
    """
    period, per_period = pattern.period_ns * turns, pattern.micro_batches_per_period
    begins: dict[int, tuple[int, int]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for place, operation in enumerate(pattern.operations):
        if operation.stage != s or operation.kind not in (FORWARD, BACKWARD, INPUT):
            continue
        for k in range(turns):
            m = operation.micro_batch + k * per_period
            if m % turns == turn:
                start = (k + operation.shift) * pattern.period_ns + operation.start_ns
                (begins if operation.kind == FORWARD else ends)[m] = (start, place)
    return max(
        sum(_begun(start, place, begins[m], period) - _begun(start, place, ends[m], period) for m in begins)
        for start, place in begins.values()
    )


def _begun(start: int, place: int, other: tuple[int, int], period: int) -> int:
    """Return how often another operation has begun, less one, when one at ``start`` begins; ties: the first listed."""
    first, other_place = other
    return (start - first - (other_place > place)) // period
