"""The call of the solver, and the pattern in whole nanoseconds from its solution."""

from __future__ import annotations

from typing import NamedTuple

from penstock.solvers.model.schedule import Pattern
from penstock.solvers.schedules.periodic.ilp.path import Counts, PathOperation, path_of, rivals, timed
from penstock.solvers.schedules.periodic.inside_out import Starts, fits
from penstock.solvers.schedules.support.stage_line import StageLine, as_pattern

NAME = "periodic-ilp"
NODES = 2000
ROUNDING = 10**6
"""The inverse of the relative error that is allowed for the solver's arithmetic."""


class PatternAnswer(NamedTuple):
    """A solution: no pattern that was searched for has a period below ``bound_ns``.

    ``pattern`` is the shortest one. If it is None, ``proven`` says that no pattern exists; otherwise the search ended
    without one.
    """

    pattern: Pattern | None
    bound_ns: int
    proven: bool


def solve(line: StageLine, *, below_ns: int | None = None, nodes: int = NODES, seed: int = 0) -> PatternAnswer:
    """Return the pattern of the smallest period; ``below_ns``: only search patterns shorter by a millionth.

    ``PatternAnswer.proven`` holds to that part too. Within the model, a processor runs one operation at a time, and a
    pair of processors has one transfer at a time in either direction. ``nodes``: limit on the search tree, after which
    the best pattern so far is returned. The same call has the same result: one thread, a seed, no clock.
    """
    path = path_of(line)
    least = max(1, *(sum(path[i].duration_ns for i in positions) for positions in rivals(path)))
    longest = line.alone_ns()
    if below_ns is not None:
        longest = min(longest, below_ns - 1 - below_ns // ROUNDING)
    room, most = _room(line)
    if longest < least or min(most) < 1:
        return PatternAnswer(None, max(least, longest + 1), True)

    from penstock.solvers.schedules.periodic.ilp.model import FEASIBLE, IMPOSSIBLE, OPTIMAL, Model, ask

    model = Model(line, path, room, most, least, longest)
    model.build()
    status, rho = ask(model, nodes, seed % 2**31)
    if status == IMPOSSIBLE:
        return PatternAnswer(None, max(least, _rounded_down(longest + 1)), True)
    bound = max(least, _rounded_down(least / rho))
    pattern = None
    if status in (OPTIMAL, FEASIBLE):
        counts = {pair: round(count.value()) for pair, count in model.counts.items()}
        pattern = _pattern(line, path, counts, least)
    if pattern is None or (below_ns is not None and pattern.period_ns >= below_ns):
        return PatternAnswer(None, bound, False)
    return PatternAnswer(pattern, min(bound, pattern.period_ns), status == OPTIMAL)


def _rounded_down(bound_ns: float) -> int:
    return int(bound_ns * (1 - 1 / ROUNDING))


def _room(line: StageLine) -> tuple[list[int], list[int]]:
    """Return each processor's bytes for in-flight micro-batches, and how many of them each stage may keep."""
    room = list(line.available_bytes)
    for number in range(len(room)):
        stages = [s for s in range(line.size) if line.processor[s] == number]
        room[number] -= sum(line.fixed_bytes[s] for s in stages) + max((line.work_bytes[s] for s in stages), default=0)
    most = []
    for s, kept in enumerate(line.kept_bytes):
        budget = room[line.processor[s]]
        most.append(min(line.most_in_flight, budget // kept if kept else line.most_in_flight) if budget >= 0 else 0)
    return room, most


def _pattern(line: StageLine, path: tuple[PathOperation, ...], counts: Counts, least_ns: int) -> Pattern | None:
    """Return the pattern; None where the solver's rounding hid that the counts are inconsistent or do not fit."""
    timing = timed(path, counts, least_ns)
    if timing is None:
        return None
    period, start = timing
    start_of = {(step.forward, step.stage): t for step, t in zip(path, start, strict=True) if not step.move}
    early = min(start) // period * period
    starts = Starts(*([start_of[forward, s] - early for s in range(line.size)] for forward in (True, False)))
    return as_pattern(NAME, period, starts.forward_ns, starts.backward_ns) if fits(line, period, starts) else None
