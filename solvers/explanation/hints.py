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
from penstock.solvers.explanation.idle import idle_split
from penstock.solvers.explanation.run import Run
from penstock.solvers.explanation.what_if import Replan, tried
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Candidate

SMALL = 128
MAX_OPERATIONS = 50_000
LEAST_GAIN = 0.001


class Gain(NamedTuple):
    """A change, and the time that it leads to."""

    sentence: str
    time_ns: int


def hints(problem: Problem, plan: Candidate, replan: Replan) -> list[str]:
    """Return what binds; and the change that helps most, where one helps at all. ``replan`` plans a changed problem."""
    run = Run(problem, plan)
    path = path_of_run(run)
    found = [binding(problem, plan, path, idle_split(run)).sentence]
    if run.first_transfer > MAX_OPERATIONS:
        return found
    best = min(_gains(problem, plan, replan), key=lambda gain: gain.time_ns, default=None)
    if best is not None and best.time_ns < (1 - LEAST_GAIN) * plan.value_ns:
        found.append(f"{best.sentence} would help most: {100 * (1 - best.time_ns / plan.value_ns):.1f} % less time")
    return found


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
