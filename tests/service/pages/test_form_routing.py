"""Tests of token routing to the experts of a model by name, as the form takes it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.examples import catalogue
from penstock.planning.inputs import find_profile
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.profile import ModelProfile
from penstock.service.pages.form import FIRST, Faults, request_of
from penstock.service.pages.sources import Sources
from penstock.shapes.routing import Routing

pytestmark = pytest.mark.tier("quick")


class Shipped:
    """Sources without a store: what is shipped, by name, and one stored profile."""

    profile = staticmethod(lambda name: catalogue.profile("gpt2-small" if name.startswith("sha256:") else name))
    topology = staticmethod(catalogue.cluster)


SOURCES = cast(Sources, Shipped())


def _values(**fields: str) -> dict[str, list[str]]:
    return (
        FIRST | {"model": ["mixtral-8x7b"], "cluster": ["2x8xH100"]} | {name: [text] for name, text in fields.items()}
    )


@pytest.mark.tier("nightly")
def test_routing_is_that_of_the_models_profile():
    assert request_of(SOURCES, _values()).profile == catalogue.profile("mixtral-8x7b")
    request = request_of(SOURCES, _values(routing_imbalance="1.5", capacity_factor=" "))
    assert request.profile == find_profile("mixtral-8x7b", routing=Routing(routing_imbalance=1.5))
    assert isinstance(request.profile, ModelProfile)
    assert any("the busiest GPU's experts get 1.5 times the mean" in each for each in request.profile.assumptions)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"routing_imbalance": "much"}, "routing_imbalance", "a number such as 1.2, not 'much'"),
        ({"routing_imbalance": "nan"}, "routing_imbalance", "nan is not possible"),
        ({"capacity_factor": "0"}, "capacity_factor", "0 is not possible"),
        ({"capacity_factor": "1", "model": "llama-3-8b"}, "capacity_factor", "llama-3-8b has no experts"),
        ({"capacity_factor": "1", "model": "sha256:1"}, "capacity_factor", "has fixed costs"),
        ({"capacity_factor": "1", "model": "/etc/hostname"}, "model", "no model '/etc/hostname'"),
    ],
)
def test_what_is_wrong_is_said_at_its_field(fields: dict[str, Any], field: str, words: str):
    with pytest.raises(InvalidDocument) as caught:
        request_of(SOURCES, _values(**fields))
    faults = Faults.of(caught.value, "auto")
    assert list(faults.fields) == [field]
    assert words in faults.fields[field][0]
