"""Runs that go on after deaths: generations, plans for what is left, and what is too late to count."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from played_agent import Agent, prepare
from service_process import Server

from penstock.client import Client
from penstock.examples.tiny import tiny_plan_file
from penstock.schemas.api.agents import Assignment
from penstock.schemas.api.jobs import RunOut
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import Conflict, InvalidDocument, NotFound
from penstock.schemas.plan import PlanFile

OPTIONS = RunOptions(checkpoint_directory="/shared/checkpoints", checkpoint_every=2)
LIMIT_S = 120.0
SILENCE = """
import os
from penstock.service.runs import agents

loss = agents.Agents._loss
def loss_after_hours(self, tenant, agent_id, incarnation):
    if os.path.exists(f"{os.environ['SILENT']}/{incarnation}"):
        self._contacts[tenant, agent_id].last -= 7200.0
    return loss(self, tenant, agent_id, incarnation)
agents.Agents._loss = loss_after_hours
"""
"""Hours pass for agents that have a file: no other one is silent for so long, however busy the machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service that takes an agent for dead after an hour."""
    path = tmp_path_factory.mktemp("recovery") / "service.sqlite"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SILENT", str(path.parent))
        server = Server(path, before=SILENCE, agent_timeout_s=3600, recovery_wait_s=4, slots=1)
        server.load_judge()
        yield server
    assert server.stop() == 0
    assert "Traceback" not in server.text, server.text


class Node(Agent):
    """An agent that keeps itself alive from a thread, as a real one does by calling again and again."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url, name)
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def sync(self, **more: Any) -> Any:
        with self._lock:
            return super().sync(**more)

    def tell(self, *event: Any, **data: Any) -> None:
        with self._lock:
            super().tell(*event, **data)

    def wait_for(self, run: str, phase: str, generation: int) -> Assignment:
        """Return its assignment for a run, once it has this phase and generation."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            current = self.assignment(run)
            if current is not None and (current.phase, current.generation) == (phase, generation):
                return current
            time.sleep(0.05)
        raise AssertionError(f"{self.name} was never told to {phase} generation {generation}; last {current}")

    def vanish(self) -> None:
        """End without a word, hours ago."""
        self._ended.set()
        self._thread.join()
        self.http.close()
        (Path(os.environ["SILENT"]) / self.incarnation).touch()

    def _live(self) -> None:
        while not self._ended.wait(0.3):
            self.sync()


@pytest.fixture
def nodes(server: Server) -> Iterator[list[Node]]:
    """node0 and node1, as the tiny plan names them."""
    players = [Node(server.url, "node0"), Node(server.url, "node1")]
    yield players  # a test may put another one in the place of one
    for node in players:
        if not node._ended.is_set():
            node.vanish()
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as node.http:
            node.sync(leaving=True)


def begin(server: Server, nodes: list[Node], *, max_restarts: int = 3) -> str:
    """Start a run of the tiny plan that trains on both nodes."""
    for node in nodes:
        node.sync()
    file = PlanFile.parse(tiny_plan_file())
    run = server.client.runs.create(
        file, "gpt", steps=6, options=OPTIONS, max_restarts=max_restarts, check=True, wait=False
    ).id
    prepare(list(nodes), run)
    for node in nodes:
        assert node.wait_for(run, "start", 1).options == OPTIONS
    return run


def stop(nodes: list[Node], run: str, generation: int = 1) -> None:
    """Report that nothing is left, once the service has asked for it."""
    for node in nodes:
        assert node.wait_for(run, "stop", generation).save is False
        node.tell("stopped", run, generation)
        node.sync()


def ended(client: Client, run: str) -> RunOut:
    """Return the run, once it has ended."""
    return list(client.runs.watch(run))[-1]


@pytest.mark.tier("nightly")
def test_a_rank_that_dies_costs_a_generation(server: Server, nodes: list[Node]):
    run = begin(server, nodes)
    nodes[0].tell("progress", run, rank=0, step=0, losses=[4.0, 3.0, 2.5])
    nodes[0].tell("checkpoint", run, step=2, directory="/shared/checkpoints/step-2")
    nodes[1].tell("rank_failed", run, rank=1, reason="killed", signal=9)
    for node in nodes:
        node.sync()
    assert server.client.runs.get(run).state == "recovering"
    stop(nodes, run)
    for node in nodes:
        again = node.wait_for(run, "prepare", 2)
        assert (again.options.resume, again.check, again.store_address) == ("auto", False, None)
    nodes[0].tell("progress", run, 1, rank=0, step=3, losses=[99.0])
    nodes[1].tell("rank_failed", run, 1, rank=1, reason="from the generation before")
    prepare(list(nodes), run, 2)
    nodes[0].tell("resumed", run, 2, step=2, directory="/shared/checkpoints/step-2")
    nodes[0].tell("rank_done", run, 2, rank=0, first_step=2, losses=[2.5, 2.0, 1.5, 1.0], step_times_ns=[5] * 4)
    nodes[1].tell("rank_done", run, 2, rank=1, first_step=2)
    for node in nodes:
        node.sync()
    done = server.client.runs.get(run)
    assert (done.state, done.error, done.restarts, done.checkpoint_step) == ("succeeded", None, 1, 2)
    assert done.losses == (4.0, 3.0, 2.5, 2.0, 1.5, 1.0)
    first, second = done.generations
    assert (first.generation, first.why) == (1, "rank 1 on agent 'node1' failed: killed")
    assert (second.generation, second.why, second.agents) == (2, None, ("node0", "node1"))
    story = server.client.runs.event_page(run)
    assert story.done
    assert [event.data["state"] for event in story.items if event.kind == "state"] == [
        *("preparing", "running", "recovering"),
        *("preparing", "running", "succeeded"),
    ]
    assert [event.data["step"] for event in story.items if event.kind == "resumed"] == [2]
    with server.client._http.stream("GET", f"/v1/runs/{run}/events") as response:
        assert response.read().decode().count("event: state") == 6


@pytest.mark.tier("nightly")
def test_what_would_fail_again_is_not_tried_again(server: Server, nodes: list[Node]):
    run = begin(server, nodes, max_restarts=5)
    nodes[0].tell("rank_failed", run, rank=0, reason="the loss of step 2 is nan", is_final=True)
    nodes[0].sync()
    failed = ended(server.client, run)
    assert (failed.state, failed.restarts) == ("failed", 0)
    assert failed.error is not None
    assert "the loss of step 2 is nan" in str(failed.error.detail)


def test_the_last_restart_is_the_last(server: Server, nodes: list[Node]):
    run = begin(server, nodes, max_restarts=1)
    nodes[0].tell("rank_failed", run, rank=0, reason="killed")
    nodes[0].sync()
    stop(nodes, run)
    for node in nodes:
        node.wait_for(run, "prepare", 2)
    prepare(list(nodes), run, 2)
    nodes[0].tell("rank_failed", run, 2, rank=0, reason="killed again")
    nodes[0].sync()
    failed = server.client.runs.get(run)
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error.detail == "rank 0 on agent 'node0' failed: killed again (this was the last of 1 restarts)"


def test_a_dead_node_is_planned_around(server: Server, nodes: list[Node]):
    run = begin(server, nodes)
    nodes[1].vanish()
    nodes[0].tell("rank_failed", run, rank=0, reason="RuntimeError: Connection closed by peer")
    nodes[0].sync()
    stop(nodes[:1], run)
    alone = nodes[0].wait_for(run, "prepare", 2)
    assert (alone.world_size, [rank.device for rank in alone.ranks]) == (1, ["node0/0"])
    assert alone.hosts_store
    prepare(nodes[:1], run, 2)
    nodes[0].tell("rank_done", run, 2, rank=0, first_step=0, losses=[1.0] * 6)
    nodes[0].sync()
    done = server.client.runs.get(run)
    assert (done.state, done.generation, done.agents) == ("succeeded", 2, ("node0",))
    assert done.plan_hash != done.generations[0].plan_hash
    smaller = server.client.plans.file(done.plan_hash)
    assert smaller.plan.global_batch_size == PlanFile.parse(tiny_plan_file()).plan.global_batch_size


def test_a_leaving_agent_is_planned_around_at_once_and_back_in_the_next_generation(server: Server, nodes: list[Node]):
    run = begin(server, nodes)
    nodes[1].tell("checkpoint", run, step=2, directory="/shared/checkpoints/step-2")
    nodes[1].tell("rank_failed", run, rank=1, reason="agent 'node1' is leaving: it was asked to end")
    nodes[1].tell("stopped", run)
    nodes[1].sync(leaving=True)
    nodes[1].vanish()
    stop(nodes[:1], run)
    assert nodes[0].wait_for(run, "prepare", 2).world_size == 1
    nodes[1] = Node(server.url, "node1")
    nodes[1].sync()
    nodes[0].tell("refused", run, 2, reason="no more memory")
    nodes[0].sync()
    stop(nodes[:1], run, 2)
    for node in nodes:
        assert node.wait_for(run, "prepare", 3).world_size == 2
    assert server.client.runs.cancel(run).state == "cancelled"
    for node in nodes:
        assert node.wait_for(run, "stop", 3).save, "ranks may save when the run is cancelled"
        node.tell("stopped", run, 3)
        node.sync()


def test_nothing_left_is_said(server: Server, nodes: list[Node]):
    run = begin(server, nodes)
    for node in nodes:
        node.vanish()
    failed = ended(server.client, run)
    assert failed.state == "failed"
    assert failed.error is not None
    assert failed.error.detail == (
        "the run cannot go on with what is left: none of the devices of topology 'two-nodes' is free and "
        "offered by a living agent"
    )


@pytest.mark.tier("nightly")
def test_a_service_that_is_killed_goes_on_recovering(start_server: Callable[..., Server], tmp_path: Path):
    server = start_server(agent_timeout_s=30)
    server.load_judge()
    agents = [Agent(server.url, name) for name in ("node0", "node1")]
    for agent in agents:
        agent.sync()
    file = PlanFile.parse(tiny_plan_file())
    run = server.client.runs.create(file, "gpt", steps=6, options=OPTIONS, max_restarts=3, wait=False).id
    prepare(agents, run)
    agents[0].tell("rank_failed", run, rank=0, reason="killed")
    agents[0].sync()
    server.stop(signal.SIGKILL)
    server = start_server(agent_timeout_s=30)
    for agent in agents:
        agent.http.close()
        agent.http = httpx.Client(base_url=server.url, timeout=LIMIT_S)
        order = agent.assignment(run)
        assert order is not None
        assert order.phase == "stop"
        agent.tell("stopped", run)
        agent.sync()
    until = time.monotonic() + LIMIT_S
    while server.client.runs.get(run).generation == 1:
        assert time.monotonic() < until
        for agent in agents:
            agent.sync()
        time.sleep(0.1)
    for agent in agents:
        agent.http.close()


def test_the_end_of_a_log_is_fetched_from_the_agent(server: Server, nodes: list[Node]):
    run = begin(server, nodes)
    nodes[1].vanish()
    with httpx.Client(base_url=server.url) as nodes[1].http:
        nodes[1].sync(leaving=True)
    wishes: list[Any] = []
    logs: list[Any] = []
    asking = threading.Thread(target=lambda: logs.append(server.client.runs.log(run, 0)))
    asking.start()
    while not wishes:
        wishes = list(nodes[0].sync().log_wishes)
    (wish,) = wishes
    assert (wish.run, wish.generation, wish.rank) == (run, 1, 0)
    nodes[0].sync(log_tails=[{"number": wish.number, "path": "/logs/rank-0.log", "text": "epoch 1\n"}])
    asking.join(LIMIT_S)
    assert (logs[0].agent, logs[0].path, logs[0].text) == ("node0", "/logs/rank-0.log", "epoch 1\n")
    with pytest.raises(NotFound, match="has no rank 7; its ranks are 0…1"):
        server.client.runs.log(run, 7)
    with pytest.raises(NotFound, match="has no generation 5"):
        server.client.runs.log(run, 0, generation=5)
    with pytest.raises(Conflict, match="agent 'node1' is not connected, so it cannot send the log of rank 1"):
        server.client.runs.log(run, 1)
    server.client.runs.cancel(run)


def test_recovery_without_checkpoints_is_refused(client: Client):
    with pytest.raises((InvalidDocument, ValueError), match="recover needs options"):
        client.runs.create(PlanFile.parse(tiny_plan_file()), "gpt", max_restarts=1)
