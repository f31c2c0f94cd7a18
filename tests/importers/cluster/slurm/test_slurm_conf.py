"""The reader of topology.conf: trees, blocks, rings, and what is wrong with a text by line and column."""

from __future__ import annotations

import pytest
from slurm_samples import CONF_TREE as TREE

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.slurm.slurm_conf import read_slurm_conf
from penstock.schemas.errors import InvalidDocument


def below(facts: SourceFacts) -> dict[str, str]:
    return {switch.name: " ".join(switch.nodes + switch.switches) for switch in facts.switches}


def faults(text: str) -> dict[str, str]:
    with pytest.raises(InvalidDocument) as caught:
        read_slurm_conf(text, "site.conf")
    assert "site.conf" in caught.value.detail
    return {fault.pointer: fault.detail for fault in caught.value.faults}


def test_a_tree_with_comments_continuations_and_keys_in_any_case() -> None:
    facts = read_slurm_conf(TREE)
    assert below(facts) == {"leaf1": "n1 n2 n3", "leaf2": "n4 n6", "spine": "leaf1 leaf2"}
    assert [(switch.tier, switch.layer) for switch in facts.switches] == [(0, "switch"), (0, "switch"), (1, "switch")]
    assert str(facts.nodes["n6"].place) == "topology.conf, line 3, column 26"
    assert all(switch.bandwidth_bytes_per_s is None for switch in facts.switches)
    assert any("LinkSpeed" in note for note in facts.assumptions)


def test_without_link_speed_nothing_is_said_of_it() -> None:
    assert read_slurm_conf("SwitchName=s Nodes=n1").assumptions == ()


def test_windows_line_ends_and_a_byte_order_mark() -> None:
    assert below(read_slurm_conf("\ufeff" + TREE.replace("\n", "\r\n"))) == below(read_slurm_conf(TREE))


def test_blocks_are_grouped_as_their_sizes_say() -> None:
    """Slurm, topology.conf(5): sizes of 2, 4 and 8 nodes put two and four neighbouring blocks together; by hand."""
    blocks = "".join(f"BlockName=b{i} Nodes=n[{2 * i}-{2 * i + 1}]\n" for i in range(5))
    facts = read_slurm_conf(blocks + "BlockSizes=2,4,8\n")
    assert {name: inside for name, inside in below(facts).items() if "[" in name} == {
        "b[0-1]": "b0 b1",
        "b[2-3]": "b2 b3",
        "b[0-3]": "b[0-1] b[2-3]",
    }
    assert {switch.layer for switch in facts.switches} == {"block", "aggregated-block"}


def test_blocks_without_sizes_or_with_one() -> None:
    text = "BlockName=b0 Nodes=n0\nBlockName=b1 Nodes=n1\n"
    assert list(below(read_slurm_conf(text))) == list(below(read_slurm_conf(text + "BlockSizes=1"))) == ["b0", "b1"]


def test_rings_are_links_between_neighbours() -> None:
    facts = read_slurm_conf("RingName=a Nodes=n[1-3]\nRingName=b Nodes=m2,m1\nRingName=c Nodes=k")
    assert [(link.a, link.b) for link in facts.links] == [("n1", "n2"), ("n2", "n3"), ("n3", "n1"), ("m2", "m1")]
    assert all(link.bandwidth_bytes_per_s is None for link in facts.links)
    assert set(facts.nodes) == {"n1", "n2", "n3", "m1", "m2", "k"}
    assert any("ring" in note for note in facts.assumptions)


