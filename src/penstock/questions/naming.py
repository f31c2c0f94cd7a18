"""Names of shipped models and clusters in requests: ``model`` in place of ``profile``, ``cluster`` of ``topology``.

Beside the name of a mixture of experts, ``routing_imbalance`` or ``capacity_factor`` says how tokens are routed.
``over.clusters`` of a sweep adds to ``over.topologies``. Requests are kept, hashed and answered with the documents that
the names denote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast, get_args

from pydantic import BaseModel

from penstock.examples import catalogue
from penstock.schemas.api.sweep import SweepRequest
from penstock.schemas.document import Document
from penstock.schemas.errors import Fault, InvalidDocument, PenstockError
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.shape import Experts, TransformerShape

D = TypeVar("D", bound=Document)


class Name(NamedTuple):
    """A field that may hold the name of a shipped document in place of the document itself."""

    field: str
    kind: type[BaseModel]
    find: Callable[[str], BaseModel]
    is_routed: bool = False
    """Whether ``ROUTED`` may stand beside it."""


NAMES: dict[str, tuple[Name, ...]] = {
    "model": (
        Name("shape", TransformerShape, catalogue.shape),
        Name("profile", ModelProfile, catalogue.profile, is_routed=True),
    ),
    "cluster": (Name("topology", ClusterTopology, catalogue.cluster),),
}
"""The names, each with the fields of documents that it may replace."""
ROUTED = ("routing_imbalance", "capacity_factor")
"""Fields beside the name of a mixture of experts, which change its profile."""
EXAMPLES = {"model": ["gpt2-small", "llama-3-8b"], "cluster": ["2x8xH100", "16xA100"]}
WHOLE = (ModelProfile, ClusterTopology, PlanFile)
"""Documents inside of which there are no names: they are what names denote, and plans of stored requests."""


def _kinds(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _kinds(each)


@cache
def names_of(model: type[BaseModel]) -> dict[str, tuple[Name, ...]]:
    """Return the names that a document takes, each with the fields that it may replace, the first ones preferred."""
    fields = model.model_fields
    takes = {
        name: tuple(one for one in several if one.field in fields and one.kind in _kinds(fields[one.field].annotation))
        for name, several in NAMES.items()
    }
    return {name: several for name, several in takes.items() if several}


@cache
def parts_with_names(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the fields of a document whose parts take names, with the types of these parts."""
    if model in WHOLE:
        return {}
    return {
        field: kind
        for field, info in model.model_fields.items()
        for kind in _kinds(info.annotation)
        if kind is not model and kind not in WHOLE and (names_of(kind) or parts_with_names(kind))
    }


def takes_names(model: type[BaseModel]) -> bool:
    """Return whether a document takes names, itself or inside."""
    return bool(names_of(model) or parts_with_names(model))


def document_of(
    model: type[D], data: Any, parse: Callable[[Any], D], stored: Callable[[D], D] = lambda document: document
) -> D:
    """Return the request of type ``model`` in ``data``, with documents in place of names.

    A plan request with names is a question, not a document: as in commands and forms, degrees and effort that it does
    not state are ours to choose. ``stored`` puts stored documents in place of the hashes that may stand beside names.

    Raises InvalidDocument for data that ``parse`` refuses, with the names that may be sent; otherwise as
    ``with_documents``, ``with_open_degrees`` and ``stored``.
    """
    has_names = any(
        kind is PlanRequest and place.keys() & names_of(kind).keys() for kind, place, _ in _places(model, data)
    )
    data = with_documents(model, data)
    try:
        document = parse(data)
    except InvalidDocument as refused:
        raise with_ways(model, refused) from None
    if not has_names:
        return document
    from penstock.planning.inputs import with_choices

    question: Any = stored(document)
    if isinstance(question, PlanRequest):
        question = with_choices(question)
    else:
        many = isinstance(question, SweepRequest) and not question.over.planners
        question = question.model_copy(update={"request": with_choices(question.request, many=many)})
    return cast(D, question)


def with_documents(model: type[BaseModel], data: Any) -> Any:
    """Return ``data`` with documents in place of names, where a request of type ``model`` takes them.

    Raises InvalidDocument with a fault for each unknown name, and where both name and document are given.
    """
    faults: list[Fault] = []
    for kind, place, pointer in _places(model, data):
        takes = names_of(kind)
        for name in (name for name in takes if name in place):
            _put_document(place, name, takes[name], pointer, faults)
    if model is SweepRequest and isinstance(data, dict) and isinstance(over := data.get("over"), dict):
        names = over.pop("clusters", [])
        names = names if isinstance(names, list) else [names]
        clusters = [_document_of(catalogue.cluster, one, f"/over/clusters/{i}", faults) for i, one in enumerate(names)]
        if clusters:
            topologies = over.get("topologies", [])
            over["topologies"] = [*(topologies if isinstance(topologies, list) else [topologies]), *clusters]
    if faults:
        raise InvalidDocument("; ".join(fault.detail for fault in faults), faults=tuple(faults))
    return data


