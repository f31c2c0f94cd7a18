"""topograph's graph."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_samples import graph, instance

from penstock.importers.cluster.kubernetes.topograph import read_topograph
from penstock.schemas.errors import InvalidDocument


def test_layers_are_closest_first() -> None:
    facts = read_topograph(graph(instance("a", "l0", "s"), instance("b", "l1", "s"), instance("c", "s"), {"id": "d"}))
    assert list(facts.nodes) == ["a", "b", "c", "d"]
    assert facts.nodes["a"].devices is None
    assert {one.name: (one.tier, one.switches + one.nodes) for one in facts.switches} == {
        "s": (1, ("l0", "l1", "c")),
        "l0": (0, ("a",)),
        "l1": (0, ("b",)),
    }
    assert str(facts.nodes["b"].place) == "graph.json, instances/1"


@pytest.mark.parametrize(
    "fields",
    [
        {"labels": {"accelerator.topograph.run/domain": "nvl"}},
        {"labels": {"nvidia.com/gpu.clique": "nvl"}},
        {"attributes": {"nvlink": "nvl", "gpus": []}},
        {"nvlink_domain": "nvl"},
    ],
)
def test_nvlink_domains_of_all_releases(fields: dict[str, Any]) -> None:
    facts = read_topograph(graph(instance("a", "l", **fields), instance("b", "l", **fields), instance("c", "l")))
    (domain,) = (one for one in facts.switches if one.is_nvlink)
    assert (domain.name, domain.nodes) == ("nvl", ("a", "b"))


def test_a_domain_that_is_called_as_a_switch_keeps_a_name_of_its_own() -> None:
    facts = read_topograph(graph(instance("a", "x", nvlink_domain="x")))
    assert [one.name for one in facts.switches] == ["x", "nvlink domain=x"]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("{}", {"the whole text": "it has to be one object with a list of `instances`"}),
        ('{"instances": {}}', {"the whole text": "it has to be one object"}),
        ('{"instances": []}', {"instances": "there is no instance in it"}),
        ('{"instances": [\n{"id": ', {"line 2, column 8": "is the text cut off?"}),
        (
            graph(instance("a"), instance("a"), {"network_layers": "l"}, 3, instance("b c")),
            {
                "instances/1": "the instance 'a' stands already at instances/0",
                "instances/2/id": "it is missing",
                "instances/2/network_layers": "it has to be a list; it is 'l'",
                "instances/3": "it has to be an object; it is 3",
                "instances/4/id": "it has to be a name",
            },
        ),
        (
            graph(instance("a", "l", "l")),
            {"instances/0/network_layers": "a switch stands above itself: a under l under l"},
        ),
        (
            graph(instance("a", "l", "s"), instance("b", "l", "t")),
            {"instances/0/network_layers": "the switch 'l' stands under s and t; it has one parent"},
        ),
    ],
)
def test_bad_texts(text: str, faults: dict[str, str]) -> None:
    with pytest.raises(InvalidDocument) as caught:
        read_topograph(text)
    details = {fault.pointer.split(", line ")[0]: fault.detail for fault in caught.value.faults}
    assert details.keys() == faults.keys()
    assert all(wanted in details[pointer] for pointer, wanted in faults.items())