def test_spines_above_the_same_leaves_are_one() -> None:
    text = (
        "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\nSwitchName=s[1-2] Switches=a,b\n".replace("s[1-2]", "s1")
        + "SwitchName=s2 Switches=b,a\nSwitchName=core Switches=s[1-2]"
    )
    facts = read_slurm_conf(text)
    assert below(facts) == {"a": "n1", "b": "n2", "s1": "a b", "core": "s1"}
    assert any("s[1-2]" in note for note in facts.assumptions)


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        pytest.param("", "the whole text", "empty", id="empty"),
        pytest.param("# nothing\n", "the whole text", "names no switch", id="comments-only"),
        pytest.param("ok\n\0", "line 2, column 1", "binary", id="binary"),
        pytest.param("SwitchName=a Nodes=n1\nfoo", "line 2, column 1", "'foo' is no Key=Value", id="no-pair"),
        pytest.param("SwitchName=a Node=n1", "line 1, column 14", "Node is none of", id="unknown-key"),
        pytest.param("SwitchName=a Nodes=n1 Nodes=n2", "line 1, column 23", "given twice", id="key-twice"),
        pytest.param("SwitchName=a Nodes=n1 Switches=b", "line 1, column 32", "one of them", id="nodes-and-switches"),
        pytest.param("Nodes=n1", "line 1, column 7", "its line names none", id="of-no-switch"),
        pytest.param("SwitchName= Nodes=n1", "line 1, column 13", "SwitchName is empty", id="no-name"),
        pytest.param("SwitchName=a b Nodes=n1", "line 1, column 14", "'b' is no Key=Value", id="stray-word"),
        pytest.param("SwitchName=a,b Nodes=n1", "line 1, column 12", "no single name", id="two-names"),
        pytest.param("SwitchName=a Nodes=n1 LinkSpeed=fast", "line 1, column 33", "no whole number", id="speed"),
        pytest.param("BlockName=a Nodes=n1 LinkSpeed=1", "line 1, column 32", "does not go with", id="key-of-another"),
        pytest.param("BlockName=a", "line 1, column 11", "has no Nodes", id="block-without-nodes"),
        pytest.param("SwitchName=a Nodes=n[1", "line 1, column 21", "not closed", id="hostlist"),
        pytest.param("SwitchName=a \\\nNodes=n[2-1]", "line 2, column 9", "counts down", id="hostlist-continued"),
        pytest.param("SwitchName=a Nodes=n1 \\", "line 1", "cut off", id="truncated"),
        pytest.param("SwitchName=a Nodes=n[0-999999999]", "line 1, column 20", "more than 1,000,000", id="huge"),
        pytest.param(
            "SwitchName=a Nodes=n1\nSwitchName=b Nodes=m[1-1000000]",
            "line 2, column 20",
            "more than 1,000,000",
            id="huge-in-all",
        ),
        pytest.param("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "line 2, column 12", "twice", id="switch-twice"),
        pytest.param("SwitchName=a Nodes=n1,n[1-2]", "line 1, column 20", "'a' has n1 twice", id="node-twice"),
        pytest.param("SwitchName=a Switches=b[1-2]", "line 1, column 23", "b[1-2], which is no", id="unknown-child"),
        pytest.param(
            "SwitchName=a Nodes=n[1-3]\nSwitchName=b Nodes=n[2-4]",
            "line 2, column 20",
            "n[2-3] of 'b' is of 'a', too",
            id="two-leaves",
        ),
        pytest.param("SwitchName=a Switches=a", "line 1, column 23", "a → a", id="above-itself"),
        pytest.param(
            "SwitchName=l Nodes=n\nSwitchName=a Switches=b,l\nSwitchName=b Switches=c\nSwitchName=c Switches=a",
            "line 2, column 23",
            "a → b → c → a",
            id="cycle",
        ),
        pytest.param(
            "SwitchName=a Nodes=n1\nSwitchName=b Nodes=n2\nSwitchName=s Switches=a,b\nSwitchName=t Switches=b",
            "line 4, column 23",
            "'b' is below 't' and 's'",
            id="two-parents",
        ),
        pytest.param(
            "SwitchName=s0 Nodes=n\n" + "".join(f"SwitchName=s{i} Switches=s{i - 1}\n" for i in range(1, 5000)),
            "line 5000, column 12",
            "4999 tiers",
            id="too-deep",
        ),
        pytest.param("BlockName=a Nodes=n1\nRingName=r Nodes=n2", "line 2, column 10", "on line 1", id="two-forms"),
        pytest.param("BlockName=a Nodes=n1\nBlockSizes=2,x", "line 2, column 14", "'x' is not a number", id="size"),
        pytest.param("BlockName=a Nodes=n1\nBlockSizes=2,6", "line 2, column 14", "power of two", id="size-not-of-two"),
        pytest.param("BlockSizes=1\nBlockSizes=2\nBlockName=a Nodes=n", "line 2, column 12", "twice", id="sizes-twice"),
        pytest.param("RingName=a Nodes=n1\nRingName=b Nodes=n1", "line 2, column 18", "of 'a', too", id="two-rings"),
    ],
)
def test_one_fault_with_its_place(text: str, at: str, message: str) -> None:
    details = faults(text)
    assert list(details) == [at]
    assert message in details[at]


def test_all_faults_at_once() -> None:
    assert list(faults("SwitchName=a Nodes=n[2-1]\nSwitchName=b Foo=1\nbar")) == [
        "line 1, column 22",
        "line 2, column 14",
        "line 3, column 1",
    ]


def test_of_very_many_faults_the_first_are_told() -> None:
    with pytest.raises(InvalidDocument, match="has 1000 faults; the first 50 follow") as caught:
        read_slurm_conf("foo\n" * 1000)
    assert len(caught.value.faults) == 50


def test_messages_of_many_nodes_stay_short() -> None:
    nodes = ",".join(f"n{3 * i}" for i in range(2000))
    assert all(
        len(detail) < 300 for detail in faults(f"SwitchName=a Nodes={nodes}\nSwitchName=b Nodes={nodes}").values()
    )
