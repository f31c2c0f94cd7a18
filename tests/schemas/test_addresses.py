"""Addresses of stored documents stay what they are: a new field changes none that leaves it out.

To add a document, run ``python tests/schemas/test_addresses.py``; an address that is there already is kept. Where the
figures of a shipped document change, take its address out first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.examples import catalogue
from penstock.examples.tiny import tiny_plan_file, tiny_request
from penstock.schemas.document import Document
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology

ADDRESSES = Path(__file__).with_name("addresses.json")


def stored() -> Iterator[tuple[str, Document]]:
    """Yield shipped profiles and clusters, a form of cluster, and a request and a plan with every field."""
    for name in catalogue.model_names():
        yield f"profile {name}", catalogue.profile(name)
    for name in (*catalogue.cluster_names(), "2x4xV100", "8x8xH100"):
        cluster = catalogue.cluster(name)
        for words, topology in ((f"topology {name}", cluster), (f"topology {name}, written out", cluster.expanded())):
            before = without_lanes(topology)
            yield words, before
            if topology != before:
                yield f"{words}, with lanes", topology
    yield "request", PlanRequest.parse(tiny_request())
    file = PlanFile.parse(tiny_plan_file())
    yield "plan", file.plan
    yield "plan file", file


def without_lanes(topology: ClusterTopology) -> ClusterTopology:
    """Return the topology as it was written before links had lanes."""
    links = tuple(link.model_copy(update={"lanes": None}) for link in topology.links)
    uniform = topology.uniform
    if uniform is not None and uniform.nic is not None:
        uniform = uniform.model_copy(update={"nic": uniform.nic.model_copy(update={"lanes": None})})
    return topology.model_copy(update={"links": links, "uniform": uniform})


def addresses() -> dict[str, str]:
    """Return the address of each document."""
    return {name: document.content_hash() for name, document in stored()}


def test_addresses_are_what_they_were() -> None:
    expected = json.loads(ADDRESSES.read_text())
    now = addresses()
    assert {name: now.get(name) for name in expected} == expected
    assert set(now) == set(expected), "run this file to add the new ones"


if __name__ == "__main__":
    expected = json.loads(ADDRESSES.read_text()) if ADDRESSES.exists() else {}
    ADDRESSES.write_text(json.dumps(addresses() | expected, indent=1) + "\n")
    sys.stdout.write(f"{ADDRESSES.name} has {len(addresses() | expected)} addresses\n")
