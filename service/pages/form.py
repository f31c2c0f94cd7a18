"""The form that asks for a plan: its fields, what they hold at first, and the request that they make.

A form's values are lists of texts by the name of their field, as a browser sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from penstock.examples import catalogue
from penstock.examples.tiny import tiny_profile, tiny_topology
from penstock.planning.inputs import find_profile
from penstock.questions.naming import ROUTED
from penstock.schemas.api.jobs import PlannerOut
from penstock.schemas.api.sweep import Axes
from penstock.schemas.document import Document, load_json
from penstock.schemas.errors import Fault, InvalidDocument, NotFound, PenstockError
from penstock.schemas.options.option import PANELS, Option, put
from penstock.schemas.options.planning import PLAN_OPTIONS
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Degrees
from penstock.schemas.transformers.shape import MOST
from penstock.service.jobs import judging
from penstock.service.pages.sources import Sources
from penstock.shapes.routing import Routing

D = TypeVar("D", bound=Document)
F = TypeVar("F")
Values = dict[str, list[str]]

AGENTS = "agents"
"""Stands for the devices of the agents that are alive, where a cluster is named."""

FIRST: Values = {
    "model": ["gpt2-small"],
    "cluster": ["2x4xV100"],
    "global_batch_size": ["64"],
    "planner": ["auto"],
    "schedule": ["auto"],
    "update_rules": ["synchronous"],
    "effort": ["normal"],
}
EXAMPLES = (
    ("GPT-2 small on 8 V100", "model=gpt2-small&cluster=2x4xV100&global_batch_size=64"),
    ("BERT large on 32 A100", "model=bert-large&cluster=4x8xA100&global_batch_size=256"),
    ("Llama 3 70B on 64 H100", "model=llama-3-70b&cluster=8x8xH100&global_batch_size=1024"),
    ("ResNet-50 on 8 GTX 1080 Ti", "model=resnet-50&cluster=spp-testbed-1&global_batch_size=256"),
    ("a profile and a cluster as JSON", "example=tiny"),
)
CLUSTER_FORMS = ("1x4xV100", "2x4xV100", "1x8xA100", "4x8xA100", "1x8xH100", "8x8xH100", "16x8xH100")


class _Field(NamedTuple):
    name: str
    pointer: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str


def _whole(text: str) -> Any:
    return int(text) if text.isdecimal() and len(text) < 20 else text


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _sizes(text: str) -> Any:
    return [_whole(part) for part in text.replace(",", " ").split()]


def _degrees(text: str) -> Any:
    """Read tensor degrees or choices of degrees: ``8``, ``1, 2, 4``, ``tensor=2 expert=8; tensor=4 expert=8``."""
    if "=" not in text:
        return text if text == "auto" else [{"tensor": each} for each in _sizes(text)]
    parts = [choice.replace(",", " ").split() for choice in text.split(";")]
    pairs = [[part.partition("=") for part in choice] for choice in parts]
    return [{name.replace("-", "_"): _whole(value) for name, _equals, value in choice} for choice in pairs]


def _typed_degrees(degrees: Any) -> str:
    """Write degrees as people type them."""
    if isinstance(degrees, str):
        return degrees
    several = [Degrees.model_validate(each) for each in (degrees if isinstance(degrees, list) else [degrees])]
    if all(each == Degrees(tensor=each.tensor) for each in several):
        return ", ".join(str(each.tensor) for each in several)
    above = [{name: value for name, value in each.model_dump().items() if value > 1} for each in several]
    return "; ".join(" ".join(f"{name}={value}" for name, value in (each or {"tensor": 1}).items()) for each in above)


def _values(text: str) -> Any:
    """Return values of further axes: ``optimizer=adam,sgd; clock=fast``."""
    pairs = (part.partition("=") for part in text.split(";") if part.strip())
    return {
        name.strip(): [each.strip() for each in values.split(",") if each.strip()] for name, _equals, values in pairs
    }


def _typed_values(choose: Any) -> str:
    """Write values of further axes as people type them."""
    listed = ((name, [each] if isinstance(each, str) else each) for name, each in choose.items())
    return "; ".join(f"{name}={','.join(values)}" for name, values in listed)


def _seconds(limit_ns: int) -> str:
    return f"{limit_ns / 10**9:g} s"


def _unit(text: str) -> Any:
    """Read a duration; a number without a unit is a number of seconds."""
    return f"{text} s" if text.replace(".", "", 1).isdecimal() else text


def _memory(text: str) -> Any:
    return _whole(text) if text.isdecimal() else text


_READ: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    "whole": (_whole, str),
    "number": (_number, str),
    "sizes": (_sizes, lambda sizes: ", ".join(map(str, sizes))),
    "duration": (_unit, _seconds),
    "bytes": (_memory, str),
    "degrees": (_degrees, _typed_degrees),
    "choose": (_values, _typed_values),
}
"""The reader and the writer of a field's text, by its name or its kind; any other text stays."""
FIELDS = tuple(
    _Field(name, option.pointer, *_READ.get(name, _READ.get(option.kind, (str, str))))
    for name, option in PLAN_OPTIONS.items()
    if option.label and option.pointer and option.kind != "choices"
)
OF_PROFILE = {name: one for name, one in PLAN_OPTIONS.items() if one.label and not one.pointer}
"""Fields that say how the profile of a transformer is computed."""
COMPARED = ("planners", "schedules", "clusters", "batches", "each_rule")
"""Fields of a comparison, folded away while they are empty."""
_AXES = {
    "topologies": "/clusters",
    "global_batch_sizes": "/batches",
    "planners": "/planners",
    "schedules": "/schedules",
    "update_rules": "/update_rules",
}
_HOMES = {"/profile": "profile_text", "/topology": "topology_text", "/update_rules": "update_rules"}


