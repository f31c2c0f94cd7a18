"""Addresses of stored documents stay what they are: a new field changes none that leaves it out.

``addresses.json`` was written before profiles, requests and plans knew of degrees of parallelism. To add a document,
run ``python tests/schemas/test_addresses.py``; an address that is there already is never changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.examples import catalogue
from penstock.schemas.document import Document
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.service.http.samples import tiny_plan_file, tiny_request

ADDRESSES = Path(__file__).with_name("addresses.json")


def stored() -> Iterator[tuple[str, Document]]:
    """Shipped profiles and clusters, a form of cluster, and a request and a plan of every field that they have."""
    for name in catalogue.model_names():
        yield f"profile {name}", catalogue.profile(name)
    for name in (*catalogue.cluster_names(), "2x4xV100", "8x8xH100"):
        yield f"topology {name}", catalogue.cluster(name)
        yield f"topology {name}, written out", catalogue.cluster(name).expanded()
    yield "request", PlanRequest.parse(tiny_request())
    file = PlanFile.parse(tiny_plan_file())
    yield "plan", file.plan
    yield "plan file", file


def found() -> dict[str, str]:
    """The address of each."""
    return {name: document.content_hash() for name, document in stored()}


def test_addresses_are_what_they_were() -> None:
    known = json.loads(ADDRESSES.read_text())
    now = found()
    assert {name: now.get(name) for name in known} == known
    assert set(now) == set(known), "run this file to add the new ones"


if __name__ == "__main__":
    known = json.loads(ADDRESSES.read_text()) if ADDRESSES.exists() else {}
    ADDRESSES.write_text(json.dumps(found() | known, indent=1) + "\n")
    sys.stdout.write(f"{ADDRESSES.name} has {len(found() | known)} addresses\n")
