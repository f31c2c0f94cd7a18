"""One round of tasks: what they tell is announced at once, and put together in the order of the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.result import Bound
from penstock.solvers.solve.outcome import Found, Outcome
from penstock.solvers.solve.session import Session
from penstock.solvers.solve.tasks import Ask, Prove, Task
from penstock.solvers.solve.workers import Crew


@dataclass
class Tasks:
    """A round of a session. ``_next`` is the first task that has not been put together with those before it."""

    session: Session
    tasks: Sequence[Task]
    _outcomes: dict[int, Outcome] = field(default_factory=dict)
    _found: dict[int, Found] = field(default_factory=dict)
    _proven: dict[int, tuple[Bound, ...]] = field(default_factory=dict)
    _working: dict[int, None] = field(default_factory=dict)
    _next: int = 0

    def run(self, crew: Crew) -> None:
        """Do the tasks; afterwards the session knows what they found, and which were cut off."""
        crew.work(self)
        for number in range(self._next, len(self.tasks)):
            if self._needed(number):
                named = not isinstance(self.tasks[number], Prove)  # a bound that is missing leaves no plan unfound
                cut_off = Outcome(self._found.get(number), self._proven.get(number, ()), unfinished=named)
                self._take(number, self._outcomes.get(number, cut_off))

    @property
    def refused(self) -> list[UnsupportedRequest]:
        """What tasks could not take."""
        return [outcome.refused for outcome in self._outcomes.values() if outcome.refused is not None]

    @property
    def remedy(self) -> str | None:
        """What was found to help."""
        return next((each.remedy for each in self._outcomes.values() if each.remedy is not None), None)

    @property
    def urgent(self) -> list[int]:
        """By number, but what gives a bound first."""
        return sorted(range(len(self.tasks)), key=lambda number: not _early(self.tasks[number]))

    def wanted(self, number: int) -> bool:
        """Whether a task may still matter, by what the tasks before the first open one have found."""
        return number not in self._outcomes and self._needed(number)

    def best_ns(self) -> int | None:
        """The least time known, unless the answer might depend on when it was known."""
        return self.session.announced_ns if self._shared else None

    def started(self, number: int) -> None:
        """A task has begun."""
        self._working[number] = None
        self._progress()

    def hear(self, number: int, message: Found | Bound | Outcome) -> None:
        """Announce a plan or a bound; take up what has ended."""
        if isinstance(message, Found):
            self._found[number] = message
            if self._shared or number == self._next:
                self.session.announce(message)
        elif isinstance(message, Bound):
            self._proven[number] = (*self._proven.get(number, ()), message)
        else:
            if message.lost is not None:
                message = replace(message, found=self._found.get(number), proven=self._proven.get(number, ()))
            self._outcomes[number] = message
            self._working.pop(number, None)
            self._advance()
        self._progress()

    @property
    def _shared(self) -> bool:
        session = self.session
        return session.gap == 0 and session.max_plans is None and not session.first_feasible

    def _needed(self, number: int) -> bool:
        return not self.session.enough(self.tasks[number].makes)

    def _advance(self) -> None:
        """Take up the outcomes of all tasks before the first open one; what is not wanted any more is left out."""
        while self._next < len(self.tasks):
            if self._needed(self._next):
                outcome = self._outcomes.get(self._next)
                if outcome is None:
                    return
                self._take(self._next, outcome)
            self._next += 1

    def _take(self, number: int, outcome: Outcome) -> None:
        self.session.take(self.tasks[number].name, outcome)

    def _progress(self) -> None:
        if self.session.on_progress is not None:
            names = tuple(self.tasks[number].name for number in self._working)
            self.session.on_progress(self.session.progress(chain.from_iterable(self._proven.values()), names))


def _early(task: Task) -> bool:
    """Whether processes begin it first: its bound tells everybody how far there is to go."""
    return isinstance(task, Prove) or (isinstance(task, Ask) and task.early)