@dataclass
class Faults:
    """The faults of a form: of the whole, and by field."""

    general: str = ""
    remedy: str = ""
    fields: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, error: PenstockError, planner: str) -> Faults:
        """Return an error as it is shown: each fault at its field, the others above the form."""
        shown = cls(remedy=error.remedy or "")
        elsewhere = []
        for fault in error.faults:
            name = _home(fault.pointer, planner)
            if name is None:
                elsewhere.append(f"{fault.pointer}: {fault.detail}")
            else:
                shown.fields.setdefault(name, []).append(_within(fault, name))
        if elsewhere or not error.faults:
            shown.general = "; ".join([error.detail, *elsewhere])
        return shown


def first_values(sources: Sources, query: Values) -> Values:
    """Return the values of the form when it is opened: from the address, from a plan or job, or the first values.

    Raises NotFound for an unknown id.
    """
    values = dict(FIRST)
    if query.get("example") == ["tiny"]:
        values |= {"model": [""], "cluster": [""], "global_batch_size": ["16"]}
        values |= {"profile_text": [_pretty(ModelProfile.parse(tiny_profile()))]}
        values |= {"topology_text": [_pretty(ClusterTopology.parse(tiny_topology()))]}
    if "from" in query:
        values |= _values_of(sources, sources.request_of(query["from"][0])) | {"from": query["from"][:1]}
    return values | {name: texts for name, texts in query.items() if name not in ("example", "from")}


def request_of(sources: Sources, values: Values) -> PlanRequest:
    """Build the request of a form; fields that the form lacks are taken from the request that it begins with.

    Raises InvalidDocument with a fault for everything that is wrong, each leading to its field, and NotFound.
    """
    data: dict[str, Any] = {}
    if base := _text(values, "from"):
        data = sources.request_of(base).model_dump(mode="json", exclude_none=True)
    faults: list[Fault] = []
    for name, text, find, stand_in in (
        ("profile", "profile_text", partial(_profile_of, sources, values), tiny_profile),
        ("topology", "topology_text", partial(_topology_of, sources, values), tiny_topology),
    ):
        if not base or {"model" if name == "profile" else "cluster", text} & values.keys():
            try:
                data[name] = find()
            except InvalidDocument as error:  # the other fields are checked anyway
                faults += error.faults
                data[name] = stand_in()
    if not base or "update_rules" in values:
        data["update_rules"] = values.get("update_rules", [])
    for entry in FIELDS:
        if entry.name in values:
            value = _text(values, entry.name)
            put(data, entry.pointer, entry.read(value) if value else None)
    if "planner" in values:
        data["options"] = dict(_options(values))
    return _parsed(data, faults)


