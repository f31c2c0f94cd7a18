"""What the solve tells a search near its best plan; plans that the search yields are judged while it goes on."""

from __future__ import annotations

from typing import Protocol

from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Candidate


class TimeLimit(Protocol):
    """When the solve has to end."""

    @property
    def passed(self) -> bool:
        """Whether that time has come."""


class Incumbent(Protocol):
    """The best plan of a solve at any time, and whether it is good enough (``done``)."""

    @property
    def problem(self) -> Problem:
        """The request."""

    @property
    def best(self) -> Candidate | None:
        """The best plan so far."""

    @property
    def done(self) -> bool:
        """Whether no better plan is wanted."""

    @property
    def deadline(self) -> TimeLimit:
        """When the solve has to end."""
