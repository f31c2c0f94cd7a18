"""Profile, plan, run: a real service, two real agents, ranks of both; and what remains of a run when one dies.

The training project owns packages called ``schemas``, ``service`` and ``tests``, as training projects do.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from orphans import no_orphans

from penstock.cli.main import main
from penstock.schemas.api.jobs import JobOut, RunOut
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.schemas.trace import Trace

pytestmark = pytest.mark.tier("nightly")

LIMIT_S = 120.0
LAYERS, BATCH, MICRO_BATCHES, STEPS = 8, 16, 8, 4
SETTINGS = {"PENSTOCK_AGENT_HOLD_S": "2", "PENSTOCK_AGENT_TIMEOUT_S": "3600", "PENSTOCK_WARM_UP": "false"}
"""No agent that is only slow counts as dead. Only the kernels that are needed are loaded."""
COMMAND = [sys.executable, "-P", "-m", "penstock.cli.main"]
SERVICE = """
import sys
from pathlib import Path
from penstock.cli.main import main
from penstock.service.runs.listening import ListeningClock

counted, later = ListeningClock.now, []

def now(clock):
    if not later and Path("two hours later").exists():
        later.append(True)
        clock._last = clock._last[0], clock._last[1] + 7200
    return counted(clock)

ListeningClock.now = now
sys.exit(main())
"""
"""A command whose service takes agents to have been silent for two hours, once a file is there."""

PROJECT = {
    "schemas/__init__.py": "WIDTH = 12\n",
    "service/__init__.py": "",
    "service/rate.py": "RATE = 0.05\n",
    "tests/__init__.py": "raise RuntimeError('nobody imports the tests')\n",
    "training.py": """
import time
from pathlib import Path

import torch
from schemas import WIDTH
from service.rate import RATE
from torch import nn

from penstock.executor.run.job import LayerSpec, SimpleJob

GATE = Path(__file__).with_name("closed")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))

class Regression(SimpleJob):
    def layers(self):
        return [LayerSpec(f"block{i}", Block) for i in range(LAYERS)]
    def batch(self, step, rows):
        while step >= 2 and GATE.exists():
            time.sleep(0.01)
        samples = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(row)) for row in rows]
        x = torch.stack(samples)
        return {"x": x}, x.roll(1, dims=1)
    def loss(self, outputs, targets):
        return ((outputs["x"] - targets) ** 2).mean(dim=1).sum(), len(targets)
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=RATE, momentum=0.9)

job = Regression("regression", batch_size=BATCH, seed=3)
""".replace("LAYERS", str(LAYERS)).replace("BATCH", str(BATCH)),
    "divided.py": """
import time
from functools import partial

from penstock.examples import llama
from penstock.examples.synthetic import TokenJob
from training import GATE

CONFIG = llama.Config(blocks=2, width=32, heads=4, key_value_heads=4, inner=64, length=16, vocabulary=64)

class Gated(TokenJob):
    def batch(self, step, rows):
        while step >= 3 and GATE.exists():
            time.sleep(0.01)
        return super().batch(step, rows)