def _parsed(data: dict[str, Any], faults: list[Fault]) -> PlanRequest:
    try:
        request = PlanRequest.parse(data, units=True)
    except InvalidDocument as error:
        raise InvalidDocument(error.detail, faults=(*faults, *error.faults), remedy=error.remedy) from None
    if faults:
        raise InvalidDocument("the request is not valid", faults=tuple(faults))
    return request


def _profile_of(sources: Sources, values: Values) -> ModelProfile:
    name = _text(values, "model")
    how = {each: _READ.get(one.kind, (str, str))[0](_text(values, each)) for each, one in OF_PROFILE.items()}
    how = {each: value for each, value in how.items() if value != ""}
    pasted = _config(values) or _document(values, "profile_text", ModelProfile)
    if pasted is None and name.startswith("sha256:"):
        pasted = _named("/model", lambda: sources.profile(name))
    if (tokens := how.get("sequence_length")) is not None and not (isinstance(tokens, int) and 0 < tokens <= MOST):
        words = f"{tokens!r} is no number of tokens"
        raise InvalidDocument(words, faults=(Fault("/sequence_length", words),))
    routing = Routing(*(how.pop(each, None) for each in ROUTED))
    shipped = pasted or _named("/model", lambda: catalogue.known_profile(name))
    model = "profile" if isinstance(pasted, dict) else "model"
    pointer = f"/{next((each for each in OF_PROFILE if _text(values, each)), model)}"
    target = _text(values, "target") or None
    return _named(pointer, lambda: find_profile(shipped, routing=routing, target=target, **how))


def _config(values: Values) -> dict[str, Any] | None:
    """Return the config.json of a Hugging Face model that was pasted in place of a profile, or None."""
    text = _text(values, "profile_text")
    if '"model_type"' not in text:  # a profile, which is parsed once
        return None
    content = _named("/profile", lambda: load_json(text, "this config.json"))
    return content if isinstance(content, dict) and "model_type" in content else None


def _topology_of(sources: Sources, values: Values) -> ClusterTopology:
    pasted = _document(values, "topology_text", ClusterTopology)
    return pasted or _named("/cluster", partial(_cluster, sources, _text(values, "cluster")))


def axes_of(sources: Sources, values: Values, request: PlanRequest) -> Axes:
    """Return the axes of the form's sweep; by default every planner. Raises NotFound for an unknown cluster."""
    planners = _names(_text(values, "planners"), [one.name for one in judging.planners()])
    schedules = _names(_text(values, "schedules"), [name for name in choices()["schedules"] if name != "auto"])
    clusters = [_named("/clusters", partial(_cluster, sources, name)) for name in _list(_text(values, "clusters"))]
    batches = _sizes(_text(values, "batches"))
    rules = request.update_rules if values.get("each_rule") else ()
    if not (planners or schedules or clusters or batches or rules):
        planners = [one.name for one in judging.planners()]
    data = {"topologies": clusters, "global_batch_sizes": batches, "planners": planners, "schedules": schedules}
    try:
        return Axes.model_validate(data | {"update_rules": rules})
    except ValidationError as error:
        faults = tuple(Fault(_AXES[str(each["loc"][0])], each["msg"]) for each in error.errors() if each["loc"])
        raise InvalidDocument("the comparison is not valid", faults=faults) from None


def choices() -> dict[str, Any]:
    """Return the choices that the form offers."""
    planners = judging.planners()
    schedules = dict.fromkeys(name for planner in planners for name in planner.schedules)
    return {
        "examples": EXAMPLES,
        "models": catalogue.profile_names(),
        "clusters": (*catalogue.cluster_names(), *CLUSTER_FORMS),
        "planners": planners,
        "schedules": tuple(schedules),
    }


def groups(values: Values, faults: Faults) -> dict[str, tuple[dict[str, Option], bool]]:
    """Return the groups of fields, each with whether it is open: where one has a fault, or is not as at first."""
    opened = {}
    for panel in PANELS:
        fields = {name: one for name, one in PLAN_OPTIONS.items() if one.panel == panel and one.label}
        texts = {
            name: [text for text in values.get(name, ()) if text] for name in fields.keys() - {"global_batch_size"}
        }
        changed = any(several != FIRST.get(name, []) for name, several in texts.items())
        opened[panel] = (fields, changed or not fields.keys().isdisjoint(faults.fields))
    return opened


