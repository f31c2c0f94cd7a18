"""Jobs that several processes solve: events tell plans, bounds and gaps; no process outlives its parent."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from penstock.client import Client
from penstock.examples.catalogue import cluster, profile
from penstock.schemas.request import PlanRequest

pytestmark = pytest.mark.tier("nightly")


def large_request(**changes: Any) -> PlanRequest:
    """Return a request beyond what a process solves alone."""
    settings = {"profile": profile("bert-48"), "topology": cluster("dapple-config-a"), "global_batch_size": 64}
    return PlanRequest.parse({**settings, **changes})


def grandchildren(server: Any) -> list[psutil.Process]:
    """Return processes below the forkserver: solves, and their workers."""
    (forkserver,) = psutil.Process(server.process.pid).children()
    return forkserver.children(recursive=True)


def until(count: int, server: Any) -> list[psutil.Process]:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if len(processes := grandchildren(server)) >= count:
            return processes
        time.sleep(0.02)
    raise AssertionError(f"there are no {count} processes")


def test_events_tell_plans_bounds_and_gaps(start_server: Callable[..., Any]) -> None:
    server = start_server(slots=1, solve_workers=2)
    client: Client = server.client
    job = client.plans.create(large_request(termination={"time_limit_ns": 4_000_000_000}), wait=False)
    progress = [event.data for event in client.jobs.events(job.id) if event.kind == "progress"]
    assert {"planner", "working"} <= {key for data in progress for key in data}
    for data in progress:
        if data["incumbent_ns"] and data["bound_ns"]:
            assert data["gap"] == data["incumbent_ns"] / data["bound_ns"] - 1
    assert any(data["gap"] is not None for data in progress)
    ended = client.jobs.get(job.id, wait_s=30)
    assert ended.state == "succeeded"
    assert ended.result is not None
    assert ended.result.plan is not None
    assert psutil.wait_procs(grandchildren(server), 5)[1] == []


def test_a_solve_that_is_killed_leaves_no_workers(start_server: Callable[..., Any]) -> None:
    server = start_server(slots=1, solve_workers=2, max_attempts=1)
    client: Client = server.client
    job = client.plans.create(large_request(termination={"time_limit_ns": 60_000_000_000}), wait=False)
    family = until(3, server)
    solve = next(process for process in family if process.ppid() == psutil.Process(family[0].pid).ppid())
    solve.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(family, 10)[1] == []
    assert client.jobs.get(job.id, wait_s=30).state == "failed"


def test_a_job_that_is_cancelled_leaves_no_workers(start_server: Callable[..., Any]) -> None:
    server = start_server(slots=1, solve_workers=2, kill_grace_s=0.2)
    client: Client = server.client
    job = client.plans.create(large_request(termination={"time_limit_ns": 60_000_000_000}), wait=False)
    family = until(3, server)
    client.jobs.cancel(job.id)
    assert client.jobs.get(job.id, wait_s=30).state == "cancelled"
    assert psutil.wait_procs(family, 10)[1] == []
