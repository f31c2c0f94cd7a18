"""The plan request of a command line: a request file's fields, documents by file or name, and options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from penstock.cli.assignments import assignment
from penstock.cli.degree_options import axes_of, costed_degrees, degrees_of
from penstock.cli.input_files import STANDARD, TAKEN_BY, read_document, read_raw
from penstock.schemas.errors import InvalidDocument, WrongDocument
from penstock.schemas.options.option import Option, put
from penstock.schemas.options.planning import PLAN_OPTIONS

if TYPE_CHECKING:
    from penstock.schemas.api.layouts import LayoutJob
    from penstock.schemas.document import Document
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.request import PlanRequest
    from penstock.schemas.topology import ClusterTopology
    from penstock.shapes.profiled_degrees import DegreeOptions

D = TypeVar("D", bound="Document")

SOURCES = (("profile", "example", "hf"), ("topology", "cluster"))
"""The options that give a document: by file (also the name of the request's field), by name, by a configuration."""

DOCUMENTS = ("profile", "topology", "pipeline_profile")


def request_of(options: Mapping[str, Any]) -> PlanRequest:
    """Return the request of a command's options; None or absent means that an option is not given.

    Raises typer.BadParameter for missing or contradictory options, InvalidDocument for invalid values.
    """
    from penstock.convert.requested_degrees import named_degrees
    from penstock.schemas.request import PlanRequest

    data, fields = _stated(options, SOURCES)
    if (profile := profile_of_options(options)) is not None:
        fields["profile"] = profile
    if named := _named_degrees(options):
        plain = _parsed(PlanRequest, options, data, fields)
        fields["degrees"] = named_degrees(plain.profile, named)
    return _parsed(PlanRequest, options, data, fields)


def layout_job_of(options: Mapping[str, Any]) -> LayoutJob:
    """Return the job of a layout from a command's options, which may leave out its model and its batch.

    Raises the same errors as ``request_of``.
    """
    from penstock.examples import catalogue
    from penstock.examples.shapes import SHAPES
    from penstock.planning.inputs import read_config
    from penstock.schemas.api.layouts import LayoutJob
    from penstock.schemas.profile import ModelProfile
    from penstock.shapes.profiled_degrees import context_kind_of

    data, fields = _stated(options, SOURCES[1:])
    replaced = ["pipeline_profile", *(["profile"] if options["example"] or options["hf"] else [])]
    data = {name: value for name, value in data.items() if name not in replaced}
    if (name := options["example"]) is not None:
        is_shape = name in SHAPES
        fields |= {"shape": SHAPES[name]} if is_shape else {"profile": catalogue.profile(name)}
    elif options["hf"] is not None:
        fields["hugging_face"] = read_config(Path(options["hf"]))
    elif options["profile"] is not None:
        fields["profile"] = read_document(ModelProfile, options["profile"])
    for name, option in PLAN_OPTIONS.items():
        if not option.pointer and name in LayoutJob.model_fields and options[name] is not None:
            fields[name] = options[name]
    if isinstance(kind := fields.get("context_kind"), str):
        fields["context_kind"] = context_kind_of(kind)
    return _parsed(LayoutJob, options, data, fields)


def _stated(options: Mapping[str, Any], needed: Sequence[tuple[str, ...]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the request file, and the fields that options give, except the model.

    ``needed``: the sources of documents that have to be named; for all ``SOURCES`` the global batch as well.
    """
    if [options.get(name) for name in ("request", "profile", "topology")].count(STANDARD) > 1:
        raise typer.BadParameter("standard input can be read once; only one of the files may be -")
    for ways in SOURCES:
        present = [way for way in ways if options.get(way) is not None]
        if len(present) > 1:
            raise typer.BadParameter(f"give either --{present[0]} or --{present[1]}, not both")
    origin = options.get("request")
    data = _request_file(origin) if origin is not None else {}
    fields = _fields(options)
    missing = [
        f"{', '.join(f'--{way}' for way in ways[:-1])} or --{ways[-1]}"
        for ways in needed
        if not (any(options.get(way) for way in ways) or ways[0] in data)
    ]
    if needed == SOURCES and "global_batch_size" not in fields and "global_batch_size" not in data:
        missing.append("--global-batch-size")
    if missing:
        raise typer.BadParameter(f"missing {', '.join(missing)}")
    if options.get("pipeline_profile") is not None:
        from penstock.schemas.profile import PipelineProfile

        fields["pipeline_profile"] = read_document(PipelineProfile, options["pipeline_profile"])
    if (topology := topology_of_options(options)) is not None:
        fields["topology"] = topology
    return data, fields


def _parsed(kind: type[D], options: Mapping[str, Any], data: dict[str, Any], fields: dict[str, Any]) -> D:
    """Return the document. Raises typer.BadParameter for values of options, InvalidDocument for others."""
    try:
        return kind.parse(_merged(data, fields), units=True, origin=options.get("request") or "")
    except InvalidDocument as error:
        _refuse_options(error, fields)
        raise


def _refuse_options(error: InvalidDocument, fields: Mapping[str, Any]) -> None:
    """Raise typer.BadParameter where all faults of a request are of values that options gave."""
    wrong: dict[str, list[str]] = {}
    for fault in error.faults:
        name = fault.pointer.split("/")[1:2]
        named = next((one for one in _givers() if fault.pointer.startswith(one.pointer)), None)
        if named is None or name[0] in DOCUMENTS or not _has(fields, named.pointer):
            return
        wrong.setdefault(named.flag, []).append(fault.detail)
    if wrong:
        raise typer.BadParameter("; ".join(f"{option}: {'; '.join(details)}" for option, details in wrong.items()))


def _givers() -> list[Option]:
    """Return the options that give fields of a request, the deepest first."""
    return sorted((one for one in PLAN_OPTIONS.values() if one.pointer), key=lambda one: -one.pointer.count("/"))


def _has(fields: Mapping[str, Any], pointer: str) -> bool:
    """Return whether options gave the field at a pointer."""
    value: Any = fields
    for step in pointer.split("/")[1:]:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value is not None


def _request_file(source: str) -> dict[str, Any]:
    """Read the fields of a request file; options may give missing ones. Raises WrongDocument, InvalidDocument."""
    from penstock.schemas.recognising import recognised
    from penstock.schemas.request import PlanRequest

    data = read_raw(source)
    if (kind := recognised(data)) not in (None, PlanRequest.kind):
        raise WrongDocument(
            f"{source!r} is a {kind}, not a {PlanRequest.kind}", document_kind=kind, remedy=TAKEN_BY.get(kind or "")
        )
    if data.keys() - PlanRequest.model_fields.keys():
        PlanRequest.parse(
            data, units=True, origin=repr(source)
        )  # whose error suggests the fields that may have been meant
    return data


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the request that options give."""
    readers: dict[str, Callable[[Any], Any]] = {"update_rules": _rules, "pins": _pins, "options": _set}
    fields: dict[str, Any] = {}
    for name, option in PLAN_OPTIONS.items():
        value = options.get("set_option" if name == "options" else option.parameter)
        if option.pointer and option.flag and value not in (None, []):
            put(fields, option.pointer, readers[name](value) if name in readers else value)
    if further := {name: tuple(values.split(",")) for name, values in axes_of(options.get("degrees") or ())}:
        fields["choose"] = further
    return fields


def _named_degrees(options: Mapping[str, Any]) -> dict[str, tuple[int, ...] | str]:
    """Return the degrees that options name, each with its values or auto."""
    texts = {name: options.get(name) for name in ("tensor", "context", "expert")}
    degrees: dict[str, tuple[int, ...] | str] = {
        name: degrees_of(values, name) for name, values in texts.items() if values
    }
    if (one := options.get("expert_tensor")) is not None:
        degrees["expert_tensor"] = (one,)
    return degrees


def _rules(rules: list[str]) -> list[str]:
    return list(PLAN_OPTIONS["update_rules"].values) if "all" in rules else rules


def _pins(texts: list[str]) -> list[dict[str, Any]]:
    return [_pin(text) for text in texts]


def _pin(text: str) -> dict[str, Any]:
    parts = re.fullmatch(r"(\d+)(?:-(\d+))?=(.+)", text)
    if parts is None:
        raise typer.BadParameter(f"{text!r} is not FIRST-LAST=DEVICE[,DEVICE…]", param_hint="--pin")
    first, last, devices = parts.groups()
    return {"layers": [int(first), int(last or first)], "devices": [name.strip() for name in devices.split(",")]}


def _set(texts: list[str]) -> dict[str, Any]:
    form = "OPTION=VALUE, such as stages=4"
    pairs = (assignment(text, "--set", form, may_be_empty=True) for text in texts)
    return {name: _scalar(value) for name, value in pairs}


def _scalar(text: str) -> bool | int | float | str:
    """Return a number, a boolean or a text in JSON as such, and any other text unchanged."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


def profile_of_options(options: Mapping[str, Any], *, degrees: DegreeOptions | None = None) -> ModelProfile | None:
    """Return the profile that options name, by file, by a configuration or by name; None without such an option.

    ``degrees``: degrees at which a computed profile has costs, instead of the degrees that options name.
    """
    from penstock.examples import catalogue
    from penstock.planning.inputs import find_profile, find_shape, with_remarks
    from penstock.schemas.profile import ModelProfile
    from penstock.shapes.layout import FRAMEWORKS
    from penstock.shapes.profiles import computed_profile
    from penstock.shapes.routing import Routing

    computed: dict[str, Any] = {
        "framework": options.get("framework"),
        "degrees": degrees
        or costed_degrees(options.get("context"), options.get("expert"), options.get("expert_tensor")),
        "context_kind": options.get("context_kind"),
    }
    length = options.get("sequence_length")
    routing = Routing(options.get("routing_imbalance"), options.get("capacity_factor"))
    if options["profile"] is not None:
        document = read_document(ModelProfile, options["profile"])
        return find_profile(document, sequence_length=length, routing=routing, **computed)
    if options.get("hf") is not None:
        computed["framework"] = computed["framework"] or FRAMEWORKS.get(options.get("target") or "")
        profile = computed_profile(find_shape(options["hf"], length, routing), **computed)
        return with_remarks(profile, options["hf"])
    if options["example"] is not None:
        shipped, target = catalogue.known_profile(options["example"]), options.get("target")
        return find_profile(shipped, sequence_length=length, routing=routing, target=target, **computed)
    return None


def other_kernels_of(request: PlanRequest) -> str | None:
    """Return a line where the costs belong to other kernels than the target's; otherwise None."""
    from penstock.layouts.legal import other_kernels
    from penstock.schemas.profile import ModelProfile
    from penstock.shapes.layout import FRAMEWORKS

    if request.target is None or not isinstance(request.profile, ModelProfile):
        return None
    sentence = other_kernels(request.profile, request.target)
    return sentence and f"{sentence}; --example and --hf with --framework {FRAMEWORKS[request.target]} have that one's"


def topology_of_options(options: Mapping[str, Any]) -> ClusterTopology | None:
    """Return the topology that options name, by file or by name; None without such an option."""
    from penstock.examples import catalogue
    from penstock.schemas.topology import ClusterTopology

    if options["topology"] is not None:
        return read_document(ClusterTopology, options["topology"])
    return None if options["cluster"] is None else catalogue.cluster(options["cluster"])


def _merged(data: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Merge ``fields`` over ``data``; parts such as ``memory`` and ``termination`` keep what is not overridden."""
    merged = dict(data)
    for name, value in fields.items():
        old = merged.get(name)
        if name == "network" and isinstance(old, str):
            old = {"sharing": old}
        merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