def _values_of(sources: Sources, request: PlanRequest) -> Values:
    data = request.model_dump(mode="json", exclude_none=True)
    assert isinstance(request.profile, str)
    assert isinstance(request.topology, str)
    values: Values = {
        "model": [_name_of(sources.store.profile(request.profile), catalogue.profile) or request.profile],
        "cluster": [_name_of(sources.store.topology(request.topology), catalogue.cluster) or request.topology],
        "update_rules": list(request.update_rules),
    }
    for entry in FIELDS:
        content: Any = data
        for step in entry.pointer.split("/")[1:]:
            content = content.get(step) if content is not None else None
        values[entry.name] = ["" if content is None else entry.write(content)]
    return values | {f"option.{request.planner}.{name}": [_spelled(value)] for name, value in request.options.items()}


def _name_of(document: D, shipped: Callable[[str], D]) -> str | None:
    name: str = document.name  # type: ignore[attr-defined]
    try:
        return name if shipped(name) == document else None
    except (NotFound, InvalidDocument):
        return None


def _document(values: Values, name: str, kind: type[D]) -> D | None:
    if not (text := _text(values, name)):
        return None
    at = {"profile_text": "/profile", "topology_text": "/topology"}[name]
    try:
        return kind.parse(load_json(text, f"this {kind.kind}"), units=True)
    except InvalidDocument as error:
        inner = tuple(Fault(at + fault.pointer, fault.detail, fault.code) for fault in error.faults)
        raise InvalidDocument(error.detail, faults=inner or (Fault(at, error.detail),), remedy=error.remedy) from None


def _named(pointer: str, find: Callable[[], F]) -> F:
    try:
        return find()
    except PenstockError as error:
        hint = f"; try: {error.remedy}" if error.remedy else ""
        raise InvalidDocument(error.detail, faults=(Fault(pointer, error.detail + hint),)) from None


def _cluster(sources: Sources, name: str) -> ClusterTopology:
    if name != AGENTS:
        return sources.topology(name)
    topology = sources.living()
    if topology is None:
        raise NotFound("no agent is alive, so there are no devices", remedy="start `penstock agent` on a node")
    return topology


def _options(values: Values) -> Iterator[tuple[str, Any]]:
    """Yield the options of the chosen planner that differ from their defaults."""
    chosen = _text(values, "planner")
    planner: PlannerOut | None = next((one for one in judging.planners() if one.name == chosen), None)
    for name, about in (planner.options if planner else {}).items():
        text = _text(values, f"option.{chosen}.{name}")
        readers: dict[str, Callable[[str], Any]] = {"integer": _whole, "number": _number, "boolean": _boolean}
        value = readers.get(about["type"], str)(text)
        if text and value != about["default"]:
            yield name, value


def _spelled(value: object) -> str:
    """Return an option as its field has it: truth values in lower case, as the choices of the page."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _names(text: str, every: list[str]) -> list[str]:
    return every if text.lower() == "all" else _list(text)


def _list(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _boolean(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), text)


def _text(values: Values, name: str) -> str:
    return values.get(name, [""])[0].strip()


def _home(pointer: str, planner: str) -> str | None:
    """Return the field that a pointer into the request leads to."""
    if pointer in ("/model", "/cluster", *(f"/{name}" for name in OF_PROFILE), *_AXES.values()):
        return pointer[1:]
    if pointer.startswith("/options/"):
        return f"option.{planner}.{pointer.removeprefix('/options/')}"
    homes = {entry.pointer: entry.name for entry in FIELDS} | _HOMES
    return next((name for start, name in homes.items() if pointer == start or pointer.startswith(start + "/")), None)


def _within(fault: Fault, name: str) -> str:
    """Return a fault's sentence, with its place where the field holds a whole document."""
    inner = fault.pointer.partition("/")[2].partition("/")[2]
    return f"/{inner}: {fault.detail}" if name.endswith("_text") and inner else fault.detail


def _pretty(document: Document) -> str:
    return document.model_dump_json(indent=2, exclude_none=True, exclude_defaults=True)
