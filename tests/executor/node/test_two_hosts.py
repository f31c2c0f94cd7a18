"""A service and two agents on two hosts, 100 Mbit/s and 1 ms apart: trained right, measured right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_hosts import DELAY_NS, LIMIT_S, PENSTOCK, RATE_BITS_PER_S, Fleet, TwoHosts, wait_for

from penstock.schemas.topology import ClusterTopology

pytestmark = pytest.mark.tier("everything")

CLIENT = """
import sys, time
from penstock.client import Client
from penstock.schemas.plan import PlanFile, PlanQuestion
from penstock.examples.tiny import tiny_plan_file

client, file = Client(sys.argv[1]), PlanFile.parse(tiny_plan_file())
assert client.verify(PlanQuestion(plan=file)).valid
while sum(agent.alive for agent in client.agents()) < 2:
    time.sleep(0.1)
print(client.runs.create(file, "toy", steps=4, check=True).model_dump_json())
client.close()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    hosts = TwoHosts()
    yield hosts
    hosts.close()


def say_what_is_missing(hosts: TwoHosts, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        for what in hosts.lacks:
            sys.stdout.write(f"\n{Path(__file__).name}: {what}; the rest is tested ")


@pytest.mark.timeout(3 * LIMIT_S)
def test_two_hosts_train_what_one_process_trains(hosts: TwoHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    say_what_is_missing(hosts, capsys)
    url = Fleet(hosts, tmp_path).url
    run = json.loads(hosts.run(0, [sys.executable, "-P", "-c", CLIENT, url], LIMIT_S))
    assert (run["state"], run["agents"], len(run["losses"])) == ("succeeded", ["node0", "node1"], 4)
    assert run["gradient_check"] == 0.0


@pytest.mark.timeout(3 * LIMIT_S)
def test_the_probe_finds_what_the_wire_is(hosts: TwoHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    say_what_is_missing(hosts, capsys)
    peers = []
    for host, address in enumerate(hosts.addresses):
        peer = [*PENSTOCK, "probe", "--serve", f"{address}:8745", "--name", f"node{host}", "--cpu-devices", "1"]
        with (tmp_path / f"peer{host}.log").open("wb") as log:
            hosts.start(host, peer, stdout=subprocess.DEVNULL, stderr=log)
        wait_for(tmp_path / f"peer{host}.log", r"(listen)")
        peers.append(f"{address}:8745")
    topology = ClusterTopology.parse(
        json.loads(hosts.run(0, [*PENSTOCK, "probe", *peers, "--measure-for", "2"], LIMIT_S))
    )
    if topology.matrix is not None:
        ways = topology.matrix.latency_ns or ((0, 0), (0, 0))
        bandwidths = [topology.matrix.bandwidth_bytes_per_s[i][1 - i] for i in (0, 1)]
        latencies = [ways[i][1 - i] for i in (0, 1)]
    else:
        bandwidths = [link.bandwidth_bytes_per_s for link in topology.links]
        latencies = [sum(link.latency_ns for link in topology.links)]
    with capsys.disabled():
        sys.stdout.write(f"\nprobe: {[round(8 * one / 1e6, 1) for one in bandwidths]} Mbit/s, {latencies} ns ")
    assert min(bandwidths) > 0
    if hosts.is_shaped:
        assert bandwidths == pytest.approx([RATE_BITS_PER_S / 8] * len(bandwidths), rel=0.2)
    if hosts.is_delayed:
        assert latencies == pytest.approx([DELAY_NS] * len(latencies), rel=0.2)
