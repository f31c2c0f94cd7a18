"""The state of one solve as its worker knows it."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.schemas.api.jobs import ProblemDetails
from penstock.service.jobs.leases import Claim
from penstock.workers.protocol import Outcome


class Incumbent(NamedTuple):
    """A plan of a solve, as canonical JSON, with what an event says of it."""

    value_ns: float
    body: bytes
    facts: dict[str, str]


NO_PLAN = Incumbent(math.inf, b"", {})
"""The incumbent before the first plan."""


@dataclass
class Solve:
    """The state of a running child. ``renewed``: when its lease was last renewed, by this process's clock."""

    claim: Claim
    wake: socket.socket
    deadline: float
    started: float
    renewed: float
    best: Incumbent = NO_PLAN
    is_reported: bool = True
    """Whether the best plan has been written down."""
    progress: tuple[int, list[str]] | None = None
    """The newest bound, and the planners at work, while they are not written down."""
    next_report: float = 0.0
    plan: bytes | None = None
    """The plan of the result, as it is stored."""
    result: tuple[Outcome, bytes] | None = None
    """The result as JSON, with its figures."""
    problem: ProblemDetails | None = None
    stop: str | None = None
    buffer: bytearray = field(default_factory=bytearray)

    @property
    def has_news(self) -> bool:
        """Whether a plan or a bound has not been written to the database yet."""
        return not self.is_reported or self.progress is not None
