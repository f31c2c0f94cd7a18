"""Options of requests against the schemas, the command line and the form that take their words from them."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from penstock.schemas.api.fits import FitsRequest
from penstock.schemas.api.jobs import RunRequest
from penstock.schemas.api.placement import PlacementRequest
from penstock.schemas.api.topology_import import TopologyImport
from penstock.schemas.options.fits import FITS_OPTIONS
from penstock.schemas.options.importing import IMPORT_OPTIONS
from penstock.schemas.options.option import PANELS, Option, put
from penstock.schemas.options.placing import PLACE_OPTIONS
from penstock.schemas.options.planning import PLAN_OPTIONS
from penstock.schemas.options.running import RUN_OPTIONS
from penstock.schemas.request import PlanRequest

pytestmark = pytest.mark.tier("quick")

OF_FIELDS = {name: option for name, option in PLAN_OPTIONS.items() if option.pointer}


OTHERS: dict[type[BaseModel], dict[str, Option]] = {
    model: {name: option for name, option in options.items() if option.pointer}
    for model, options in (
        (PlacementRequest, PLACE_OPTIONS),
        (RunRequest, RUN_OPTIONS),
        (TopologyImport, IMPORT_OPTIONS),
    )
}
"""Options of other requests that set a field, by the request."""


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in a type, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for each in get_args(annotation) for model in _models(each)]


def _field(model: type[BaseModel], pointer: str) -> Any:
    *way, last = [step for step in pointer.split("/")[1:] if not step.isdigit()]
    for step in way:
        (model,) = _models(model.model_fields[step].annotation)
    return model.model_fields[last]


def _literals(annotation: Any) -> set[str]:
    """Return the texts that a type allows, at any depth."""
    if isinstance(annotation, str):
        return {annotation}
    return set().union(*(_literals(each) for each in get_args(annotation)))


@pytest.mark.parametrize("name", OF_FIELDS)
def test_an_option_of_planning_describes_its_field(name: str) -> None:
    option = OF_FIELDS[name]
    field = _field(PlanRequest, option.pointer)
    if name not in ("degrees", "options", "pins"):  # which are written otherwise in a text than in a document
        assert field.description.startswith(option.help)
    if option.values:
        assert set(option.values) == _literals(field.annotation)


@pytest.mark.parametrize("name", FITS_OPTIONS)
def test_an_option_of_fits_describes_its_field(name: str) -> None:
    field = FitsRequest.model_fields[name]
    assert field.description == FITS_OPTIONS[name].description
    if FITS_OPTIONS[name].values and name != "recompute":
        assert set(FITS_OPTIONS[name].values) == _literals(field.annotation)


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, options in OTHERS.items() for name in options])
def test_an_option_describes_its_field(model: type[BaseModel], name: str) -> None:
    option = OTHERS[model][name]
    field = _field(model, option.pointer)
    assert option.description in (field.description, field.description.split(", and the answer")[0])
    if option.kind == "choice" and name != "resume":
        assert set(option.values) == _literals(field.annotation)
    if option.default.isdigit() or option.default in option.values:
        assert option.default == str(field.default)


@pytest.mark.parametrize("name", OF_FIELDS)
def test_a_default_is_the_schemas(name: str) -> None:
    option, field = OF_FIELDS[name], _field(PlanRequest, OF_FIELDS[name].pointer)
    if option.values and isinstance(field.default, str):
        assert re.split(r"[, ]", option.default)[0] in (field.default, "fp32")  # gradients: by the trainer


@pytest.mark.parametrize("option", [each for options in (PLAN_OPTIONS, FITS_OPTIONS) for each in options.values()])
def test_words_can_be_put_together(option: Option) -> None:
    assert option.help[0].islower() or option.help.startswith(("GPUs", "Megatron"))
    assert not option.help.endswith(".")
    assert not option.default.endswith(".")
    assert option.panel in (*PANELS, "Output")


def test_a_field_is_put_at_its_place_and_taken_away() -> None:
    request: dict[str, Any] = {}
    put(request, "/memory/optimizer", "sgd")
    put(request, "/planner", "dapple")
    put(request, "/planner", None)
    assert request == {"memory": {"optimizer": "sgd"}}
