"""Solves in processes that hang, die, crash and lie; a service that is killed in the middle of one."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from service_process import Server

from penstock.client import Client
from penstock.examples.tiny import tiny_request
from penstock.schemas.api.jobs import JobOut
from penstock.schemas.errors import Conflict, InvalidPlan, PenstockError, UnsupportedRequest
from penstock.schemas.request import PlanRequest
from penstock.workers.forkserver import Forkserver

HANG, HANG_WITHOUT_PLAN, HANG_FIRST_TIME, DIE, CRASH, REFUSE, LIE = range(1, 8)


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service for the solvers that do not take it along."""
    path = tmp_path_factory.mktemp("misbehaving")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIDS_FILE", str(path / "pids"))
        server = Server(
            path / "service.sqlite", solve_entry="solver_entries:entry", kill_grace_s=0.2, solve_grace_s=0.1, slots=2
        )
    yield server
    assert server.stop() == 0


@pytest.fixture
def pids_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIDS_FILE", str(tmp_path / "pids"))
    return tmp_path / "pids"


@pytest.fixture
def start(start_server: Callable[..., Any], pids_file: Path) -> Callable[..., Any]:
    """Start a service whose solver is chosen by the request's seed."""

    def begin(**settings: Any) -> Any:
        return start_server(solve_entry="solver_entries:entry", kill_grace_s=0.2, **settings)

    return begin


def request(seed: int, **changes: Any) -> PlanRequest:
    return PlanRequest.parse(tiny_request() | {"planner": "gpipe", "seed": seed} | changes)


def with_incumbent(client: Client, seed: int, **changes: Any) -> JobOut:
    """Submit a request, and return its job once it has reported a plan."""
    job = client.plans.create(request(seed, **changes), wait=False)
    next(event for event in client.jobs.events(job.id) if event.kind == "progress")
    return job


def processes(pids_file: Path) -> list[psutil.Process]:
    """Return the solver's process and the one that it started."""
    return [psutil.Process(int(pid)) for pid in pids_file.read_text().split()]


@pytest.mark.tier("nightly")
def test_cancel_kills_a_solver_that_is_deaf_to_sigterm(misbehaving: Server):
    client = misbehaving.client
    job = with_incumbent(client, HANG)
    alive = processes(misbehaving.pids_file)
    client.jobs.cancel(job.id)
    assert client.jobs.get(job.id, wait_s=20).state == "cancelled"
    assert psutil.wait_procs(alive, 10)[1] == []
    with pytest.raises(Conflict, match=r"has already ended \(cancelled\); cannot finish it"):
        client.jobs.finish(job.id)


@pytest.mark.tier("nightly")
def test_finish_keeps_the_best_plan_so_far(misbehaving: Server):
    client = misbehaving.client
    job = with_incumbent(client, HANG)
    with pytest.raises(Conflict, match="is running and has no final plan"):
        client.plans.file(job.id)
    best = client.jobs.incumbent(job.id)
    client.jobs.finish(job.id)
    ended = client.jobs.get(job.id, wait_s=20)
    assert ended.state == "succeeded"
    assert ended.result is not None
    assert (ended.result.status, ended.result.plan) == ("feasible", best)
    assert "it was asked to finish; this is the best plan until then" in ended.result.sentence
    assert client.verify({"plan": client.jobs.hash_of(job.id)}).valid


LATE_ONCE_A_PLAN_IS_REPORTED = """
import time
from types import SimpleNamespace
from penstock.service.jobs import worker

clock, report = SimpleNamespace(late_s=0.0), worker.Leases.report
def report_late(*arguments):
    report(*arguments)
    clock.late_s = 7200.0
worker.Leases.report = report_late
worker.time = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.late_s)
"""
"""The worker's clock passes every limit, when the first plan is written, and goes on from there."""


def test_a_solver_past_its_limit_is_ended_and_its_best_plan_kept(start: Callable[..., Any], pids_file: Path):
    client = start(before=LATE_ONCE_A_PLAN_IS_REPORTED).client
    ended = request(HANG, termination={"time_limit_ns": 3600 * 10**9})
    job = client.plans.create(ended)
    assert job.result is not None
    assert job.result.status == "feasible"
    assert "its limit of 3600 s was over" in job.result.sentence
    assert job.result.plan is not None
    assert psutil.wait_procs(processes_that_live(pids_file), 10)[1] == []
    again = client.plans.create(ended, wait=False)
    assert again.id != job.id, "what was cut off is no answer to keep"
    client.jobs.cancel(again.id)


