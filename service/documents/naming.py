"""Names of shipped models and clusters in requests: ``model`` in place of ``profile``, ``cluster`` of ``topology``.

Beside the name of a mixture of experts, ``routing_imbalance`` or ``capacity_factor`` says how tokens are routed.
``over.clusters`` of a sweep adds to ``over.topologies``. Requests are kept, hashed and answered with the documents that
the names denote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel

from penstock.examples import catalogue
from penstock.schemas.api.fits import FitsRequest
from penstock.schemas.api.layouts import LayoutRequest
from penstock.schemas.api.placement import PlacementRequest
from penstock.schemas.api.sweep import SweepRequest
from penstock.schemas.errors import Fault, InvalidDocument, PenstockError
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import LIMITS, PlanRequest
from penstock.schemas.transformers.shape import Experts

Names = dict[str, tuple[str, Callable[[str], BaseModel]]]
NAMES: Names = {"model": ("profile", catalogue.profile), "cluster": ("topology", catalogue.cluster)}
"""The field that may hold a name, with the field of the document and what finds that."""
ROUTED = ("routing_imbalance", "capacity_factor")
"""Fields next to the name of a mixture of experts, of whose profile they are."""
NAMES_OF_FITS: Names = {**NAMES, "model": ("shape", catalogue.shape)}
"""The same where the question is about a transformer's shape."""

EXAMPLES = {"model": ["gpt2-small", "llama-3-8b"], "cluster": ["2x8xH100", "16xA100"]}

NAMING = (PlanRequest, PlacementRequest, FitsRequest, SweepRequest, LayoutRequest)
"""Requests that take names, themselves or inside."""
DESCRIBED = {
    "PlanRequest": ("model", "cluster"),
    "PlacementJob": ("model",),
    "PlacementRequest": ("cluster",),
    "FitsRequest": ("model", "cluster"),
}
"""Schemas of the OpenAPI document that take names, with the fields."""


def with_documents(model: type[BaseModel], data: Any) -> Any:
    """Return ``data`` with documents in place of names, where a request of type ``model`` takes them.

    One for plans that has names is a question, not a document: where it does not say when to stop, its effort is that
    of commands and forms.
    Raises InvalidDocument with a fault for each unknown name, and where both name and document are given.
    """
    faults: list[Fault] = []
    names_of = NAMES_OF_FITS if model is FitsRequest else NAMES
    for place, pointer in _places(model, data):
        if model in (PlanRequest, SweepRequest) and place.keys() & names_of.keys():
            _end_by_itself(place)
        for name, (field, find) in names_of.items():
            if name not in place:
                continue
            given = place.pop(name)
            if name == "model" and names_of is NAMES:
                routing = {one: value for one in ROUTED if (value := place.pop(one, None)) is not None}
                find = partial(_routed, routing) if routing else find
            if field in place:
                faults.append(Fault(f"{pointer}/{name}", f"give either {name!r} or {field!r}, not both", "given-twice"))
            elif (document := _found(find, given, f"{pointer}/{name}", faults)) is not None:
                place[field] = document
    if model is SweepRequest and isinstance(data, dict) and isinstance(over := data.get("over"), dict):
        names = over.pop("clusters", [])
        names = names if isinstance(names, list) else [names]
        found = [_found(catalogue.cluster, one, f"/over/clusters/{i}", faults) for i, one in enumerate(names)]
        if found:
            given = over.get("topologies", [])
            over["topologies"] = [*(given if isinstance(given, list) else [given]), *found]
    if faults:
        raise InvalidDocument("; ".join(fault.detail for fault in faults), faults=tuple(faults))
    return data


def with_ways(refused: InvalidDocument) -> InvalidDocument:
    """Return the refusal of a request that may have names, whose faults say all that may be sent where a document is
    missing."""
    ways = {
        field: f"; send the {field} as a document, the hash of a stored one, or as {name!r} the name of a shipped "
        f"{name}, such as {EXAMPLES[name][0]}"
        for name, (field, _find) in NAMES.items()
    }
    faults = [
        replace(fault, detail=fault.detail + ways.get(fault.pointer.rpartition("/")[2], ""))
        if fault.code == "missing"
        else fault
        for fault in refused.faults
    ]
    return type(refused)(refused.detail, faults=tuple(faults), remedy=refused.remedy)


def describe_names(schemas: dict[str, Any]) -> None:
    """Add the fields that take names to the schemas of an OpenAPI document."""
    for schema_name, names in DESCRIBED.items():
        schema = schemas[schema_name]
        for name in names:
            field = (NAMES_OF_FITS if schema_name == "FitsRequest" else NAMES)[name][0]
            words = f"a shipped {name} by name, in place of `{field}`"
            schema["properties"][name] = {"type": "string", "description": words, "examples": EXAMPLES[name]}
            if name == "model" and field == "profile":
                for one in ROUTED:
                    experts = Experts.model_json_schema()["properties"][one]["description"]
                    words = f"of a mixture of experts by name: {experts}"
                    schema["properties"][one] = {"type": "number", "exclusiveMinimum": 0, "description": words}
            schema["required"] = [one for one in schema["required"] if one != field]
            fields = (field, name, *(["hugging_face"] if field == "shape" else []))
            schema.setdefault("allOf", []).append({"oneOf": [{"required": [one]} for one in fields]})
    words = "shipped clusters by name, in addition to `topologies`"
    schemas["Axes"]["properties"]["clusters"] = {"type": "array", "items": {"type": "string"}, "description": words}


def _end_by_itself(request: dict[str, Any]) -> None:
    limits = request.get("termination", {})
    if isinstance(limits, dict) and all(limits.get(name) is None for name in LIMITS):
        request["termination"] = {**limits, "effort": "normal"}


def _places(model: type[BaseModel], data: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where names may be, with their pointers."""
    if not isinstance(data, dict):
        return
    if model in (PlanRequest, PlacementRequest, FitsRequest):
        yield data, ""
    if model in (SweepRequest, LayoutRequest) and isinstance(inner := data.get("request"), dict):
        yield inner, "/request"
    if model is PlacementRequest and isinstance(jobs := data.get("jobs"), list):
        yield from ((job, f"/jobs/{number}") for number, job in enumerate(jobs) if isinstance(job, dict))


def _routed(routing: dict[str, Any], name: str) -> ModelProfile:
    """The profile of a mixture of experts, with its tokens routed so. Raises PenstockError for what is impossible."""
    from penstock.planning.documents import find_profile
    from penstock.shapes.routing import Routing

    return find_profile(catalogue.known_profile(name), routing=Routing(**routing))


def _found(find: Callable[[str], BaseModel], name: Any, pointer: str, faults: list[Fault]) -> BaseModel | None:
    """The document of a name; what is wrong is added to ``faults``, at the field next to the name that it is about."""
    if not isinstance(name, str):
        faults.append(Fault(pointer, f"{pointer} is a name, not {name!r:.100}", "not-a-name"))
        return None
    try:
        return find(name)
    except PenstockError as error:
        if about := [fault for fault in error.faults if fault.pointer[1:] in ROUTED]:
            parent = pointer.rpartition("/")[0]
            remedy = f"; {error.remedy}" if error.remedy else ""
            faults += [Fault(parent + fault.pointer, f"{error.detail}{remedy}", "routing") for fault in about]
        else:
            nearest = f"; the nearest: {error.remedy}" if error.remedy else ""
            faults.append(Fault(pointer, f"{error.detail}{nearest}", "unknown-name"))
        return None
