"""Two hosts that train one run, when a rank stops or hangs, and when the wire between them is cut."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from two_hosts import Fleet, TwoHosts

pytestmark = pytest.mark.tier("nightly")

LIMIT_S = 240.0
PEER_TIMEOUT_S, AGENT_TIMEOUT_S = 20, 6
"""The service notices a silent agent well before ranks notice a silent peer."""
SETTINGS = {
    "PENSTOCK_AGENT_TIMEOUT_S": str(AGENT_TIMEOUT_S),
    "PENSTOCK_AGENT_HOLD_S": "2",
    "PENSTOCK_AGENT_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
}
END_S = PEER_TIMEOUT_S + 25.0
"""The time until ranks that are cut off have ended: the limit, and a busy machine."""

CLIENT = """
import json, sys, time
from penstock.client import Client
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.plan import PlanFile, PlanQuestion
from penstock.examples.tiny import tiny_plan_file

url, directory, restarts = sys.argv[1], sys.argv[2], int(sys.argv[3])
client, file = Client(url), PlanFile.parse(tiny_plan_file())
assert client.verify(PlanQuestion(plan=file)).valid
while sum(agent.alive for agent in client.agents()) < 2:
    time.sleep(0.1)
options = RunOptions(checkpoint_directory=directory, checkpoint_every=1000, resume="auto") if restarts else RunOptions()
run = client.runs.create(file, "toy", steps=10**6, max_restarts=restarts, options=options, wait=False)
for out in client.runs.watch(run.id):
    whys = [one.why for one in out.generations]
    error = None if out.error is None else out.error.detail
    print(json.dumps({"id": run.id, "state": out.state, "generation": out.generation, "steps": len(out.losses),
                      "error": error, "whys": whys}), flush=True)
"""
CANCEL = "import sys; from penstock.client import Client; Client(sys.argv[1]).runs.cancel(sys.argv[2])"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    hosts = TwoHosts()
    if not hosts.has_namespaces:
        hosts.close()
        pytest.skip(hosts.lacks[0])
    yield Fleet(hosts, tmp_path_factory.mktemp("fleet"), SETTINGS)
    hosts.close()


class Run:
    """A run that trains for ever; ``until`` reads what reaches its client."""

    def __init__(self, fleet: Fleet, directory: Path, restarts: int) -> None:
        command = [sys.executable, "-P", "-c", CLIENT, fleet.url, str(directory), str(restarts)]
        self._fleet = fleet
        self._client = fleet.hosts.start(0, command, stdout=subprocess.PIPE, text=True)
        self.ranks: list[psutil.Process] = []
        self.last: dict[str, Any] = {}

    def until(self, state: str, generation: int = 1, steps: int = 0) -> dict[str, Any]:
        assert self._client.stdout is not None
        for line in self._client.stdout:
            self.last = json.loads(line)
            has = (self.last["state"], self.last["generation"])
            if has == (state, generation) and self.last["steps"] >= steps:
                if state == "running":
                    self.ranks = self._fleet.ranks()
                return self.last
        raise AssertionError(f"never {state}: {self.last}")

    def cancel(self) -> None:
        self._fleet.hosts.run(0, [sys.executable, "-P", "-c", CANCEL, self._fleet.url, self.last["id"]], LIMIT_S)
        self.until("cancelled", self.last["generation"])


def none_is_left(ranks: list[psutil.Process]) -> bool:
    return psutil.wait_procs(ranks, END_S)[1] == []


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_rank_that_is_stopped_is_named_by_its_peer_and_killed(fleet: Fleet, tmp_path: Path) -> None:
    run = Run(fleet, tmp_path, 0)
    run.until("running", steps=5)
    (stopped,) = fleet.ranks(1)
    stopped.send_signal(signal.SIGSTOP)
    error = run.until("failed")["error"]
    assert re.search(r"^rank 0 on agent 'node0' failed at step \d+, .*timed out: rank 1 sent nothing for", error)
    assert none_is_left([*run.ranks, stopped])


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_rank_that_hangs_in_a_layer_is_named_with_its_line(fleet: Fleet, tmp_path: Path) -> None:
    run = Run(fleet, tmp_path, 0)
    run.until("running", steps=5)
    (fleet.directory / "hang").touch()
    try:
        error = run.until("failed")["error"]
    finally:
        (fleet.directory / "hang").unlink()
    assert re.search(r"^rank 1 on agent 'node1' failed at step \d+, .* and waits for no peer; .*toy_job.py", error)
    assert none_is_left(run.ranks)


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_wire_that_is_cut_for_three_seconds_and_for_good(fleet: Fleet, tmp_path: Path) -> None:
    """The messages of the first cut are sent again; after the second one the service trains on its own host."""
    run = Run(fleet, tmp_path, 3)
    before = run.until("running", steps=5)["steps"]
    fleet.hosts.cut(3.0)
    assert run.until("running", steps=before + 10)["generation"] == 1
    with fleet.hosts.cut_off():
        assert none_is_left(run.ranks)
        run.until("running", 2)
    assert (
        run.last["whys"][0]
        == f"agent 'node1' was silent for more than {AGENT_TIMEOUT_S} s while it held ranks of this run"
    )
    log = (fleet.directory / "node1.log").read_text()
    assert re.search(r'rank_failed {"rank": 1, "reason": "timed out: rank 0 sent nothing for', log)
    run.cancel()