def _put_document(place: dict[str, Any], name: str, several: Sequence[Name], pointer: str, faults: list[Fault]) -> None:
    """Put the document that a name denotes into the first field that may hold it, or add the faults of the last."""
    denoted = place.pop(name)
    if (both := next((one.field for one in several if one.field in place), None)) is not None:
        faults.append(Fault(f"{pointer}/{name}", f"give either {name!r} or {both!r}, not both", "given-twice"))
        return
    for field, _kind, find, is_routed in several:
        if is_routed:
            routing = {one: value for one in ROUTED if (value := place.pop(one, None)) is not None}
            find = partial(_routed, routing) if routing else find
        wrong: list[Fault] = []
        if (document := _document_of(find, denoted, f"{pointer}/{name}", wrong)) is not None:
            place[field] = document
            return
    faults += wrong


def with_ways(model: type[BaseModel], refused: InvalidDocument) -> InvalidDocument:
    """Return a refusal; where a request takes names, its faults say all that may be sent for a missing document."""
    if not takes_names(model):
        return refused
    ways = {
        one.field: f"; send the {one.field} as a document, the hash of a stored one, or as {name!r} the name of a "
        f"shipped {name}, such as {EXAMPLES[name][0]}"
        for name in NAMES
        for one in NAMES[name][-1:]
    }
    faults = [
        replace(fault, detail=fault.detail + ways.get(fault.pointer.rpartition("/")[2], ""))
        if fault.code == "missing"
        else fault
        for fault in refused.faults
    ]
    return type(refused)(refused.detail, faults=tuple(faults), remedy=refused.remedy)


def describe_names(schemas: dict[str, Any], models: Iterable[type[BaseModel]]) -> None:
    """Add the fields that take names to the schemas of an OpenAPI document, which describe the models."""
    described: dict[str, type[BaseModel]] = {}
    waiting = list(models)
    while waiting:
        model = waiting.pop()
        if model.__name__ not in described and takes_names(model):
            described[model.__name__] = model
            waiting += parts_with_names(model).values()
    for schema_name, model in described.items():
        for name, several in names_of(model).items():
            _describe(schemas[schema_name], model, name, several)
    words = "shipped clusters by name, in addition to `topologies`"
    schemas["Axes"]["properties"]["clusters"] = {"type": "array", "items": {"type": "string"}, "description": words}


def _describe(schema: dict[str, Any], model: type[BaseModel], name: str, several: Sequence[Name]) -> None:
    """Add a name, and what may stand beside it, to the schema of a document."""
    one = several[-1]
    words = f"a shipped {name} by name, in place of {' or '.join(f'`{each.field}`' for each in several)}"
    schema["properties"][name] = {"type": "string", "description": words, "examples": EXAMPLES[name]}
    for beside in ROUTED if one.is_routed and len(several) == 1 else ():
        experts = Experts.model_json_schema()["properties"][beside]["description"]
        words = f"of a mixture of experts by name: {experts}"
        schema["properties"][beside] = {"type": ["number", "null"], "exclusiveMinimum": 0, "description": words}
    schema["required"] = [field for field in schema["required"] if field != one.field]
    if model.model_fields[one.field].is_required() or one.field == "shape":
        fields = (one.field, name, *(["hugging_face"] if one.field == "shape" else []))
        schema.setdefault("allOf", []).append({"oneOf": [{"required": [field]} for field in fields]})


def _places(model: type[BaseModel], data: Any, pointer: str = "") -> Iterator[tuple[type[BaseModel], Any, str]]:
    """Yield the objects that may have names, each with its type and its pointer."""
    if not isinstance(data, dict):
        return
    if names_of(model):
        yield model, data, pointer
    for field, kind in parts_with_names(model).items():
        inner = data.get(field)
        if isinstance(inner, list):
            for number, each in enumerate(inner):
                yield from _places(kind, each, f"{pointer}/{field}/{number}")
        else:
            yield from _places(kind, inner, f"{pointer}/{field}")


def _routed(routing: dict[str, Any], name: str) -> ModelProfile:
    """Return the profile of a mixture of experts with routed tokens. Raises PenstockError for what is impossible."""
    from penstock.planning.inputs import find_profile
    from penstock.shapes.routing import Routing

    return find_profile(catalogue.known_profile(name), routing=Routing(**routing))


def _document_of(find: Callable[[str], BaseModel], name: Any, pointer: str, faults: list[Fault]) -> BaseModel | None:
    """Return the document of a name; otherwise add a fault, at the name or at the field beside it, and return None."""
    if not isinstance(name, str):
        faults.append(Fault(pointer, f"{pointer} is a name, not {name!r:.100}", "not-a-name"))
        return None
    try:
        return find(name)
    except PenstockError as error:
        words = "; ".join(filter(None, (error.detail, error.remedy)))
        if about := [fault for fault in error.faults if fault.pointer[1:] in ROUTED]:
            parent = pointer.rpartition("/")[0]
            faults += [Fault(parent + fault.pointer, words, "routing") for fault in about]
        else:
            faults.append(Fault(pointer, words, "unknown-name"))
        return None
