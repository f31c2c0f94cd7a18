"""A directory with the files that pages name, made by the commands themselves, and what their hosts stand for."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import httpx
import pytest
from distributed import LocalCluster
from pages import ROOT, pieces

from penstock.cli.main import main
from penstock.client import Client
from penstock.examples import catalogue
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile

CLUSTER = """\
schema_version: 1
name: here
uniform:
  nodes: 1
  devices_per_node: 2
  kind: cpu
  memory_bytes: 1 GiB
  fabric: {form: bus, bandwidth_bytes_per_s: 2 GB/s, latency_ns: 20 us}
  nic: {bandwidth_bytes_per_s: 10 Gbit/s, latency_ns: 50 us}
"""
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_LAYER = "forward_compute_time=1.5, backward_compute_time=3.0, activation_size=256.0, parameter_size=288.0"
GRAPH = f"node2 -- Linear(8, 8) -- {_LAYER}\nnode3 -- Linear(8, 8) -- {_LAYER}\n\tnode2 -- node3\n"
TIMES = {"forward_ns": 2_000_000, "backward_ns": 4_000_000}
"""Times of a layer on a CPU device: so slow that two devices are worth their messages."""

MAKE = (
    "profile --job mytrain:job --analytic H100 --micro-batch-size 1 --micro-batch-size 8 -o profile.json",
    "plan -p profile.json -t cluster.yaml -b 256 --micro-batch-size 64 --planner gpipe --set stages=2 -o plan.json",
    "plan -p profile.json -t cluster.yaml -b 256 --micro-batch-size 64 --planner model-parallel -o other-plan.json",
    "plan --example bert-48 --cluster dapple-config-a -b 64 --micro-batch-size 4 --planner dp -o large.json",
    "plan --example gpt2-small --cluster 1x2xV100 -b 8 --micro-batch-size 4 --target megatron --max-plans 5"
    " -o best.json",
    "run plan.json --job mytrain:job --steps 2 --trace trace.json",
    "export schedule plan.json -o rows.csv",
    "export plan.json --to bundle -o job.json",
    "import topology topology.conf nodes.txt -o cluster.json",
    "db upgrade --database penstock.sqlite",
)
PENSTOCK = (sys.executable, "-m", "penstock.cli.main")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that pages take for granted."""
    place = tmp_path_factory.mktemp("base")
    (job,) = (piece.text for piece in pieces(ROOT / "docs/running.md") if "job = Tiny(" in piece.text)
    for name, text in (("mytrain.py", job), ("cluster.yaml", CLUSTER), ("c.yaml", CLUSTER), ("graph.txt", GRAPH)):
        (place / name).write_text(text)
    (place / "config.json").write_text(json.dumps(CONFIG))
    samples = ROOT / "examples/clusters"
    shutil.copytree(samples, place, dirs_exist_ok=True)
    shutil.copytree(samples, place / "examples/clusters")
    shutil.copy(samples / "slurm/nodes.txt", place / "nodes.txt")
    for name in ("topology.conf", "topology.txt"):
        shutil.copy(samples / "slurm/topology.conf", place / name)
    with chdir(place):
        for command in MAKE:
            assert main(shlex.split(command)) == 0, command
            if command.startswith("profile"):
                _add_a_cpu(place / "profile.json")
    shutil.copy(place / "rows.csv", place / "mine.csv")
    shutil.copy(place / "profile.json", place / "p.json")
    request = {
        "schema_version": 1,
        "profile": json.loads((place / "profile.json").read_text()),
        "topology": json.loads((place / "plan.json").read_text())["request"]["topology"],
        "global_batch_size": 256,
    }
    (place / "request.json").write_text(json.dumps(request))
    return place


def _add_a_cpu(path: Path) -> None:
    """Let the profile know CPU devices beside the one that it was computed for."""
    document = json.loads(path.read_text())
    for measured in list(document["measurements"]):
        layers = [layer | TIMES for layer in measured["layers"]]
        document["measurements"].append(measured | {"device_kind": "cpu", "layers": layers})
    ModelProfile.parse(document).write(path)


