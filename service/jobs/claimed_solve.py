"""The state of one solve as its worker knows it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from penstock.schemas.api.jobs import ProblemDetails, ResultOut
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.service import metrics
from penstock.service.jobs.leases import Claim


@dataclass
class Solve:
    """What is known of a running child. ``renewed``: when its lease was last renewed, by this process's clock."""

    claim: Claim
    request: PlanRequest
    wake: socket.socket
    deadline: float
    started: float
    renewed: float
    best: Plan | None = None
    unreported: Plan | None = None
    """The best plan while it is not written down."""
    progress: tuple[int, list[str]] | None = None
    """The newest bound, and the planners at work, while they are not written down."""
    next_report: float = 0.0
    result: ResultOut | None = None
    problem: ProblemDetails | None = None
    stop: str | None = None
    buffer: bytearray = field(default_factory=bytearray)

    @property
    def has_news(self) -> bool:
        """Whether a plan or a bound has not been written to the database yet."""
        return self.unreported is not None or self.progress is not None


def value_ns(plan: Plan | None) -> float:
    """Return the time of a plan's global batch; infinity for no plan."""
    if plan is None or plan.prediction is None:
        return float("inf")
    return plan.prediction.time_per_global_batch_ns


def report_gap(request: PlanRequest, result: ResultOut) -> None:
    """Count a result's gap in the metrics."""
    gaps = [certificate.gap for certificate in result.certificates]
    if result.plan is not None and gaps:
        metrics.gap.labels(request.planner).observe(min(gaps))
