"""A whole service on PostgreSQL: a plan, a run with two agents, and the death of the server in between.

What else is asked over HTTP is tried on SQLite (the other files here); queue, leases, documents, migrations, backups
and workers are tried on both engines by their own tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from played_agent import Agent, prepare
from postgres import Cluster, running_cluster
from service_process import Server

from penstock.examples.tiny import tiny_plan_file, tiny_request
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A server of this file's own: it is killed."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    server = Server(cluster.new_database(), agent_timeout_s=600, slots=1)
    server.load_judge()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.text, server.text


def test_a_plan_and_its_story(server: Server):
    job = server.client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "gpipe"}), wait=True)
    assert job.state == "succeeded"
    states = [event.data["state"] for event in server.client.jobs.events(job.id) if event.kind == "state"]
    assert states == ["queued", "running", "succeeded"]
    assert server.client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "gpipe"}), wait=True) == job
    assert server.client.plans.file(job.id).plan == job.result.plan  # type: ignore[union-attr]


def test_a_run_of_two_agents(server: Server):
    agents = [Agent(server.url, "node0"), Agent(server.url, "node1")]
    for agent in agents:
        agent.sync()
    run = server.client.runs.create(PlanFile.parse(tiny_plan_file()), "gpt", steps=4, wait=False)
    prepare(agents, run.id)
    assert server.client.runs.get(run.id).state == "running"
    for rank, agent in enumerate(agents):
        losses = [2.5, "NaN", "-Infinity", float("1e-3")] if rank else [None] * 4
        steps = {"rank": rank, "first_step": 0, "losses": losses, "step_times_ns": [10, 20 + rank, 30, 40]}
        agent.tell("rank_done", run.id, peak_memory_bytes=5, **steps)
        agent.sync()
    done = server.client.runs.get(run.id)
    assert (done.state, done.losses, done.step_times_ns) == (
        "succeeded",
        (2.5, "NaN", "-Infinity", 0.001),
        (10, 21, 30, 40),
    )
    assert [event.data["state"] for event in server.client.runs.event_page(run.id).items] == [
        "preparing",
        "running",
        "succeeded",
    ]
    for agent in agents:
        agent.sync(leaving=True)
        agent.http.close()


def test_a_database_that_dies_is_a_503_until_it_is_back(server: Server, cluster: Cluster):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/v1/jobs").status_code == 200
        cluster.kill()
        for answer in (
            http.get("/v1/jobs"),
            http.post("/v1/plans", json=tiny_request() | {"seed": 5}),
        ):
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["code"] == "database-away"
        assert http.get("/healthz").status_code == 200
        cluster.start()
        assert http.get("/v1/jobs").status_code == 200
        job = server.client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "gpipe", "seed": 6}), wait=True)
        assert job.state == "succeeded"
