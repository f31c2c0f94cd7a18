"""Documents as the Python API takes them: by value, by file, or by the name of what is shipped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from math import isfinite
from pathlib import Path
from typing import Any

from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.schemas.document import in_words, load_json, read_text
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Degrees, Framework
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.hugging_face import remarks, shape_of
from penstock.shapes.layout import FRAMEWORKS
from penstock.shapes.profiled_degrees import USUAL, DegreeOptions, refuse_illegal
from penstock.shapes.routing import AS_SHAPED, Routing, routed

RESERVE = Fraction(3, 100)
"""Part of a device's memory that plans leave free by default: what allocators lose in fragments. The fullest of 145
published runs leaves 4.8 % by the same count (docs/benchmarks.md)."""


def find_profile(
    model: str | Path | Mapping[str, Any] | ModelProfile,
    *,
    framework: Framework | None = None,
    sequence_length: int | None = None,
    degrees: DegreeOptions = USUAL,
    context_kind: str | None = None,
    routing: Routing = AS_SHAPED,
    target: str | None = None,
) -> ModelProfile:
    """Return a profile by value, by file, or by the name of a shipped example.

    A file may be the ``config.json`` of a Hugging Face model, and a mapping its content. Its profile is then computed
    for every kind of device in the table, like the profile of a transformer whose shape alone is shipped. With
    ``framework``, ``sequence_length``, ``routing`` or ``degrees`` that the profile of a shipped model does not have,
    it is computed likewise. ``target`` decides the framework where ``framework`` is None and the shipped profile has
    a framework. Raises InvalidDocument for files that are neither, and where a profile is of another framework.
    """
    changes = {"context_kind": context_kind, **routing.stated}
    if isinstance(model, ModelProfile):
        return _as_it_is(model, framework, sequence_length, changes)
    name = None if isinstance(model, Mapping) else str(model)
    if name in catalogue.model_names():
        shipped = catalogue.profile(name)
        if shipped.framework is not None:
            framework = framework or FRAMEWORKS.get(target or "")
        same = _is_so(shipped, framework, sequence_length) and all(value is None for value in changes.values())
        if same and degrees == USUAL:
            return shipped
        if same:
            from penstock.shapes.profiles import at_degrees

            return at_degrees(shipped, degrees)
    elif name is not None and name not in SHAPES and not _is_config(path := Path(name)):
        profile = ModelProfile.read(path) if path.suffix or path.exists() else catalogue.profile(name)
        return _as_it_is(profile, framework, sequence_length, changes)
    from penstock.shapes.profiles import computed_profile

    shape = find_shape(model, sequence_length, routing)
    framework = framework or FRAMEWORKS.get(target or "")
    return with_remarks(computed_profile(shape, framework, degrees=degrees, context_kind=context_kind), model)


def with_remarks(profile: ModelProfile, model: str | Path | Mapping[str, Any]) -> ModelProfile:
    """Return a profile with the remarks on its model's config.json, where the model is that file or its content."""
    if not isinstance(model, Mapping):
        if str(model) in SHAPES or not Path(model).is_file():
            return profile
        model = read_config(Path(model))
    return profile.model_copy(update={"assumptions": (*profile.assumptions, *remarks(model))})


def with_choices(request: PlanRequest, *, many: bool = False) -> PlanRequest:
    """Return the request of a question with our choices where it states nothing: degrees, memory, effort.

    ``many``: whether it is one of many, which get the quick planner. Raises as ``with_open_degrees``.
    """
    request = with_open_degrees(request)
    return with_effort(with_quick_planner(request) if many else request)


def with_open_degrees(request: PlanRequest) -> PlanRequest:
    """Return the request with degrees and sharding to choose, where it does not state them and plans may have some.

    A request with a target or with codecs, and one whose devices are groups of GPUs, stays at degrees of 1. Where the
    request states degrees of 1 and no sharding, nothing is sharded. Where it does not state the width of gradients,
    they are in fp32, as in Megatron-Core, FSDP2 and Penstock's own ranks. Where it does not state the memory to leave
    free, `RESERVE` of the largest device stays free.

    Raises UnsupportedRequest for degrees that the model cannot have, with the rule that they break.
    """
    profile, topology = request.profile, request.topology
    if isinstance(profile, str) or isinstance(topology, str):
        return request
    request = _with_memory(request, "headroom_bytes", _reserve_bytes(topology))
    if request.target is None and profile.parameter_dtype != "fp32":
        request = _with_memory(request, "gradient", "fp32")
    if not profile.variants:
        return request
    if request.target is not None or request.codec is not None or topology.group is not None:
        return request
    degrees = "auto" if request.degrees is None else request.degrees
    profile_degrees = {Degrees(), *(variant.degrees for variant in profile.variants)}
    for each in degrees if isinstance(degrees, tuple) else (degrees,):
        if each != "auto" and each not in profile_degrees:
            refuse_illegal(profile, each)
    settled = request.sharding is not None or request.memory.optimizer_sharding != "none" or _are_one(degrees)
    changed: dict[str, object] = {"degrees": degrees, "sharding": request.sharding if settled else "auto"}
    return _with_memory(request, "gradient", "fp32").model_copy(update=changed)


def _with_memory(request: PlanRequest, name: str, value: object) -> PlanRequest:
    """Return the request with a field of its memory model, where it does not state that field."""
    if name in request.memory.model_fields_set:
        return request
    return request.model_copy(update={"memory": request.memory.model_copy(update={name: value})})


