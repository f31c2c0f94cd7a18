"""Volcano's HyperNodes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from kubernetes_samples import hypernode, listed, member, node, pod

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.kubernetes.hypernodes import read_hypernodes
from penstock.schemas.errors import InvalidDocument


def tree(facts: SourceFacts) -> dict[str, tuple[str, ...]]:
    return {one.name: one.switches + one.nodes for one in facts.switches}


def test_tiers_and_names() -> None:
    objects = [
        hypernode("s0", 1, member("Node", exact="node-0"), member("Node", exact="node-1"), tier_name="rack"),
        hypernode("s1", 1, member("Node", exact="node-2")),
        hypernode("s6", 3, member("HyperNode", exact="s0"), member("HyperNode", regex="^s1$")),
    ]
    facts = read_hypernodes("---\n".join(yaml.safe_dump(one) for one in objects))
    assert tree(facts) == {"s6": ("s0", "s1"), "s0": ("node-0", "node-1"), "s1": ("node-2",)}
    assert [(one.name, one.tier, one.layer) for one in facts.switches] == [
        ("s6", 1, "tier 3"),
        ("s0", 0, "rack"),
        ("s1", 0, "tier 1"),
    ]
    assert str(facts.switches[0].place) == "hypernodes.yaml, document 3"
    assert facts.nodes == {}


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ({"exact": "a1"}, ("a1",)),
        ({"exact": "elsewhere"}, ("elsewhere",)),
        ({"regex": "a"}, ("a1", "a2", "ba")),
        ({"regex": "^a[12]$"}, ("a1", "a2")),
        ({"regex": "nothing"}, ()),
        ({"labels": {"matchLabels": {"rack": "r1"}}}, ("a1", "ba")),
        ({"labels": {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["r2", "r3"]}]}}, ("a2",)),
        ({"labels": {"matchExpressions": [{"key": "rack", "operator": "NotIn", "values": ["r2"]}]}}, ("a1", "ba", "c")),
        ({"labels": {"matchExpressions": [{"key": "rack", "operator": "Exists"}]}}, ("a1", "a2", "ba")),
        ({"labels": {"matchExpressions": [{"key": "rack", "operator": "DoesNotExist"}]}}, ("c",)),
        ({"labels": {}}, ()),
    ],
)
def test_selectors_choose_among_the_nodes_of_the_text(selector: dict[str, Any], chosen: tuple[str, ...]) -> None:
    racks = {"a1": "r1", "a2": "r2", "ba": "r1"}
    nodes = [node(name, labels={"rack": rack}) for name, rack in racks.items()]
    facts = read_hypernodes(listed(*nodes, node("c"), hypernode("s", 1, member("Node", **selector))))
    assert tree(facts) == {"s": chosen}
    assert any("chooses nothing" in note for note in facts.assumptions) == (not chosen)


def test_a_node_stays_in_the_innermost_hypernode() -> None:
    outer = hypernode("all", 2, member("HyperNode", exact="rack"), member("Node", exact="n"), member("Node", exact="m"))
    facts = read_hypernodes(listed(outer, hypernode("rack", 1, member("Node", exact="n"))))
    assert tree(facts) == {"all": ("rack", "m"), "rack": ("n",)}


def test_expressions_from_outside_take_linear_time() -> None:
    """As long a name as there may be, against an expression that backtracking takes 2^250 steps for."""
    long = "a" * 253
    facts = read_hypernodes(listed(node(long), hypernode("s", 1, member("Node", regex="(a+)+(a+)+b"))))
    assert tree(facts) == {"s": ()}


INSIDE = member("Node", exact="n")


@pytest.mark.parametrize(
    ("text", "pointer", "detail"),
    [
        (listed(), "the whole text", "there is no HyperNode among them, but no object"),
        (listed(node("n"), pod("p", "n", 1)), "the whole text", "but 1 Node, 1 Pod"),
        (listed(hypernode("s", -1)), "items/0/spec/tier", "greater than or equal to 0; it is -1"),
        (
            listed(hypernode("s", 1, {"type": "Rack", "selector": {}})),
            "items/0/spec/members/0/type",
            "'Node' or 'Hyper",
        ),
        (listed(hypernode("s", 1, member("Node"))), "items/0/spec/members/0", "this has 0"),
        (listed(hypernode("s", 1, member("Node", exact="n", regex="n"))), "items/0/spec/members/0", "this has 2"),
        (
            listed(hypernode("s", 1, member("Node", regex="n"))),
            "items/0/spec/members/0",
            "kubectl get nodes,hypernodes",
        ),
        (
            listed(node("n"), hypernode("s", 1, member("Node", regex="(n"))),
            "items/1/spec/members/0",
            "the pattern '(n' is no regular expression of RE2: missing )",
        ),
        (
            listed(node("n"), hypernode("s", 1, member("Node", regex="(?=n)"))),
            "items/1/spec/members/0",
            "invalid perl operator",
        ),
        (
            listed(node("n"), hypernode("s", 1, member("HyperNode", labels={"matchLabels": {"a": "b"}}))),
            "items/1/spec/members/0",
            "labelMatch chooses nodes",
        ),
        (
            listed(hypernode("s", 2, member("HyperNode", exact="t"))),
            "items/0/spec/members/0",
            "'t' is not in this text",
        ),
        (
            listed(hypernode("s", 1, member("HyperNode", exact="t")), hypernode("t", 1)),
            "items/0/spec/members/0",
            "HyperNode 't' is part of 's', so its tier 1 has to be less than 1",
        ),
        (
            listed(*(hypernode(a, 2, member("HyperNode", exact=b)) for a, b in ("st", "tu", "us"))),
            "items/1",
            "HyperNodes are part of each other: 't' in 's' in 'u' in 't'",
        ),
        (
            listed(*(hypernode(name, 2, member("HyperNode", exact="t")) for name in "su"), hypernode("t", 1)),
            "items/1/spec/members/0",
            "HyperNode 't' is part of two, 's' and 'u'",
        ),
        (
            listed(hypernode("s", 1, INSIDE), hypernode("t", 1, INSIDE)),
            "items/1/spec/members/0",
            "node 'n' is in two HyperNodes, 's' and 't'",
        ),
    ],
)
def test_bad_texts(text: str, pointer: str, detail: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_hypernodes(text)
    (fault,) = caught.value.faults
    assert fault.pointer.split(", line ")[0] == pointer
    assert detail in fault.detail