def processes_that_live(pids_file: Path) -> list[psutil.Process]:
    pids = [int(pid) for pid in pids_file.read_text().split()]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def test_a_limit_without_a_plan(misbehaving: Server):
    client = misbehaving.client
    job = client.plans.create(request(HANG_WITHOUT_PLAN, termination={"time_limit_ns": 1_000_000_000}))
    assert job.result is not None
    assert (job.result.status, job.result.plan) == ("time_limit", None)
    with pytest.raises(Conflict, match=r"ended without a plan \(time_limit\)"):
        client.plans.file(job.id)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("seed", "kind", "expected"),
    [
        (DIE, PenstockError, "was killed by SIGSEGV"),
        (CRASH, PenstockError, "the service's log has the reason"),
        (REFUSE, UnsupportedRequest, "not this one"),
        (LIE, InvalidPlan, "made a plan that does not verify: The plan says 1000000000000 ns per global batch"),
    ],
)
def test_a_solver_that_fails(misbehaving: Server, seed: int, kind: type[PenstockError], expected: str):
    client = misbehaving.client
    with pytest.raises(kind, match=expected):
        client.plans.create(request(seed))
    job = client.jobs.page(limit=1).items[0]
    assert job.state == "failed"
    if seed == DIE:
        assert client.jobs.incumbent(job.id).prediction is not None


@pytest.mark.tier("nightly")
def test_a_crash_is_in_the_log_alone(start: Callable[..., Any]):
    server = start()
    with pytest.raises(PenstockError) as caught:
        server.client.plans.create(request(CRASH))
    assert server.stop() == 0
    assert "ZeroDivisionError: secret detail" in server.text
    assert "secret detail" not in str(caught.value)


def test_a_killed_service_takes_its_solver_along_and_finds_its_job_again(
    start: Callable[..., Any], pids_file: Path, tmp_path: Path
):
    server = start()
    job = with_incumbent(server.client, HANG_FIRST_TIME)
    [solver, _] = processes(pids_file)
    forkserver = solver.parent()
    assert forkserver is not None
    server.stop(signal.SIGKILL)
    assert psutil.wait_procs([solver, forkserver], 10)[1] == []
    with closing(sqlite3.connect(tmp_path / "service.sqlite", isolation_level=None)) as database:
        database.execute("UPDATE jobs SET lease_until_ms = 0")
    client = start().client
    assert client.jobs.incumbent(job.id).prediction is not None
    ended = client.jobs.get(job.id, wait_s=60)
    assert (ended.state, ended.attempt) == ("succeeded", 2)


@pytest.mark.tier("nightly")
def test_a_service_that_is_told_to_end_hands_its_job_back(start: Callable[..., Any], pids_file: Path):
    server = start()
    job = with_incumbent(server.client, HANG_FIRST_TIME)
    alive = processes(pids_file)
    with httpx.stream("GET", f"{server.url}/v1/jobs/{job.id}/events", timeout=60) as story:
        lines = story.iter_lines()
        assert next(lines) == "event: state"
        assert server.stop(signal.SIGTERM) == 0
        assert "event: progress" in list(lines)
    assert psutil.wait_procs(alive, 10)[1] == []
    client = start().client
    ended = client.jobs.get(job.id, wait_s=60)
    assert (ended.state, ended.attempt) == ("succeeded", 2)
    states = [event.data["state"] for event in client.jobs.events(job.id) if event.kind == "state"]
    assert states == ["queued", "running", "queued", "running", "succeeded"]


@pytest.mark.tier("nightly")
def test_a_killed_forkserver_is_started_again(start: Callable[..., Any], pids_file: Path):
    client = start().client
    job = with_incumbent(client, HANG_FIRST_TIME)
    forkserver = processes(pids_file)[0].parent()
    assert forkserver is not None
    forkserver.kill()
    ended = client.jobs.get(job.id, wait_s=60)
    assert (ended.state, ended.attempt) == ("succeeded", 2)


def test_a_child_that_is_given_no_task_ends_in_silence(capfd: pytest.CaptureFixture[str]):
    forkserver = Forkserver(preload=())
    child = forkserver.spawn()
    child.pipe.close()
    assert child.wait(60) == 0
    child.close()
    forkserver.stop()
    assert capfd.readouterr().err == ""


def test_equal_requests_at_once_are_one_job(misbehaving: Server):
    client = misbehaving.client
    job = with_incumbent(client, HANG)
    assert client.plans.create(request(HANG), wait=False).id == job.id
    other = client.plans.create(request(HANG_WITHOUT_PLAN), wait=False)
    assert other.id != job.id
    for one in (job, other):
        client.jobs.cancel(one.id)
        assert client.jobs.get(one.id, wait_s=20).state == "cancelled"
    assert [event.data.get("state") for event in client.jobs.events(job.id)] == ["queued", "running", None, "cancelled"]