def _reserve_bytes(topology: ClusterTopology) -> int:
    """Return the memory that plans leave free on each device: `RESERVE` of the largest one."""
    uniform = topology.uniform
    devices = (uniform,) if uniform is not None else (each for node in topology.nodes for each in node.devices)
    return math.ceil(RESERVE * max((device.memory_bytes for device in devices), default=0))


def with_effort(request: PlanRequest) -> PlanRequest:
    """Return the request with effort ``normal``, where it does not state when to stop, or states a gap alone.

    Commands, pages and ``penstock.plan`` do so; a document that states nothing is planned to the end.
    """
    limits = request.termination
    if limits.has_limit:
        return request
    return request.model_copy(update={"termination": limits.model_copy(update={"effort": "normal"})})


def with_quick_planner(request: PlanRequest) -> PlanRequest:
    """Return the request with planner ``even``, where degrees are open and otherwise all planners would search them.

    This serves many requests at once: ``even`` takes a second or two for each, and its plans are seldom far from the
    best.
    """
    limited = request.termination.has_limit or request.termination.gap > 0
    chosen = request.planner != "auto" or request.schedule != "auto" or request.update_rules != ("synchronous",)
    return request if request.degrees is None or limited or chosen else request.model_copy(update={"planner": "even"})


def _are_one(degrees: object) -> bool:
    choices = degrees if isinstance(degrees, tuple) else (degrees,)
    return all(each == Degrees() for each in choices)


def find_shape(
    model: str | Path | Mapping[str, Any] | TransformerShape,
    sequence_length: int | None = None,
    routing: Routing = AS_SHAPED,
) -> TransformerShape:
    """Return a shape by value, by name, or from a Hugging Face model's ``config.json``, by file or content.

    Raises NotFound for an unknown name, InvalidDocument and UnsupportedRequest for a configuration that cannot be read,
    and UnsupportedRequest for more tokens than the model has learned positions and for an impossible ``routing``.
    """
    return routed(_shape_of(model, sequence_length), routing)


def _shape_of(
    model: str | Path | Mapping[str, Any] | TransformerShape, sequence_length: int | None
) -> TransformerShape:
    if isinstance(model, Mapping):
        return shape_of(model, sequence_length=sequence_length)
    if isinstance(model, TransformerShape):
        return _of_length(model, sequence_length)
    path, name = Path(model), str(model)
    if name in SHAPES or not (path.suffix or path.exists()):
        return _of_length(catalogue.shape(name), sequence_length)
    return shape_of(read_config(path), sequence_length=sequence_length, origin=repr(str(path)))


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.json. Raises InvalidDocument where it cannot be read or is no object."""
    config = load_json(read_text(path), repr(str(path)))
    if not isinstance(config, dict):
        raise InvalidDocument(f"{str(path)!r} is {in_words(config)}, not the object of a config.json")
    return config


def _of_length(shape: TransformerShape, length: int | None) -> TransformerShape:
    if length is None:
        return shape
    if shape.positions and length > shape.positions:
        raise UnsupportedRequest(
            f"{shape.name} has {shape.positions} learned positions, fewer than a sequence of {length} tokens",
            faults=(Fault("/sequence_length", f"at most {shape.positions}", "length"),),
        )
    return shape.model_copy(update={"sequence_length": length})


def _is_config(path: Path) -> bool:
    """Return whether a file is a Hugging Face model's configuration: it states a model type, as no profile does."""
    return path.suffix == ".json" and path.is_file() and "model_type" in read_config(path)


def _is_so(profile: ModelProfile, framework: Framework | None, sequence_length: int | None) -> bool:
    same = framework is None or profile.framework == framework
    length = None if profile.shape is None else profile.shape.sequence_length
    return same and sequence_length in (None, length)


def _as_it_is(
    profile: ModelProfile, framework: Framework | None, sequence_length: int | None, changes: Mapping[str, object]
) -> ModelProfile:
    """Return the profile. Raises InvalidDocument for another framework or length, or costs that it does not have."""
    remedy = "the name of a shipped transformer or a config.json, whose profile is computed"
    if changed := [f"{name.replace('_', ' ')} {value!r}" for name, value in changes.items() if value is not None]:
        raise InvalidDocument(
            f"the profile {profile.name!r} has fixed costs; {' and '.join(changed)} needs a profile that is computed",
            remedy=remedy,
        )
    if not _is_so(profile, framework, sequence_length):
        length = None if profile.shape is None else profile.shape.sequence_length
        has = (profile.framework or "no stated framework", _tokens(length))
        requested = (framework or has[0], has[1] if sequence_length is None else _tokens(sequence_length))
        raise InvalidDocument(
            f"the profile {profile.name!r} is of {' and '.join(has)}, not of {' and '.join(requested)}",
            remedy=remedy,
        )
    return profile


def _tokens(length: int | None) -> str:
    return "samples of unknown length" if length is None else f"samples of {length} tokens"


def find_topology(topology: str | Path | ClusterTopology) -> ClusterTopology:
    """Return a topology by value, by file, or by the name of a shipped example (``8x8xH100``)."""
    if isinstance(topology, ClusterTopology):
        return topology
    path = Path(topology)
    return ClusterTopology.read(path) if path.suffix or path.exists() else catalogue.cluster(str(topology))


def nanoseconds_of(limit: str | float | None) -> str | int | None:
    """Convert a ``time_limit`` for a field in nanoseconds, which parses texts with units; numbers are seconds.

    Raises InvalidDocument for a value that is not a number of seconds.
    """
    if limit is None or isinstance(limit, str):
        return limit
    if isinstance(limit, bool) or not isfinite(limit):
        raise InvalidDocument(
            f"time_limit is {limit}, which is not a duration",
            remedy='a number of seconds, a text such as "10s", or None',
        )
    return round(limit * 1e9)
