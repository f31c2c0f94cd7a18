"""Sweeps through a service: their jobs, their tables, what is shared with others, and how they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_process import Server

from penstock.client import Client
from penstock.examples.tiny import tiny_request
from penstock.questions.sweep import sweep_rows as swept
from penstock.schemas.api.jobs import JobPage
from penstock.schemas.api.sweep import SweepOut, SweepRequest
from penstock.schemas.errors import Conflict, InvalidDocument, NotFound, QuotaExceeded
from penstock.schemas.request import PlanRequest
from penstock.service.db.database import Database
from penstock.service.db.document_store import Stores
from penstock.service.jobs.leases import Leases
from penstock.service.jobs.queue import JobQueue
from penstock.service.jobs.submit import Planning
from penstock.service.jobs.sweeps import Sweeps
from penstock.service.security.principals import EVERYBODY, Principal
from penstock.service.security.sizes import Sizes
from penstock.service.settings import Settings

HANG = 1
PATIENCE_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("sweeps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIDS_FILE", str(path / "pids"))
        server = Server(path / "service.sqlite", solve_entry="solver_entries:entry", kill_grace_s=0.2, slots=2)
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.text, server.text


@pytest.fixture
def client(server: Server) -> Client:
    return server.client


def request(seed: int = 0, **over: Any) -> SweepRequest:
    return SweepRequest.parse({"request": tiny_request() | {"planner": "dp", "seed": seed}, "over": over})


def ended(client: Client, sweep_id: str) -> SweepOut:
    until = time.monotonic() + PATIENCE_S
    while (sweep := client.sweeps.get(sweep_id)).state == "running":
        assert time.monotonic() < until
        time.sleep(0.1)
    return sweep


@pytest.mark.tier("nightly")
def test_a_sweep_gives_the_table_that_the_library_gives(server: Server, client: Client):
    sweep_request = request(planners=["dp", "gpipe", "nobody"], global_batch_sizes=[8, 16])
    sweep = client.sweeps.create(sweep_request)
    assert (sweep.state, sweep.cases, sweep.ended) == ("succeeded", 6, 6)
    expected = swept(sweep_request)
    assert [row.model_copy(update={"job_id": None, "seconds": None}) for row in sweep.rows] == [
        row.model_copy(update={"seconds": None}) for row in expected
    ]
    jobs = JobPage.model_validate_json(httpx.get(server.url + sweep.links["jobs"]).content).items
    assert {job.id for job in jobs} == {row.job_id for row in sweep.rows if row.state == "succeeded"}
    assert all(job.priority < 0 for job in jobs)
    again = client.sweeps.create(sweep_request)
    assert [row.job_id for row in again.rows] == [row.job_id for row in sweep.rows], "their answers are known"
    assert again.state == "succeeded"
    client.sweeps.delete(sweep.id)
    with pytest.raises(NotFound, match=sweep.id):
        client.sweeps.get(sweep.id)
    assert client.sweeps.get(again.id) == again, "a table that was written down needs no job any more"


@pytest.mark.tier("nightly")
def test_cancelling_a_sweep_leaves_what_others_have_asked(client: Client):
    theirs = client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "dp", "seed": HANG}), wait=False)
    running = client.sweeps.create(request(HANG, global_batch_sizes=[8, 16]), wait=False)
    assert running.rows[1].job_id == theirs.id, "equal requests share a job"
    with pytest.raises(Conflict, match="is running"):
        client.sweeps.delete(running.id)
    client.sweeps.cancel(running.id)
    client.jobs.get(str(running.rows[0].job_id), wait_s=20)
    now = client.sweeps.get(running.id)
    assert (now.state, now.ended) == ("running", 1)
    client.jobs.cancel(theirs.id)
    over = ended(client, running.id)
    assert [row.state for row in over.rows] == ["cancelled", "cancelled"]
    assert over.state == "cancelled"
    with pytest.raises(Conflict, match="has already ended"):
        client.sweeps.cancel(running.id)
    assert running.id in [one.id for one in client.sweeps.page().items]


@pytest.mark.tier("nightly")
def test_finishing_a_sweep_keeps_the_best_plans(client: Client):
    running = client.sweeps.create(request(HANG, global_batch_sizes=[4, 8]), wait=False)
    for row in running.rows:
        next(event for event in client.jobs.events(str(row.job_id)) if event.kind == "progress")
    client.sweeps.finish(running.id)
    over = ended(client, running.id)
    assert [(row.state, row.status) for row in over.rows] == [("succeeded", "feasible")] * 2
    assert any(row.pareto for row in over.rows)


@pytest.fixture
def sweeps(tmp_path: Path) -> Iterator[Callable[[], tuple[Sweeps, JobQueue, Leases]]]:
    database = Database(f"sqlite:///{tmp_path / 'sweeps.sqlite'}")
    database.create()
    stores, queue = Stores(database), JobQueue(database)
    planning = Planning(stores, queue, Sizes(Settings()), max_solve_s=60)
    leases = Leases(database, lease_s=30, max_attempts=3)
    yield lambda: (Sweeps(database, stores, planning, queue, max_cases=4), queue, leases)
    database.close()


@pytest.mark.tier("quick")
def test_what_is_refused(sweeps: Callable[[], tuple[Sweeps, JobQueue, Leases]]):
    asking, queue, _ = sweeps()
    with pytest.raises(InvalidDocument, match=r"has 5 cases \(5 global_batch_size\); the limit is 4"):
        asking.submit(EVERYBODY, request(global_batch_sizes=[1, 2, 4, 8, 16]))
    small = Principal("default", "key", frozenset({"solve"}), max_queued=1)
    with pytest.raises(QuotaExceeded, match="has 2 cases; at most 1 jobs of this key may wait"):
        asking.submit(small, request(global_batch_sizes=[8, 16]))
    with pytest.raises(NotFound, match="no topology is stored"):
        asking.submit(EVERYBODY, request(topologies=["sha256:" + "0" * 64]))
    assert queue.recent("default", None, 9) == [], "a refused sweep has queued nothing"


@pytest.mark.tier("quick")
def test_another_tenants_sweep_is_not_there_and_deleted_jobs_are_said(
    sweeps: Callable[[], tuple[Sweeps, JobQueue, Leases]],
):
    asking, queue, leases = sweeps()
    sweep_id = asking.submit(EVERYBODY, request(global_batch_sizes=[8, 16])).id
    for ask in (asking.sweep, asking.delete, lambda *of: asking.stop(*of, "cancel")):
        with pytest.raises(NotFound, match=sweep_id):
            ask("theirs", sweep_id)
    first, second = (leases.claim("me") for _ in range(2))
    assert first is not None
    assert second is not None
    leases.finish(first, "failed", error=None)
    queue.delete("default", first.job_id)
    assert asking.sweep("default", sweep_id).state == "running"
    leases.finish(second, "cancelled")
    asking.settle_open()
    assert [one.state for one in asking.recent("default", None, 9)] == ["cancelled"]
    assert [row.state for row in asking.sweep("default", sweep_id).rows] == ["deleted", "cancelled"]
