"""Plans for nodes that are no longer there are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import plan_on

from penstock.manifests.against import read_known, refuse_absent
from penstock.schemas.errors import Conflict, InvalidDocument

TOPOLOGY = """
schema_version: 1
name: now
uniform: {nodes: 2, devices_per_node: 2, kind: V100, memory_bytes: 16 GiB, node_names: "gpu{}"}
"""
NODES = """
NodeName=gpu0 Arch=x86_64
   Gres=gpu:v100:2
   State=IDLE
NodeName=gpu1 Arch=x86_64
   Gres=gpu:v100:1
   State=IDLE
NodeName=gpu2 Arch=x86_64
   Gres=gpu:v100:2
   State=DOWN+DRAIN Reason=bad disk [root@2026-01-01T00:00:00]
"""
SWITCHES = "SwitchName=leaf Nodes=gpu[0-1]\n"


def why(tmp_path: Path, name: str, text: str, used: dict[str, int]) -> str:
    """Return the faults of a plan; no text where it may run."""
    (tmp_path / name).write_text(text)
    try:
        refuse_absent(plan_on(used), read_known(str(tmp_path / name)))
    except Conflict as error:
        return error.detail.partition(": ")[2]
    return ""


def test_a_plan_against_what_is_there_now(tmp_path: Path) -> None:
    assert why(tmp_path, "now.yaml", TOPOLOGY, {"gpu0": 2, "gpu1": 2}) == ""
    assert why(tmp_path, "now.yaml", TOPOLOGY, {"gpu0": 3}) == "'gpu0' has 2 devices, and the plan uses 3"
    assert why(tmp_path, "now.yaml", TOPOLOGY, {"gpu7": 1}) == "there is no node 'gpu7' (there is 'gpu1')"
    assert why(tmp_path, "nodes.txt", NODES, {"gpu0": 2, "gpu1": 1}) == ""
    sentence = why(tmp_path, "nodes.txt", NODES, {"gpu0": 1, "gpu1": 2, "gpu2": 1, "else": 1})
    assert sentence.startswith("'gpu1' has 1 devices, and the plan uses 2; 'gpu2': ")
    assert "bad disk" in sentence
    assert sentence.endswith("there is no node 'else'")
    assert why(tmp_path, "topology.conf", SWITCHES, {"gpu0": 8}) == ""
    assert "gpu2" in why(tmp_path, "topology.conf", SWITCHES, {"gpu2": 1})


def test_texts_that_say_nothing_of_nodes(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match="cannot read"):
        read_known(str(tmp_path / "absent"))
    (tmp_path / "prose.txt").write_text("hello\n")
    with pytest.raises(InvalidDocument, match="no known format"):
        read_known(str(tmp_path / "prose.txt"))
    (tmp_path / "topo.txt").write_text("\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n")
    with pytest.raises(InvalidDocument, match="names no nodes"):
        read_known(str(tmp_path / "topo.txt"))
