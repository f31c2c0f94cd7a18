"""``penstock probe`` between peers: a topology from real sockets, and what is refused."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from peers import host, peer

from penstock.cli.main import main
from penstock.schemas.topology import ClusterTopology


def test_peers_make_a_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "topology.json"
    with ExitStack() as stack:
        addresses = [stack.enter_context(peer(host(name))) for name in ("a", "b")]
        assert main(["probe", *addresses, "--measure-for", "0.2", "-o", str(target)]) == 0
    topology = ClusterTopology.read(target)
    assert [node.name for node in topology.nodes] == ["a", "b"]
    assert topology.links_from == "measured"
    assert "a → b" in capsys.readouterr().err


@pytest.mark.tier("nightly")
def test_peers_measure_collectives_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "topology.json"
    with ExitStack() as stack:
        addresses = [stack.enter_context(peer(host(name))) for name in ("a", "b")]
        assert main(["probe", *addresses, "--measure-for", "0.1", "--collectives", "-o", str(target)]) == 0
    rows = ClusterTopology.read(target).collectives
    assert rows is not None
    assert {(row.devices_per_node, row.nodes) for row in rows} == {(1, 2)}
    assert "15 times of collectives" in capsys.readouterr().err


def test_what_cannot_be_probed_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    for arguments, code, word in (
        ([nobody, nobody], 1, "no process listens"),
        (["here"], 65, "host:port"),
        (["--serve", "127.0.0.1:0", nobody], 64, "either"),
        (["--serve", "203.0.113.1:0", "--cpu-devices", "1"], 65, "cannot listen"),
        (["--serve", "127.0.0.1:0", "--fabric", "fast"], 64, "fast"),
        (["--cpu-devices", "1"], 64, "two processes"),
        (["--cpu-devices", "2", "--nodes", "33", "--collectives"], 65, "33 × 2"),
    ):
        assert main(["probe", *arguments]) == code, arguments
        assert word in capsys.readouterr().err