class Staying:
    """A command that stays, as a process; ``found`` is what its standard error says when it is ready."""

    def __init__(self, command: str, ready: str, directory: Path) -> None:
        self._process = subprocess.Popen(
            [*PENSTOCK, *shlex.split(command)],
            cwd=directory,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PENSTOCK_WARM_UP": "false", "PENSTOCK_SECURITY": "off"},
        )
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            if match := re.search(ready, line):
                self.address = match[match.lastindex or 0]
                break
        else:
            raise AssertionError(f"penstock {command} ended:\n{''.join(lines)}")
        self._rest = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._rest.start()

    def end(self) -> None:
        """Interrupt the process, and wait for its end with a good code."""
        self._process.send_signal(signal.SIGINT)
        code = self._process.wait()
        self._rest.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        assert code in (0, 130), code


@pytest.fixture(scope="module")
def staying() -> Iterator[Callable[[str, str, Path], str]]:
    """A function that starts a lasting process; all of them are interrupted when the last page has run."""
    started: list[Staying] = []

    def start(command: str, ready: str, directory: Path) -> str:
        started.append(Staying(command, ready, directory))
        return started[-1].address

    yield start
    for one in reversed(started):
        one.end()


@pytest.fixture(scope="module")
def planner(base: Path, staying: Callable[[str, str, Path], str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a service without solvers, with a worker and an agent beside it."""
    place = tmp_path_factory.mktemp("service")
    shutil.copytree(base, place, dirs_exist_ok=True)
    url = staying("serve --port 0 --slots 0 --database penstock.sqlite", r"(http://127\S+?:\d+)", place)
    staying("worker --database penstock.sqlite --slots 2", r"working on", place)
    staying(f"agent --server {url} --name node0 --cpu-devices 2 --job gpt=mytrain:job", r"(\S+) answers", place)
    return url


@pytest.fixture(scope="module")
def client(planner: str) -> Iterator[Client]:
    """A client of the planner's service."""
    with Client(planner) as client:
        yield client


@pytest.fixture(scope="module")
def runs(base: Path, client: Client) -> Callable[[str], str]:
    """The id of a run that a command of ``penstock runs`` can be about."""
    plan, started = PlanFile.read(base / "plan.json"), dict[bool, str]()

    def run(command: str) -> str:
        is_long = command == "cancel"
        if is_long not in started:
            started[is_long] = client.runs.create(plan, "gpt", steps=10**6 if is_long else 2, wait=is_long is False).id
        return started[is_long]

    return run


@pytest.fixture(scope="module")
def peers(staying: Callable[[str, str, Path], str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Addresses of two hosts that answer probes."""
    place = tmp_path_factory.mktemp("peers")
    first, second = (
        staying(f"probe --serve 127.0.0.1:0 --name {name} --cpu-devices 2 --fabric 2GB/s", r"(127\.0\.0\.1:\d+)", place)
        for name in ("node0", "node1")
    )
    return first, second


@pytest.fixture(scope="module")
def dask() -> Iterator[str]:
    """The address of a scheduler with a worker."""
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=None
    ) as cluster:
        yield cluster.scheduler_address.removeprefix("tcp://")


@pytest.fixture(scope="module")
def jobs(planner: str) -> Callable[[str], str]:
    """The id of a job that a command of ``penstock jobs`` can be about."""
    profile, topology = catalogue.profile("gpt2-small"), catalogue.cluster("1x2xV100")
    quick = {"planner": "dapple", "micro_batch_sizes": [8]}
    cancelled: list[str] = []

    def post_plan(seed: int, more: dict[str, object]) -> str:
        body = {"schema_version": 1, "profile": profile.model_dump(mode="json", exclude_none=True)} | {
            "topology": topology.model_dump(mode="json", exclude_none=True),
            "global_batch_size": 8,
            "seed": seed,
        }
        job: str = httpx.post(f"{planner}/v1/plans", json=body | more).json()["id"]
        return job

    def job(command: str) -> str:
        if command in ("cancel", "finish"):
            cancelled.append(post_plan(len(cancelled) + 2, {"termination": {"time_limit_ns": 10**9}}))
            return cancelled[-1]
        return cancelled[0] if command == "retry" else post_plan(1, quick)

    return job
