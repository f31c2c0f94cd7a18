"""The reader of what ``scontrol show topology`` prints: trees, blocks, rings, and texts that are only a part of it."""

from __future__ import annotations

import pytest
from slurm_samples import SHOWN_TREE as TREE

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.slurm.scontrol_topology import read_scontrol_topology
from penstock.schemas.errors import InvalidDocument


def below(facts: SourceFacts) -> dict[str, str]:
    return {switch.name: " ".join(switch.nodes + switch.switches) for switch in facts.switches}


def test_switches_above_others_repeat_nodes_that_are_counted_once() -> None:
    facts = read_scontrol_topology(TREE)
    assert below(facts) == {
        "leaf1": "n1 n2",
        "leaf2": "n3 n4",
        "empty": "",
        "spine1": "leaf1 empty",
        "spine2": "leaf2",
        "core": "spine1 spine2",
    }
    assert [switch.tier for switch in facts.switches] == [0, 0, 0, 1, 1, 2]
    assert facts.assumptions == ()


def test_link_speeds_other_than_slurms_default_are_said_not_to_count() -> None:
    facts = read_scontrol_topology("SwitchName=s Level=0 LinkSpeed=400 Nodes=n1")
    assert facts.switches[0].bandwidth_bytes_per_s is None
    assert "LinkSpeed" in facts.assumptions[0]


@pytest.mark.parametrize("key", ["AggregatedBlock", "BlockName"])
def test_blocks_and_larger_blocks_of_new_and_old_slurm(key: str) -> None:
    text = "".join(f"BlockName=b{i} BlockIndex={i} Nodes=n{i} BlockSize=1\n" for i in range(4))
    text += f"{key}=b[0-3] BlockIndex=4 Nodes=n[0-3] BlockSize=4\n"
    text += f"{key}=b[0-1] BlockIndex=5 Nodes=n[0-1] BlockSize=2\n{key}=b2,b3 BlockIndex=6 Nodes=n[2-3] BlockSize=2\n"
    facts = read_scontrol_topology(text)
    assert {name: inside for name, inside in below(facts).items() if not name[1:].isdigit()} == {
        "b[0-1]": "b0 b1",
        "b2,b3": "b2 b3",
        "b[0-3]": "b[0-1] b2,b3",
    }
    assert any("NVLink" in note for note in facts.assumptions)


def test_rings() -> None:
    facts = read_scontrol_topology("RingName=r Nodes=n3,n1,n2 RingSize=3")
    assert [(link.a, link.b) for link in facts.links] == [("n3", "n1"), ("n1", "n2"), ("n2", "n3")]


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        pytest.param("", "the whole text", "empty", id="empty"),
        pytest.param("slurm_load_topo error: refused", "line 1, column 1", "no Key=Value", id="an-error-instead"),
        pytest.param(
            "scontrol: error: No topology information available", "the whole text", "topology/flat", id="flat"
        ),
        pytest.param("SwitchName=a Level=1 Nodes=n1 Switches=b", "line 1, column 40", "'a' is above b", id="a-part"),
        pytest.param("SwitchName=a Level=1 Nodes=n1", "line 1, column 20", "on level 1, and level 0", id="level"),
        pytest.param(
            TREE.replace("Nodes=n[1-4] ", "Nodes=n[1-3],x "), "line 6, column 12", "other nodes", id="nodes-differ"
        ),
        pytest.param(TREE[:83], "line 2, column 26", "'LinkSpee' is no Key=Value", id="cut-off"),
        pytest.param("Level=1", "line 1, column 7", "names none", id="of-no-switch"),
        pytest.param("SwitchName= Level=0", "line 1, column 13", "SwitchName is empty", id="no-name"),
        pytest.param("SwitchName=a,b Level=0", "line 1, column 12", "no single name", id="two-names"),
        pytest.param(
            "BlockName=a BlockIndex=0 Nodes=n1\nAggregatedBlock=a,c BlockIndex=1",
            "line 2, column 17",
            "of unknown blocks: c",
            id="unknown-block",
        ),
        pytest.param(
            "".join(f"BlockName={b} Nodes=n{b}\n" for b in "abc") + "AggregatedBlock=a,b\nAggregatedBlock=b,c",
            "line 5, column 17",
            "some blocks of 'a,b', and not all",
            id="torn-block",
        ),
        pytest.param("SwitchName=a Nodes=n1\nRingName=r Nodes=n2", "line 2, column 10", "a ring in a text", id="mixed"),
        pytest.param(
            "TorusName=t Dims=2x2x2 Nodes=n[1-8]\n  TorusName=t PlacementDims=1x1x2(2) Anchors=4",
            "line 1, column 11",
            "import topology.yaml instead",
            id="torus",
        ),
    ],
)
def test_one_fault_with_its_place(text: str, at: str, message: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_scontrol_topology(text)
    (fault,) = caught.value.faults
    assert fault.pointer == at
    assert message in fault.detail
