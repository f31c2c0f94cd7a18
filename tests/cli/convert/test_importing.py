"""``penstock import topology`` and ``penstock.import_topology``."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import main
from penstock.schemas.api.topology_import import ImportSource, TopologyImported
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.topology import ClusterTopology

TREE = "SwitchName=a Nodes=n[0-1]\nSwitchName=b Nodes=n[2-3]\nSwitchName=top Switches=a,b\n"
DEVICES = ["--device-kind", "H100", "--devices-per-node", "8"]


@pytest.fixture
def tree(tmp_path: Path) -> str:
    file = tmp_path / "topology.conf"
    file.write_text(TREE)
    return str(file)


def run(*arguments: str) -> int:
    return main(["import", "topology", *arguments])


def test_a_file_becomes_a_topology_with_all_that_was_assumed(
    tree: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "site.yaml"
    assert run(tree, *DEVICES, "--only", "n[0-2]", "--kind", "GB200=2.5xH100", "-o", str(target)) == 0
    topology = ClusterTopology.read(target)
    assert [(kind.name, kind.speed, kind.scale_from) for kind in topology.kinds] == [("GB200", 2.5, "H100")]
    assert (topology.name, len(topology.nodes)) == ("site", 3)
    shown = capsys.readouterr().out
    assert "3 nodes with 24 H100, 3 switches, 5 links" in shown
    for assumption in topology.assumptions:
        assert f"- {assumption}" in shown
    assert "- n3: it was not asked for" in shown
    assert len(target.read_text().splitlines()) < 30  # a line for each node and link


def test_standard_input_and_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (TREE.encode(), b"\xef\xbb\xbf" + TREE.encode(), TREE.encode("utf-16")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert run("-", *DEVICES) == 0
        shown = capsys.readouterr()
        assert ClusterTopology.parse_json(shown.out).name == "imported"
        assert "assumed:" in shown.err


def test_json_is_the_whole_answer(tree: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tree, *DEVICES, "--json", "--name", "site") == 0
    answer = TopologyImported.model_validate(json.loads(capsys.readouterr().out))
    assert (answer.topology.name, answer.free, answer.hash) == ("site", None, None)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 64, "there is nothing to read"),
        (["nowhere.conf"], 65, "cannot read 'nowhere.conf': No such file or directory"),
        (["TREE", "--from", "pbs"], 64, "'pbs' is none of slurm-conf"),
        (["TREE", "TREE", "TREE", "--from", "slurm-conf", "--from", "slurm-conf"], 64, "2 formats for 3 files"),
        (["-", "-"], 64, "standard input can be read only once"),
        (["TREE", "--kind", "GB200=fast"], 64, "'GB200=fast' does not have the form NAME=SPEEDxKNOWN"),
        (["TREE", "--memory", "lots"], 64, "--memory: 'lots' is not an amount of memory"),
        (["TREE", "--nic", "0 Gbit/s"], 64, "--nic: input should be greater than or equal to 1"),
        (["TREE", "--fabric", "mesh"], 64, "--fabric: input should be 'pairs', 'ports' or 'bus'"),
        (["TREE"], 65, "n[0-3]: the number of devices is unknown; give --devices-per-node 8"),
        (["TREE", "--from", "nccl-xml"], 65, "topology.conf"),
        (["TREE", *DEVICES, "--only", "n[0-"], 65, "hostlist"),
        (["TREE", *DEVICES, "--agents", "http://127.0.0.1:9"], 1, "127.0.0.1:9"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(
    tree: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    target = tmp_path / "made.json"
    assert run(*(tree if word == "TREE" else word for word in arguments), "-o", str(target)) == code
    assert message in " ".join(capsys.readouterr().err.split())
    assert not target.exists()


@pytest.mark.tier("quick")
def test_the_python_function(tree: str) -> None:
    answer = penstock.import_topology(tree, devices="A100", devices_per_node=4, memory_bytes="40 GiB")
    assert answer.topology.nodes[0].devices[0].memory_bytes == 40 * 2**30
    again = penstock.import_topology(
        ImportSource(text=TREE), format="slurm-conf", devices=["A100"], devices_per_node=4, memory_bytes="40 GiB"
    )
    assert again.topology == answer.topology
    with pytest.raises(InvalidDocument, match="fabric"):
        penstock.import_topology(tree, fabric="mesh")
    with pytest.raises(InvalidDocument, match="formats"):
        penstock.import_topology(tree, format=["slurm-conf", "slurm-conf"])
