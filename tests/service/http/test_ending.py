"""Tests of how a service ends: in order at the first signal, at once at the second."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.examples.tiny import tiny_plan_file, tiny_request

pytestmark = pytest.mark.tier("nightly")

HANG = 1
"""The seed of a request whose solver never ends (``solver_entries``)."""


@pytest.fixture
def start(start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("PIDS_FILE", str(tmp_path / "pids"))
    settings = {"solve_entry": "solver_entries:entry", "kill_grace_s": 0.2, "slots": 1}
    return lambda **more: start_server(**settings | more)


def hanging_job(server: Any, pids_file: Path) -> tuple[str, list[psutil.Process]]:
    """Return a job that is being solved, and the processes that solve it."""
    answer = httpx.post(f"{server.url}/v1/plans", json=tiny_request() | {"seed": HANG, "planner": "gpipe"}, timeout=60)
    job_id = answer.json()["id"]
    events = f"{server.url}/v1/jobs/{job_id}/events?poll=1&after="
    while not any(event["kind"] == "progress" for event in httpx.get(f"{events}0", timeout=60).json()["items"]):
        time.sleep(0.05)
    return job_id, [psutil.Process(int(pid)) for pid in pids_file.read_text().split()]


def test_told_once_it_ends_in_order(start: Callable[..., Any], tmp_path: Path):
    server = start(drain_s=3)
    job_id, solver = hanging_job(server, tmp_path / "pids")
    waited: list[httpx.Response] = []
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/readyz").status_code == 200
        wait = {"Prefer": "wait=300"}
        waiter = threading.Thread(
            target=lambda: waited.append(httpx.get(f"{server.url}/v1/jobs/{job_id}", headers=wait, timeout=60))
        )
        waiter.start()
        while http.get("/metrics").text.find("penstock_http_requests_active 2.0") < 0:
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        while (ready := http.get("/readyz")).status_code == 200:
            time.sleep(0.02)
        assert (ready.status_code, ready.json()["errors"][0]["pointer"]) == (503, "/service")
        refused = http.post("/v1/plans", json=tiny_request())
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        assert "shutting down" in refused.json()["detail"]
        waiter.join(20)
        assert [answer.json()["id"] for answer in waited] == [job_id]
        assert http.get("/healthz").status_code == 200
    server.process.wait(20)
    assert server.stop() == 0
    assert psutil.wait_procs(solver, 10)[1] == []
    assert "Traceback" not in server.text
    again = start(slots=0)
    job = again.client.jobs.get(job_id)
    assert (job.state, job.attempt) == ("queued", 1)
    assert job.incumbent_ns is not None


def test_told_twice_it_ends_at_once(start: Callable[..., Any], tmp_path: Path):
    server = start(drain_s=1000)
    _, solver = hanging_job(server, tmp_path / "pids")
    server.process.send_signal(signal.SIGTERM)
    while httpx.get(f"{server.url}/readyz").status_code == 200:
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(20)
    assert server.stop() == 128 + signal.SIGTERM
    assert psutil.wait_procs(solver, 10)[1] == []


STUCK = """
import sys, time
from penstock.service.jobs import judging
judging.verdict = lambda file: (print("judging", file=sys.stderr, flush=True), time.sleep(600))
"""


@pytest.mark.tier("nightly")
def test_a_thread_at_work_does_not_hold_the_end_up(start_server: Callable[..., Any]):
    server = start_server(slots=0, before=STUCK)
    asking = threading.Thread(target=ask_for_a_verdict, args=(server.url,), daemon=True)
    asking.start()
    while "judging" not in server.text:
        time.sleep(0.02)
    assert server.stop() == 0, "it takes 600 s"
    assert "ended before all work in progress was done" in server.text
    assert "Traceback" not in server.text


def ask_for_a_verdict(url: str) -> None:
    """Request an answer that never ends."""
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/plans:verify", json=tiny_plan_file(), timeout=300)


def test_two_services_on_one_file_say_so(start_server: Callable[..., Any]):
    first = start_server(slots=0)
    second = start_server(slots=0)
    warning = f"another service, process {first.process.pid} at {first.url}, uses the database sqlite:///"
    until = time.monotonic() + 30
    while warning not in second.text:
        assert time.monotonic() < until, second.text
        time.sleep(0.02)
    assert "another service" not in first.text
    assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    assert second.stop() == 0
    third = start_server(slots=0)
    httpx.get(f"{third.url}/healthz")
    assert third.stop() == 0
    assert "another service" not in third.text
