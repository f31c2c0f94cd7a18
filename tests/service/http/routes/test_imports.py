"""POST /v1/topologies:import, its client, and the command with --server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from played_agent import Agent
from service_process import Server

from penstock.cli.main import main
from penstock.client import Client
from penstock.examples.tiny import tiny_import
from penstock.schemas.api.topology_import import ImportOptions, ImportSource, TopologyImport
from penstock.schemas.errors import InvalidDocument

PATH = "/v1/topologies:import"
TREE = "SwitchName=a Nodes=n[0-1]\nSwitchName=b Nodes=n[2-3]\nSwitchName=top Switches=a,b\n"
SOURCE = ImportSource(text=TREE, name="topology.conf")
OPTIONS = ImportOptions(devices=("H100",), devices_per_node=8, only="n[0-2]")


@pytest.mark.tier("nightly")
def test_an_import_is_kept_under_its_hash(client: Client, http: httpx.Client) -> None:
    imported = client.import_topology(TopologyImport(sources=(SOURCE,), options=OPTIONS))
    assert imported.hash == imported.topology.content_hash()
    assert client.topologies.get(imported.hash) == imported.topology
    assert [(group.nodes, group.why) for group in imported.left_out] == [("n3", "it was not asked for")]
    other = OPTIONS.model_copy(update={"name": "not kept"})
    apart = client.import_topology(TopologyImport(sources=(SOURCE,), options=other, store=False))
    assert apart.hash is None
    assert http.get(f"/v1/topologies/{apart.topology.content_hash()}").status_code == 404
    assert http.post(PATH, json=tiny_import()).json()["topology"]["name"] == "tiny-slurm"


def test_living_agents_are_a_source(
    shared_server: Server, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    players = [Agent(shared_server.url, f"n{i}", devices=2) for i in range(2)]
    for player in players:
        player.sync()
    options = ImportOptions(fabric="bus", fabric_bytes_per_s=10**9, nic_bytes_per_s=10**8)
    imported = client.import_topology(TopologyImport(sources=(SOURCE,), options=options, agents=True))
    assert [node.name for node in imported.topology.nodes] == ["n0", "n1"]
    assert {device.kind for node in imported.topology.nodes for device in node.devices} == {"cpu"}
    assert [(group.nodes, group.why) for group in imported.left_out] == [
        ("n[2-3]", "no source says which devices it has")
    ]
    target = tmp_path / "agents.json"
    options_of_command = ["--fabric", "bus", "--fabric-bandwidth", "1GB/s", "--nic", "1Gbit/s", "-o", str(target)]
    assert main(["import", "topology", "--agents", shared_server.url, *options_of_command]) == 0
    assert f"the agents of {shared_server.url}" in " ".join(capsys.readouterr().out.split())
    assert [node["name"] for node in json.loads(target.read_text())["nodes"]] == ["n0", "n1"]
    for player in players:
        player.sync(leaving=True)
        player.http.close()


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"sources": []}, None, "no source"),
        ({"sources": [{"text": "SwitchName=a Nodes=n[0-"}]}, "line 1, column ", "topology.conf"),
        ({"sources": [{"text": "x", "format": "pbs"}]}, "/sources/0/format", "Input should be"),
        ({"sources": [{"path": "/etc/passwd"}]}, "/sources/0/text", "is missing"),
        ({"options": {"devices_per_node": 0}}, "/options/devices_per_node", "greater than or equal to 1"),
        ({"options": {"devices_per_node": 10**9}}, "/options/devices_per_node", "less than or equal to 1024"),
        ({"options": {"only": "n[0-"}}, "column ", "hostlist"),
        ({"sources": [{"text": "SwitchName=a Nodes=n[0-99999]"}]}, None, "400,000 devices; the limit is 65,536"),
        ({"options": {}}, "n[0-3]", "what the devices are"),
    ],
)
def test_bad_input_is_a_problem_and_no_error(
    http: httpx.Client, change: dict[str, Any], pointer: Any, words: str
) -> None:
    answer = http.post(PATH, json=tiny_import() | change)
    assert answer.status_code == 422
    problem = answer.json()
    assert words in answer.text
    if pointer is not None:
        assert any(fault["pointer"].startswith(pointer) for fault in problem["errors"])


def test_the_client_raises_what_the_service_refuses(client: Client) -> None:
    with pytest.raises(InvalidDocument, match="the number of devices"):
        client.import_topology(TopologyImport(sources=(SOURCE,)))


def test_the_command_has_a_service_do_it(
    shared_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = tmp_path / "topology.conf", tmp_path / "cluster.json"
    file.write_text(TREE)
    options_of_command = ["--device-kind", "H100", "--devices-per-node", "8", "--server", shared_server.url]
    assert main(["import", "topology", str(file), *options_of_command, "-o", str(target)]) == 0
    shown = capsys.readouterr().out
    address = f"sha256:{shown.rpartition('sha256:')[2].strip()}"
    assert json.loads(target.read_text())["name"] == "cluster"
    assert shared_server.client.topologies.get(address).name == "cluster"