job = Gated("llama", partial(llama.layers, CONFIG), batch_size=8, length=16, vocabulary=64)
""",
}


class Cluster:
    """A service on SQLite and two agents with two CPU devices each, in processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.project = directory / "project"
        for name, text in PROJECT.items():
            path = self.project / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.gate = self.project / "closed"
        self.processes: dict[str, subprocess.Popen] = {}
        self.url = self.start_service(0)
        for name in ("host0", "host1"):
            self.start_agent(name)
        patience_s = 2 * LIMIT_S  # an answer may be asked to wait for LIMIT_S
        self.client = httpx.Client(base_url=self.url, timeout=patience_s, trust_env=False)

    def start_service(self, port: int) -> str:
        database = str(self.directory / "penstock.sqlite")
        return self._start(
            "service", r"listening on (http://[^\s\"]+)", "serve", "--port", str(port), "--database", database
        )

    def start_agent(self, name: str) -> None:
        options = ["--server", self.url, "--name", name, "--cpu-devices", "2", "--job", "toy=training:job"]
        options += ["--job", "llama=divided:job"]
        self._start(name, rf"({self.url}) answers", "agent", *options, "--directory", str(self.project))

    def _start(self, name: str, pattern: str, *arguments: str) -> str:
        """Start it and read its log until the words are there; the rest goes to a file."""
        reading, writing = os.pipe()
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
        if name == "service":
            environment |= SETTINGS
        command = [sys.executable, "-P", "-c", SERVICE] if name == "service" else COMMAND
        self.processes[name] = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=writing,
            process_group=0,
            env=environment,
            cwd=self.directory,
        )
        os.close(writing)
        log = ""
        with os.fdopen(reading, encoding="utf-8") as lines:
            for line in lines:
                log += line
                if match := re.search(pattern, line):
                    self._drain(name, os.dup(lines.fileno()))
                    return match[1]
        raise AssertionError(f"{name} ended:\n{log}")

    def _drain(self, name: str, descriptor: int) -> None:
        keeper = f"log of {name}"
        if keeper in self.processes:
            self.processes[keeper].wait(LIMIT_S)
        with (self.directory / f"{name}.log").open("ab") as sink:
            self.processes[keeper] = subprocess.Popen(["cat"], stdin=descriptor, stdout=sink, process_group=0)
        os.close(descriptor)

    def ranks(self, name: str) -> list[psutil.Process]:
        """Return the rank processes of an agent, in the order in which it started them."""
        children = psutil.Process(self.processes[name].pid).children()
        ranks = [child for child in children if "penstock.executor.run.rank_main" in child.cmdline()]
        return sorted(ranks, key=lambda child: (child.create_time(), child.pid))

    def wait_until_gone(self, agent: str) -> None:
        """Wait until the service gives the name of an agent that died to another."""
        until = time.monotonic() + LIMIT_S
        while any(one["id"] == agent and one["alive"] for one in self.client.get("/v1/agents").json()):
            assert time.monotonic() < until, f"{agent} is still alive after {LIMIT_S} s"
            time.sleep(0.2)

    def start_run(self, plan: str, **fields) -> str:
        body = {"schema_version": 1, "plan": plan, "model": "toy", "steps": STEPS} | fields
        answer = self.client.post("/v1/runs", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def run_when(self, run: str, good) -> RunOut:
        """Return the run, once it is as it should be, or has ended."""
        headers: dict[str, str] = {}
        while True:
            answer = self.client.get(f"/v1/runs/{run}", headers=headers)
            if answer.status_code == 304:  # nothing has changed for as long as it was held
                continue
            current = RunOut.model_validate_json(answer.content)
            if good(current) or current.state not in ("preparing", "running"):
                return current
            headers = {"Prefer": f"wait={LIMIT_S:.0f}", "If-None-Match": answer.headers["etag"]}

    def close(self) -> None:
        self.client.close()
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
        for name in ("host0", "host1", "service"):
            self.processes[name].send_signal(signal.SIGINT)
        for process in self.processes.values():
            process.wait(LIMIT_S)


def ended(run: RunOut) -> bool:
    return run.state not in ("preparing", "running")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with no_orphans(LIMIT_S):
        cluster = Cluster(tmp_path_factory.mktemp("end-to-end"))
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def request_for_a_plan(cluster):
    """The measured profile of the job, and a topology of the agents' devices."""
    path = cluster.directory / "profile.json"
    options = ["--job", "training:job", "--directory", str(cluster.project), "--device-kind", "cpu"]
    size = ["--micro-batch-size", str(BATCH // MICRO_BATCHES), "--measure-for", "0.2"]
    subprocess.run(
        [*COMMAND, "profile", *options, *size, "--device", "cpu", "-o", str(path)], check=True, cwd=cluster.directory
    )
    profile = ModelProfile.read(path)
    return PlanRequest(
        profile=profile,
        topology=topology(devices_per_node=2),
        global_batch_size=BATCH,
        micro_batch_sizes=(BATCH // MICRO_BATCHES,),
        planner="gpipe",
        schedule="early-backward",
        options={"stages": 4},
    )


def topology(devices_per_node: int) -> ClusterTopology:
    """Return a cluster with so many of the devices of each agent."""
    link = {"bandwidth_bytes_per_s": 10**9, "latency_ns": 50_000}
    uniform = UniformCluster(
        nodes=2,
        devices_per_node=devices_per_node,
        kind="cpu",
        memory_bytes=2**30,
        fabric=Fabric(**link),
        nic=Fabric(**link),
        node_names="host{}",
    )
    return ClusterTopology(name="two hosts", uniform=uniform)


@pytest.fixture(scope="module")
def request_for_two_ranks(request_for_a_plan):
    """The same for one device of each agent: half as many processes to start."""
    return request_for_a_plan.model_copy(update={"topology": topology(devices_per_node=1), "options": {"stages": 2}})


def ask(cluster: Cluster, request: PlanRequest) -> JobOut:
    """Return the service's answer to a request."""
    headers = {"content-type": "application/json", "Prefer": f"wait={LIMIT_S:.0f}"}
    answer = cluster.client.post("/v1/plans", content=request.canonical_json(), headers=headers)
    assert answer.status_code == 200, answer.text
    return JobOut.model_validate_json(answer.content)


@pytest.fixture(scope="module")
def plan(cluster, request_for_a_plan):
    """The hash of a plan of four stages, made by the service."""
    return planned(cluster, request_for_a_plan, 4)


@pytest.fixture(scope="module")
def plan_for_two_ranks(cluster, request_for_two_ranks):
    """The hash of a plan with a stage on each agent."""
    return planned(cluster, request_for_two_ranks, 2)


def planned(cluster: Cluster, request: PlanRequest, stages: int) -> str:
    """Return the hash of the service's plan, which has a device for each of so many stages."""
    result = ask(cluster, request).result
    assert result.plan is not None, result.sentence
    assert [len(stage.devices) for stage in result.plan.pipelines[0].stages] == [1] * stages
    return result.plan_hash


@pytest.fixture(scope="module")
def good_run(cluster, plan):
    """A run that nothing disturbs."""
    cluster.gate.unlink(missing_ok=True)
    return cluster.run_when(cluster.start_run(plan, check=True, trace_steps=1), ended)


@pytest.mark.tier("ci")
def test_a_plan_trains_over_two_agents_what_one_process_trains(good_run):
    assert good_run.state == "succeeded", good_run.error
    assert good_run.agents == ("host0", "host1")
    assert (good_run.steps_done, len(good_run.losses), len(good_run.step_times_ns)) == (STEPS, STEPS, STEPS)
    assert good_run.losses[-1] < good_run.losses[0]
    assert good_run.gradient_check is not None
    assert good_run.gradient_check <= 1e-6
    assert good_run.collectives is not None
    assert good_run.collectives_differ is None
    assert good_run.measured_time_per_global_batch_ns > 0


@pytest.mark.tier("ci")
def test_the_command_line_lists_shows_and_follows_runs(cluster, good_run, capsys):
    there = ["--server", cluster.url]
    assert main(["runs", "list", *there, "--json"]) == 0
    assert good_run.id in {run["id"] for run in json.loads(capsys.readouterr().out)["items"]}
    assert main(["runs", "list", *there]) == 0
    assert f"{STEPS} of {STEPS}" in capsys.readouterr().out
    assert main(["runs", "watch", good_run.id, *there]) == 0
    assert f"run {good_run.id}: succeeded, {STEPS} of {STEPS} steps" in capsys.readouterr().out
    assert main(["runs", "show", good_run.id, *there, "--json"]) == 0
    assert RunOut.model_validate_json(capsys.readouterr().out) == good_run
    assert main(["runs", "show", "nothing", *there]) == 1


@pytest.mark.tier("ci")
def test_the_last_step_is_traced_on_every_rank(cluster, good_run):
    trace = Trace.model_validate_json(cluster.client.get(f"/v1/runs/{good_run.id}/trace").content)
    assert [(one.rank, one.step, one.device) for one in trace.ranks] == [
        (rank, STEPS - 1, f"host{rank // 2}/{rank % 2}") for rank in range(4)
    ]
    for one in trace.ranks:
        instructions = {event.instruction for event in one.events}
        assert {f"{one.rank}{kind}{i}" for kind in "FB" for i in range(MICRO_BATCHES)} <= instructions


def test_a_plan_without_a_flush_trains_in_segments_between_checkpoints(cluster, request_for_two_ranks):
    """2BW through the service: programs for each stretch between halts, and what one process trains by that rule."""
    cluster.gate.unlink(missing_ok=True)
    fields = {"planner": "pipedream-2bw", "schedule": "auto", "update_rules": ("double_buffered",), "options": {}}
    periodic = request_for_two_ranks.model_copy(update=fields)
    result = ask(cluster, periodic).result
    assert result.plan is not None, result.sentence
    saved = cluster.directory / "saved"
    options = {"checkpoint_directory": str(saved), "checkpoint_every": 3, "keep_checkpoints": 5}
    run = cluster.run_when(cluster.start_run(result.plan_hash, steps=5, check=True, options=options), ended)
    assert run.state == "succeeded", run.error
    assert (run.steps_done, run.checkpoint_step) == (5, 5)
    assert run.gradient_check <= 1e-6
    assert sorted(one.name for one in saved.glob("step-*")) == ["step-3", "step-5"]


def test_run_by_the_command_line_through_the_service(cluster, plan_for_two_ranks, capsys):
    cluster.gate.unlink(missing_ok=True)
    trace = cluster.directory / "trace.json"
    command = ["run", plan_for_two_ranks, "--job", "toy", "--steps", "2", "--server", cluster.url]
    assert main([*command, "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    for words in ("on host0, host1: succeeded", "measured", "predicted"):
        assert words in out
    assert len(Trace.read(trace).ranks) == 2
    assert main([*command, "--device", "cuda"]) == 64


def test_training_goes_on_while_the_service_is_dead(cluster, plan_for_two_ranks, good_run):
    cluster.gate.touch()
    run = cluster.start_run(plan_for_two_ranks)
    assert cluster.run_when(run, lambda run: run.steps_done >= 1).state == "running"
    cluster.processes["service"].kill()
    cluster.processes["service"].wait()
    cluster.gate.unlink()
    assert psutil.wait_procs(cluster.ranks("host0") + cluster.ranks("host1"), LIMIT_S)[1] == []
    cluster.start_service(httpx.URL(cluster.url).port)
    done = cluster.run_when(run, ended)
    assert done.state == "succeeded", done.error
    assert done.losses == good_run.losses
    assert done.step_times_ns != good_run.step_times_ns


@pytest.mark.tier("nightly")
def test_a_killed_rank_fails_the_run_and_is_named(cluster, plan_for_two_ranks):
    cluster.gate.touch()
    run = cluster.start_run(plan_for_two_ranks)
    assert cluster.run_when(run, lambda run: run.steps_done >= 2).state == "running"
    everyone = cluster.ranks("host0") + cluster.ranks("host1")
    assert len(everyone) == 2
    everyone[1].kill()
    failed = cluster.run_when(run, ended)
    assert failed.state == "failed"
    assert failed.error.code == "run-failed"
    sentence = r"rank 1 on agent 'host1' failed at step 2, instruction \d+ \(1\w+\): .* signal 9"
    assert re.match(sentence, failed.error.detail), failed.error.detail
    assert psutil.wait_procs(everyone, LIMIT_S)[1] == []


def test_a_killed_agent_takes_its_ranks_along(cluster, plan_for_two_ranks):
    cluster.gate.touch()
    run = cluster.start_run(plan_for_two_ranks)
    assert cluster.run_when(run, lambda run: run.steps_done >= 2).state == "running"
    there, here = cluster.ranks("host0"), cluster.ranks("host1")
    cluster.processes["host1"].kill()
    cluster.processes["host1"].wait()
    assert psutil.wait_procs(here, LIMIT_S)[1] == []
    cluster.gate.unlink()
    assert psutil.wait_procs(there, LIMIT_S)[1] == []
    failed = cluster.run_when(run, ended)
    assert failed.state == "failed"
    assert re.search(r"agent 'host[01]'", failed.error.detail)


def test_an_agent_may_come_back_and_a_cancelled_run_leaves_no_rank(cluster, plan_for_two_ranks, capsys):
    cluster.wait_until_gone("host1")
    cluster.start_agent("host1")
    cluster.gate.touch()
    run = cluster.start_run(plan_for_two_ranks)
    assert cluster.run_when(run, lambda run: run.steps_done >= 1).state == "running"
    everyone = cluster.ranks("host0") + cluster.ranks("host1")
    assert len(everyone) == 2
    assert main(["runs", "cancel", run, "--server", cluster.url]) == 0
    assert f"run {run}: cancelled" in capsys.readouterr().out
    assert psutil.wait_procs(everyone, LIMIT_S)[1] == []


def with_other_layers(profile):
    return {"layers": tuple(one.model_copy(update={"name": f"other{i}"}) for i, one in enumerate(profile.layers))}


def with_wider_cuts(profile):
    wider = [one.model_copy(update={"bytes_per_sample": 2 * one.bytes_per_sample}) for one in profile.boundaries[0]]
    return {"boundaries": (tuple(wider), *profile.boundaries[1:])}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_other_layers, ("layer 0", "'block0'", "'other0'")),
        (with_wider_cuts, ("after layer 'block0'", "bytes per sample", "in the plan")),
    ],
)
def test_a_model_that_is_not_the_plans_is_refused(cluster, request_for_two_ranks, change, words):
    profile = request_for_two_ranks.profile
    other = request_for_two_ranks.model_copy(update={"profile": profile.model_copy(update=change(profile))})
    job = ask(cluster, other)
    file = PlanFile(plan=job.result.plan, request=other)
    run = cluster.run_when(cluster.start_run(file.model_dump(mode="json", exclude_none=True)), ended)
    assert run.state == "failed"
    for word in words:
        assert word in run.error.detail


@pytest.fixture(scope="module")
def request_at_tensor_2(cluster):
    """A request for the two devices of host1, whose profile has costs at tensor 2; host0 has one."""
    path = cluster.directory / "divided.json"
    options = ["--job", "divided:job", "--directory", str(cluster.project), "--analytic", "H100", "--tensor", "2"]
    subprocess.run(
        [*COMMAND, "profile", *options, "--micro-batch-size", "1", "--micro-batch-size", "4", "-o", str(path)],
        check=True,
        cwd=cluster.directory,
    )
    path.write_text(path.read_text().replace('"H100"', '"cpu"'))
    whole = topology(devices_per_node=2).expanded()
    small, large = whole.nodes
    few = whole.model_copy(update={"nodes": (small.model_copy(update={"devices": small.devices[:1]}), large)})
    gone = small.devices[1].id
    links = tuple(link for link in few.links if gone not in (link.a, link.b))
    return PlanRequest.model_validate(
        {
            "profile": ModelProfile.read(path),
            "topology": few.model_copy(update={"links": links}),
            "global_batch_size": 8,
            "micro_batch_sizes": (4,),
            "planner": "gpipe",
            "degrees": {"tensor": 2},
            "sharding": "none",
        }
    )


@pytest.mark.timeout(4 * LIMIT_S)
def test_a_host_that_dies_costs_degrees_and_a_generation_and_nothing_that_was_saved(cluster, request_at_tensor_2):
    """Two ranks share all layers; when their host is gone, one rank of the other goes on from what they have saved."""
    result = ask(cluster, request_at_tensor_2).result
    assert result.plan is not None, result.sentence
    assert result.plan.degrees.tensor == 2
    cluster.gate.touch()
    options = {"checkpoint_directory": str(cluster.directory / "divided"), "checkpoint_every": 2}
    run = cluster.start_run(result.plan_hash, model="llama", steps=6, options=options, recover={})
    assert cluster.run_when(run, lambda run: run.steps_done >= 3).state == "running"
    ranks = cluster.ranks("host1")
    assert (len(ranks), len(cluster.ranks("host0"))) == (2, 0)
    cluster.processes["host1"].kill()
    cluster.processes["host1"].wait()
    assert psutil.wait_procs(ranks, LIMIT_S)[1] == []
    cluster.gate.unlink()
    (cluster.directory / "two hours later").touch()
    while (done := cluster.run_when(run, ended)).state == "recovering":
        time.sleep(0.2)
    assert done.state == "succeeded", done.error
    assert (done.restarts, done.agents, len(done.losses)) == (1, ("host0",), 6)
    events = cluster.client.get(f"/v1/runs/{run}/events", params={"poll": "true"}).json()["items"]
    assert [one["data"]["step"] for one in events if one["kind"] == "resumed"] == [2]
    again = cluster.run_when(cluster.start_run(done.generations[-1].plan_hash, model="llama", steps=6), ended)
    assert again.state == "succeeded", again.error
    assert done.losses == pytest.approx(again.losses, rel=1e-5)
