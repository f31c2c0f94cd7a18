"""Tests of messages from a solver's process, which come in chunks; large plans need several."""

from __future__ import annotations

import socket
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.service.jobs import worker
from penstock.service.jobs.claimed_solve import Solve
from penstock.service.jobs.leases import Claim
from penstock.service.jobs.worker import REPORT_S, Worker
from penstock.service.settings import Settings
from penstock.workers.protocol import Message, read, received, solve_task
from penstock.workers.solve_child import serve

pytestmark = pytest.mark.tier("quick")


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_messages_in_chunks_of_any_size(size: int) -> None:
    """Whole messages only, in order, whatever bytes their documents have."""
    sent = [Message("bound", {"bound_ns": n}, bytes(range(256)) * n) for n in range(5)]
    text = b"".join(each.written() for each in sent)
    buffer = bytearray()
    heard = [message for at in range(0, len(text), size) for message in received(buffer, text[at : at + size])]
    assert heard == sent
    assert not buffer
    with BytesIO(text) as source:
        assert [read(source) for _ in range(6)] == [*sent, None]


def test_only_the_last_of_incumbents_that_came_together() -> None:
    """An incumbent that a later one has overtaken is not delivered."""
    kinds = ["incumbent", "incumbent", "bound", "incumbent", "incumbent"]
    text = b"".join(Message(kind, {"number": n}, b"{}\n").written() for n, kind in enumerate(kinds))
    assert [message.facts["number"] for message in received(bytearray(), text)] == [1, 2, 4]


def test_a_request_that_another_version_stored_is_refused_in_words() -> None:
    """A job may be older than the service that solves it."""
    task = solve_task("penstock.planning.solve:solve_here", b'{"field":"of another version"}', 1)
    with BytesIO(task.written()) as source, BytesIO() as sink:
        serve(source, sink)
        sink.seek(0)
        answer = read(sink)
    assert answer is not None
    assert answer.kind == "error"
    assert "another version of Penstock stored this plan request" in answer.facts["problem"]["detail"]


class Reports:
    """Leases that only remember what is reported."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def report(self, claim: Claim, value_ns: float, plan: bytes, facts: dict[str, str]) -> None:
        assert (plan, facts) == (f"plan of {value_ns}".encode(), {"planner": "dp"})
        self.all.append(value_ns)

    def progress(self, claim: Claim, bound_ns: int, working: list[str]) -> None:
        self.all.append((bound_ns, working))


@pytest.mark.tier("nightly")
def test_reports_of_a_fast_solver_are_limited_and_the_last_one_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plans and bounds that come within a moment the newest are written: when it is over, or at the end."""
    now, reports = [100.0], Reports()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        works = Worker(None, reports, None, None, Settings(slots=0))  # type: ignore[arg-type]
        claim = Claim("job", "tenant", 1, "hash", 1000, "auto")
        solve = Solve(claim, ours, 1000.0, 0.0, 0.0)

        def find(value_ns: int) -> None:
            facts = {"value_ns": value_ns, "planner": "dp"}
            works._take(solve, Message("incumbent", facts, f"plan of {value_ns}".encode()))
            works._take(solve, Message("progress", {"bound_ns": 1, "working": [str(value_ns)]}))

        for value_ns in (90, 80, 70, 75):
            find(value_ns)
        assert reports.all == [90]
        now[0] += REPORT_S
        works._report(solve)
        assert reports.all == [90, 70, (1, ["75"])]
        find(60)
        works._report(solve, at_once=True)
        assert reports.all == [90, 70, (1, ["75"]), 60, (1, ["60"])]
        assert not solve.has_news
