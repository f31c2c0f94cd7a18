"""The reader of topology.yaml: every form, which of several topologies is meant, and faults by line and column."""

from __future__ import annotations

import pytest
from slurm_samples import SEVERAL, TORUS

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.formats import import_topology
from penstock.importers.cluster.slurm.slurm_yaml import read_slurm_yaml
from penstock.schemas.api.topology_import import ImportOptions, ImportSource
from penstock.schemas.errors import InvalidDocument


def below(facts: SourceFacts) -> dict[str, str]:
    return {switch.name: " ".join(switch.nodes + switch.switches) for switch in facts.switches}


def ends(facts: SourceFacts) -> set[frozenset[str]]:
    return {frozenset((link.a, link.b)) for link in facts.links}


def test_the_default_topology_is_read() -> None:
    facts = read_slurm_yaml(SEVERAL)
    assert below(facts) == {"leaf1": "n01 n02", "leaf2": "n03 n04 n05", "root": "leaf1 leaf2"}
    assert str(facts.nodes["n01"].place) == "topology.yaml, line 11, column 16"
    assert facts.assumptions == ("topology.yaml: the topology 'hall' is read",)


def test_another_topology_is_read_by_its_name() -> None:
    assert below(read_slurm_yaml(SEVERAL, topology="racks")) == {
        "b1": "n1",
        "b2": "n2",
        "b3": "n3 n4",
        "b[1-2]": "b1 b2",
    }
    assert len(ends(read_slurm_yaml(SEVERAL, topology="circle"))) == 3
    flat = read_slurm_yaml(SEVERAL, topology="plain")
    assert (flat.nodes, flat.switches, flat.links) == ({}, (), ())
    assert "nothing of the network" in flat.assumptions[0]


def test_imports_take_the_name_of_a_topology() -> None:
    options = ImportOptions(devices=("H100",), devices_per_node=8, topology="racks")
    imported = import_topology([ImportSource(text=SEVERAL)], options)
    assert [node.name for node in imported.topology.nodes] == ["n1", "n2", "n3", "n4"]
    with pytest.raises(InvalidDocument, match="no source is a topology"):
        import_topology([ImportSource(text="SwitchName=a Nodes=n1")], options)


def test_a_torus_counts_along_x_first_and_wraps_around() -> None:
    """Three places along x make a ring, two along y make one link, and one along z makes no link. By hand."""
    pairs = {"01", "12", "02", "34", "45", "35", "03", "14", "25"}
    facts = read_slurm_yaml(TORUS)
    assert ends(facts) == {frozenset((f"n{a}", f"n{b}")) for a, b in pairs}
    assert len(facts.links) == len(pairs)


def test_a_torus_by_regions_has_links_where_both_nodes_are() -> None:
    regions = (
        "regions: [{anchor: {x: 0, y: 0, z: 0}, dims: {x: 2, y: 1, z: 1}, nodes: 'n[0-1]'},"
        " {anchor: {x: 0, y: 1, z: 0}, dims: {x: 1, y: 1, z: 1}, nodes: n3}]"
    )
    assert ends(read_slurm_yaml(TORUS.replace("nodes: n[0-5]", regions))) == {
        frozenset(("n0", "n1")),
        frozenset(("n0", "n3")),
    }


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        pytest.param("", "the whole text", "empty", id="empty"),
        pytest.param("# nothing", "line 2, column 1", "comments only", id="comments-only"),
        pytest.param("a: [1\n", "line 2, column 1", "did not find expected", id="truncated"),
        pytest.param("- topology: a\n\tflat: true", "line 2, column 1", "tab", id="tab"),
        pytest.param("a: &a [1]\nb: *a", "line 2, column 4", "alias *a", id="alias"),
        pytest.param("- " * 500, "line 1, column 201", "deeper than 100", id="deep"),
        pytest.param("a: b\n---\nc: d", "line 2, column 1", "second document", id="two-documents"),
        pytest.param("a: b", "line 1, column 1", "no list", id="no-list"),
        pytest.param("[a]", "line 1, column 2", "no mapping", id="no-mapping"),
        pytest.param("[]", "the whole text", "no topology", id="no-topology"),
        pytest.param("- {topology: a}", "line 1, column 3", "no form", id="no-form"),
        pytest.param("- {topology: a, tree: 1, flat: true}", "line 1, column 3", "tree and flat", id="two-forms"),
        pytest.param("- {topology: a, topology: b, flat: 1}", "line 1, column 17", "given twice", id="key-twice"),
        pytest.param("- {topology: a, flat: false}", "line 1, column 23", "not true", id="flat-false"),
        pytest.param("- {topology: a, flat: perhaps}", "line 1, column 23", "neither true nor false", id="no-bool"),
        pytest.param(
            "- {topology: a, flat: true}\n- {topology: b, flat: true}",
            "the whole text",
            "which of a, b",
            id="no-default",
        ),
        pytest.param(
            "- {topology: a, flat: true}\n- {topology: a, flat: true}",
            "line 2, column 3",
            "'a' is there twice",
            id="twice",
        ),
        pytest.param("- {topology: a, tree: {}}", "line 1, column 23", "switches is missing", id="no-switches"),
        pytest.param("- {topology: a, tree: {switches: []}}", "line 1, column 24", "is empty", id="empty-switches"),
        pytest.param(SEVERAL.replace("leaf[1-2]", "leaf[1-3]"), "line 9, column 35", "above leaf3", id="unknown-child"),
        pytest.param(SEVERAL.replace("[04-05]", "[04-"), "line 13, column 24", "not closed", id="hostlist"),
        pytest.param(SEVERAL.replace("n03", "n02"), "line 13, column 16", "n02 of 'leaf2'", id="two-leaves"),
        pytest.param(
            SEVERAL.replace('children: "leaf[1-2]"', "children: root"), "line 9, column 34", "root → root", id="cycle"
        ),
        pytest.param(
            SEVERAL.replace("nodes: n[01-02]", "hosts: n1"), "line 11, column 9", "hosts is none", id="unknown"
        ),
        pytest.param(
            SEVERAL.replace("True", "True\n  name: x"), "line 7, column 3", "name is none of", id="unknown-top"
        ),
        pytest.param(TORUS.replace("n[0-5]", "n[0-4]"), "line 6, column 16", "5 nodes for 3 × 2 × 1", id="count"),
        pytest.param(TORUS.replace("x: 3", "x: 0"), "line 5, column 19", "x of dims is 0", id="torus-size"),
        pytest.param(TORUS.replace("        nodes: n[0-5]\n", ""), "line 4, column 9", "nodes or regions", id="bare"),
    ],
)
def test_one_fault_with_its_place(text: str, at: str, message: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_slurm_yaml(text)
    assert caught.value.faults[0].pointer == at
    assert message in caught.value.faults[0].detail


def test_a_name_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_slurm_yaml(SEVERAL, topology="roof")
    assert "plain, hall, racks, circle" in caught.value.faults[0].detail


def test_names_that_yaml_takes_for_numbers_stay_as_they_are_written() -> None:
    facts = read_slurm_yaml("- {topology: 1, tree: {switches: [{switch: 0x10, nodes: '007,1e3,on'}]}}")
    assert below(facts) == {"0x10": "007 1e3 on"}
