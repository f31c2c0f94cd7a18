"""The sync protocol and runs over HTTP, with agents that this test plays itself."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import httpx
import pytest
from played_agent import Agent, prepare
from service_process import Server

from penstock.client import Client
from penstock.examples.tiny import tiny_plan_file
from penstock.schemas.api.agents import SyncReply, digest_of
from penstock.schemas.api.jobs import RunOut
from penstock.schemas.errors import Conflict, NotFound, RunFailed
from penstock.schemas.plan import PlanFile
from penstock.schemas.program import Program
from penstock.schemas.trace import Hardware

HARDWARE = {
    "kind": "cpu",
    "model": "Xeon",
    "planned_kind": "V100",
    "ranks": 1,
    "cores": 2,
    "machine_cores": 2,
    "load_at_start": 0.5,
    "load_at_end": 0.5,
    "cpu_ns": 1,
    "wall_ns": 2,
}
TRACE = {"device": "d", "step": 2, "events": [{"instruction": "0F0", "start_ns": 0, "end_ns": 5}]}


@pytest.fixture(scope="module")
def shared_server(own_server: Server) -> Server:
    """Agents are played on it."""
    return own_server


@pytest.fixture
def url(client: Client) -> str:
    return str(client._http.base_url)


@pytest.fixture
def make_agent() -> Iterator[Callable[..., Agent]]:
    """Agents whose connections are closed in the end."""
    players: list[Agent] = []

    def make(url: str, name: str) -> Agent:
        players.append(Agent(url, name))
        return players[-1]

    yield make
    for agent in players:
        agent.http.close()


@pytest.fixture
def agents(url: str, make_agent: Callable[..., Agent]) -> Iterator[list[Agent]]:
    """node0 and node1, as the tiny plan names them; they leave in the end."""
    players = [make_agent(url, "node0"), make_agent(url, "node1")]
    for agent in players:
        agent.sync()
    yield players
    for agent in players:
        for one in agent.sync().assignments:
            agent.tell("stopped", one.run)
        agent.sync()
        agent.sync(leaving=True)


@pytest.fixture
def tiny() -> PlanFile:
    return PlanFile.parse(tiny_plan_file())


@pytest.fixture
def start(client: Client, agents: list[Agent], tiny: PlanFile) -> Any:
    """A function that starts runs of the tiny plan; runs that still live at the end are cancelled."""
    started: list[str] = []

    def begin(**more: Any) -> RunOut:
        run = client.runs.create(tiny, "gpt", wait=False, **more)
        started.append(run.id)
        return run

    yield begin
    for run_id in started:
        if client.runs.get(run_id).state in ("preparing", "running"):
            client.runs.cancel(run_id)


def test_a_run_from_prepare_to_done(client: Client, url: str, agents: list[Agent], start: Callable[..., RunOut]):
    run = start(steps=3, check=True, trace_steps=1)
    assert (run.state, run.agents, run.generation) == ("preparing", ("node0", "node1"), 1)
    wanted = [agent.assignment(run.id) for agent in agents]
    for rank, one in enumerate(wanted):
        assert one is not None
        assert (one.phase, one.world_size, one.steps, one.check, one.model) == ("prepare", 2, 3, True, "gpt")
        assert one.hosts_store == (rank == 0)
        assert one.layers == ("block0", "block1", "block2", "block3")
        assert [(programs_of_rank.rank, programs_of_rank.device) for programs_of_rank in one.ranks] == [
            (rank, f"node{rank}/0")
        ]
        assert one.digest == digest_of(
            program for programs_of_rank in one.ranks for program in programs_of_rank.programs
        )
        assert Program.from_json(one.ranks[0].programs[0]).rank == rank
    agents[0].tell("prepared", run.id)
    agents[1].tell("prepared", run.id)
    for agent in agents:
        agent.sync()
    assert client.runs.get(run.id).state == "preparing", "the store is not there yet"
    agents[0].tell("store_ready", run.id, address="127.0.0.1:4321")
    agents[0].sync()
    assert client.runs.get(run.id).state == "running"
    for agent in agents:
        one = agent.assignment(run.id)
        assert one is not None
        assert (one.phase, one.store_address) == ("start", "127.0.0.1:4321")
    agents[1].tell("progress", run.id, rank=1, step=0, losses=[2.5], times_ns=[900])
    agents[1].sync()
    assert client.runs.get(run.id).steps_done == 1
    for rank, agent in enumerate(agents):
        agent.tell("trace", run.id, rank_trace={"rank": rank, **TRACE})
        losses = [None] * 3 if rank == 0 else [2.5, 2.25, 2.0]
        times = [1000, 500 + rank, 600]
        more = {"gradient_check": rank / 1e9, "hardware": HARDWARE | {"load_at_end": 2.0 + rank}}
        more |= {"collectives": {"all_reduce": 4}, "collectives_differ": "rank 1, step 0" if rank else None}
        agent.tell("rank_done", run.id, rank=rank, losses=losses, step_times_ns=times, **more)
        agent.sync()
        assert agent.assignment(run.id) is None or rank == 0
    done = client.runs.get(run.id)
    assert (done.state, done.steps_done, done.losses) == ("succeeded", 3, (2.5, 2.25, 2.0))
    assert done.step_times_ns == (1000, 501, 600)
    assert done.measured_time_per_global_batch_ns == 550
    assert done.gradient_check == 1e-9
    assert (done.collectives, done.collectives_differ) == ({"all_reduce": 8}, "rank 1, step 0")
    assert done.hardware == (Hardware.model_validate(HARDWARE | {"load_at_end": 3.0, "cpu_ns": 2, "wall_ns": 4}),)
    page = httpx.get(f"{url}/runs/{run.id}").text
    assert "ranks computed on cpu (Xeon), and the plan is for V100: the two times cannot be compared" in page
    assert "prediction against it" not in page
    assert "first collective not as predicted" in page
    assert done.error is None
    trace = client.runs.trace(run.id)
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    assert trace.plan_file is not None
    assert trace.plan_file.plan.content_hash() == trace.plan_hash
    assert trace.measured_times_per_global_batch_ns == (501, 600)
    assert trace.predicted_time_per_global_batch_ns == done.predicted_time_per_global_batch_ns > 0
    with pytest.raises(Conflict, match=r"has already ended \(succeeded\)"):
        client.runs.cancel(run.id)


def test_a_held_sync_is_answered_by_a_change(client: Client, agents: list[Agent], start: Callable[..., RunOut]):
    agents[1].sync()
    replies: list[SyncReply] = []
    holding = threading.Thread(target=lambda: replies.append(agents[1].sync(hold=True)))
    holding.start()
    run = start()
    holding.join(15)
    assert [one.run for one in replies[0].assignments] == [run.id]


def test_a_newer_sync_releases_the_held_one(agents: list[Agent], url: str, make_agent: Callable[..., Agent]):
    first = agents[0]
    second, third = make_agent(url, "node0"), make_agent(url, "node0")
    first.sync()
    for same in (second, third):
        same.incarnation, same.version = first.incarnation, first.version
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(one.sync, hold=True) for one in (first, second)]
        released = wait(calls, 10, FIRST_COMPLETED)
        assert len(released.done) == 1
        third.sync(leaving=True)
        assert len(wait(calls, 10).done) == 2


def test_losses_that_are_not_finite_come_back_as_such(
    client: Client, agents: list[Agent], start: Callable[..., RunOut]
):
    run = start(steps=5)
    prepare(agents, run.id)
    agents[0].tell("progress", run.id, rank=0, step=0, losses=[1.0, "NaN", "Infinity", "-Infinity", None])
    agents[0].tell("evaluation", run.id, step=2, loss="NaN")
    agents[0].sync()
    run_out = client.runs.get(run.id)
    assert run_out.losses == (1.0, "NaN", "Infinity", "-Infinity")
    assert [one.loss for one in run_out.evaluations] == ["NaN"]
    page = client._http.get(f"/runs/{run.id}").text
    assert '<td class="number">NaN</td>' in page
    assert '<td class="number">-Infinity</td>' in page


def test_events_are_stored_once_and_acknowledged(client: Client, agents: list[Agent], start: Callable[..., RunOut]):
    run = start()
    prepare(agents, run.id)
    agents[0].tell("progress", run.id, rank=0, step=0, losses=[1.0], times_ns=[10])
    twice = list(agents[0].events)
    assert agents[0].sync().ack == agents[0].sequence
    agents[0].events = twice
    assert agents[0].sync().ack == agents[0].sequence
    assert client.runs.get(run.id).losses == (1.0,)


def test_events_of_another_generation_or_run_are_ignored(
    client: Client, agents: list[Agent], start: Callable[..., RunOut]
):
    run = start()
    agents[0].tell("rank_failed", run.id, generation=7, rank=0, reason="from the past")
    agents[0].tell("rank_failed", "no-such-run", rank=0, reason="from elsewhere")
    assert agents[0].sync().ack == agents[0].sequence
    assert client.runs.get(run.id).state == "preparing"


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("refused", {"reason": "no layer 'block3'"}, r"agent 'node1' refused the run: no layer 'block3'"),
        (
            "rank_failed",
            {"rank": 1, "reason": "killed", "instruction": "1B3", "signal": 9, "last_lines": ["a", "b"]},
            r"rank 1 on agent 'node1' failed at 1B3: killed; its last lines: a \| b",
        ),
        ("stopped", {}, r"agent 'node1' stopped its ranks although it was not asked to"),
    ],
)
def test_a_failure_stops_everybody(
    client: Client, agents: list[Agent], start: Callable[..., RunOut], kind: str, data: dict[str, Any], expected: str
):
    run = start()
    prepare(agents, run.id)
    agents[1].tell(kind, run.id, **data)
    agents[1].sync()
    failed = client.runs.get(run.id)
    assert failed.state == "failed"
    assert failed.error is not None
    assert re.fullmatch(expected, failed.error.detail)
    for agent in agents:
        one = agent.assignment(run.id)
        assert one is not None
        assert (one.phase, one.ranks) == ("stop", ())
        agent.tell("stopped", run.id)
        agent.sync()
        assert agent.assignment(run.id) is None


def test_cancelling_stops_everybody(client: Client, agents: list[Agent], start: Callable[..., RunOut]):
    run = start()
    assert client.runs.cancel(run.id).state == "cancelled"
    assert client.runs.cancel(run.id).state == "cancelled"
    one = agents[0].assignment(run.id)
    assert one is not None
    assert one.phase == "stop"


def test_another_incarnation_of_a_living_name_is_refused(
    agents: list[Agent], url: str, make_agent: Callable[..., Agent]
):
    other = make_agent(url, "node0")
    answer = other.post()
    assert answer.status_code == 409
    assert answer.json()["code"] == "conflict"
    assert agents[0].incarnation in answer.json()["detail"]


def test_a_name_is_free_when_its_agent_has_left_and_its_runs_fail(
    client: Client, agents: list[Agent], url: str, start: Callable[..., RunOut], make_agent: Callable[..., Agent]
):
    run = start()
    agents[0].sync(leaving=True)
    agents[0] = make_agent(url, "node0")
    agents[0].sync()
    failed = client.runs.get(run.id)
    assert failed.state == "failed"
    assert failed.error is not None
    assert re.search(r"agent 'node0' (was restarted|left) while it held ranks of this run", failed.error.detail)
    assert agents[0].assignment(run.id) is None
    stopping = agents[1].assignment(run.id)
    assert stopping is not None
    assert stopping.phase == "stop"


def test_a_name_is_free_when_the_held_call_breaks_off(
    client: Client, agents: list[Agent], url: str, make_agent: Callable[..., Agent]
):
    agents[0].sync()
    with pytest.raises(httpx.ReadTimeout):
        agents[0].http.post(
            "/v1/agents/node0:sync",
            json={
                "incarnation": agents[0].incarnation,
                "state_version": agents[0].version,
                "devices": agents[0].devices,
                "models": ["gpt"],
                "address": "127.0.0.1",
            },
            timeout=0.5,
        )
    agents[0].http.close()
    agents[0] = make_agent(url, "node0")
    while agents[0].post().status_code == 409:
        pass
    assert [agent.incarnation for agent in client.agents() if agent.id == "node0"] == [agents[0].incarnation]


@pytest.mark.tier("nightly")
def test_a_silent_agent_fails_its_runs(
    start_server: Callable[..., Any], tiny: PlanFile, make_agent: Callable[..., Agent]
):
    server = start_server(agent_timeout_s=0.5, slots=0)
    server.load_judge()
    agents = [make_agent(server.url, name) for name in ("node0", "node1")]
    for agent in agents:
        agent.sync()
    with pytest.raises(RunFailed, match=r"agent 'node[01]' was silent for more than 0.5 s while it held ranks"):
        server.client.runs.create(tiny, "gpt")


@pytest.mark.tier("nightly")
def test_a_run_survives_a_restart_of_the_service(
    start_server: Callable[..., Any], tiny: PlanFile, make_agent: Callable[..., Agent]
):
    server = start_server(slots=0)
    server.load_judge()
    agents = [make_agent(server.url, name) for name in ("node0", "node1")]
    for agent in agents:
        agent.sync()
    run = server.client.runs.create(tiny, "gpt", wait=False)
    prepare(agents, run.id)
    assert server.stop() == 0
    server = start_server(slots=0)
    for rank, agent in enumerate(agents):
        agent.http.close()
        agent.http = httpx.Client(base_url=server.url)
        agent.tell("rank_done", run.id, rank=rank, losses=[1.0], step_times_ns=[5])
        agent.sync()
    assert server.client.runs.get(run.id).state == "succeeded"


def test_missing_devices_and_models_are_named(client: Client, url: str, agents: list[Agent], tiny: PlanFile):
    with pytest.raises(Conflict, match=r"agent 'node0' has no model 'llama'.*it has 'gpt'"):
        client.runs.create(tiny, "llama")
    agents[1].sync(leaving=True)
    with pytest.raises(Conflict, match=r"no living agent offers 'node1/0'"):
        client.runs.create(tiny, "gpt")
    agents[1].sync()


def test_a_device_belongs_to_one_run(client: Client, start: Callable[..., RunOut], tiny: PlanFile):
    run = start()
    with pytest.raises(Conflict, match=f"device 'node0/0' is in use by run '{run.id}'"):
        client.runs.create(tiny, "gpt")


def test_a_stored_plan_can_be_run_by_its_hash(
    client: Client, agents: list[Agent], start: Callable[..., RunOut], tiny: PlanFile
):
    run = start()
    client.runs.cancel(run.id)
    again = client.runs.create(run.plan_hash, "gpt", wait=False)
    assert again.plan_hash == run.plan_hash
    client.runs.cancel(again.id)
    with pytest.raises(NotFound, match="no plan is stored under"):
        client.runs.create("sha256:" + "0" * 64, "gpt")


def test_a_run_nobody_knows(client: Client):
    for call in (client.runs.get, client.runs.cancel, client.runs.trace):
        with pytest.raises(NotFound, match="no run 'nobody'"):
            call("nobody")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("kind", "data", "pointer"),
    [
        ("progress", {"rank": "first", "step": 0}, "/data/rank"),
        ("progress", {"step": 0}, "/data/rank"),
        ("progress", {"rank": 2**60, "step": 0}, "/data/rank"),
        ("store_ready", {}, "/data/address"),
        ("trace", {"rank_trace": 3}, "/data/rank_trace"),
        ("rank_done", {"rank": 0, "step_times_ns": [-1]}, "/data/step_times_ns/0"),
    ],
)
def test_an_event_that_makes_no_sense_is_refused(
    agents: list[Agent], start: Callable[..., RunOut], kind: str, data: dict[str, Any], pointer: str
):
    run = start()
    agents[0].tell(kind, run.id, **data)
    answer = agents[0].post()
    agents[0].events.clear()
    assert answer.status_code == 422
    assert [error["pointer"] for error in answer.json()["errors"]] == [pointer]
