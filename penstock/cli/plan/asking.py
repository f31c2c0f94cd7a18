"""The plan request that the command line asks: a request file's fields, documents by file or name, and options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import typer

from penstock.cli.documents import STANDARD, TAKEN_BY, read_document, read_raw
from penstock.schemas.errors import WrongDocument

if TYPE_CHECKING:
    from penstock.schemas.request import PlanRequest

SOURCES = (("profile", "profile", "model"), ("topology", "topology", "cluster"))
"""A document's field, and the two options that give it: by file, and by name."""


def request_of(options: Mapping[str, Any]) -> PlanRequest:
    """The request of ``plan``'s or ``compare``'s options, as typer parsed them (None: not given).

    Raises typer.BadParameter for what is missing or contradicts itself, InvalidDocument for what does not validate.
    """
    if [options[name] for name in ("request", "profile", "topology")].count(STANDARD) > 1:
        raise typer.BadParameter("standard input can be read once; only one of the files may be -")
    for _, file, name in SOURCES:
        if options[file] is not None and options[name] is not None:
            raise typer.BadParameter(f"give either --{file} or --{name}, not both")
    data = _request_file(options["request"]) if options["request"] is not None else {}
    fields = _fields(options)
    missing = [
        f"--{file} or --{name}"
        for field, file, name in SOURCES
        if not (options[file] or options[name] or field in data)
    ]
    if "global_batch_size" not in fields and "global_batch_size" not in data:
        missing.append("--global-batch-size")
    if missing:
        raise typer.BadParameter(f"missing {', '.join(missing)}")
    from penstock.schemas.request import PlanRequest

    return PlanRequest.parse(_merged(data, fields | _documents(options)), units=True, origin=options["request"] or "")


def _request_file(source: str) -> dict[str, Any]:
    """A request file's fields, of which options may give what is missing. Raises WrongDocument, InvalidDocument."""
    from penstock.schemas.recognising import recognised
    from penstock.schemas.request import PlanRequest

    data = read_raw(source)
    if (found := recognised(data)) not in (None, PlanRequest.kind):
        raise WrongDocument(
            f"{source!r} is a {found}, not a {PlanRequest.kind}", found=found, remedy=TAKEN_BY.get(found or "")
        )
    if data.keys() - PlanRequest.model_fields.keys():
        PlanRequest.parse(data, units=True, origin=repr(source))  # which names the fields that may have been meant
    return data


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The request's fields that options give."""
    limit = options["time_limit"]
    if limit is not None and not 0 <= limit < 1e6:
        raise typer.BadParameter(f"{limit} is no time limit; give seconds, 0 or more", param_hint="--time-limit")
    same = ("global_batch_size", "planner", "schedule", "recompute", "codec", "seed")
    fields = {name: options[name] for name in same} | {"target": options.get("target")}
    fields["micro_batch_sizes"] = options["micro_batch_size"] or None
    fields["update_rules"] = _rules(options["update_rule"])
    fields["pins"] = [_pin(text) for text in options["pin"] or ()] or None
    parts = {
        "network": {"sharing": options["network"]},
        "memory": {"optimizer": options["optimizer"]},
        "termination": {
            "time_limit_ns": None if limit is None else round(limit * 1e9),
            "gap": options["gap"],
            "max_plans": options["max_plans"],
        },
        "options": dict(_option(text) for text in options["set_option"] or ()),
    }
    for part, values in parts.items():
        fields[part] = {name: value for name, value in values.items() if value is not None} or None
    return {name: value for name, value in fields.items() if value is not None}


def _rules(given: list[str] | None) -> list[str] | None:
    if not given:
        return None
    from penstock.schemas.request import UpdateRule

    return list(get_args(UpdateRule)) if "all" in given else given


def _pin(text: str) -> dict[str, Any]:
    parts = re.fullmatch(r"(\d+)(?:-(\d+))?=(.+)", text)
    if parts is None:
        raise typer.BadParameter(f"{text!r} is not FIRST-LAST=DEVICE[,DEVICE…]", param_hint="--pin")
    first, last, devices = parts.groups()
    return {"layers": [int(first), int(last or first)], "devices": [name.strip() for name in devices.split(",")]}


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is not option=value", param_hint="--set")
    try:
        parsed = json.loads(value)
    except ValueError:
        return name, value
    return name, parsed if isinstance(parsed, bool | int | float | str) else value


def _documents(options: Mapping[str, Any]) -> dict[str, Any]:
    from penstock.examples import catalogue
    from penstock.schemas.profile import ModelProfile, PipelineProfile
    from penstock.schemas.topology import ClusterTopology

    found: dict[str, Any] = {}
    if options["profile"] is not None:
        found["profile"] = read_document(ModelProfile, options["profile"])
    elif options["model"] is not None:
        found["profile"] = catalogue.profile(options["model"])
    if options["pipeline_profile"] is not None:
        found["pipeline_profile"] = read_document(PipelineProfile, options["pipeline_profile"])
    if options["topology"] is not None:
        found["topology"] = read_document(ClusterTopology, options["topology"])
    elif options["cluster"] is not None:
        found["topology"] = catalogue.cluster(options["cluster"])
    return found


def _merged(data: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """``fields`` over ``data``; parts such as ``memory`` and ``termination`` keep what is not overridden."""
    merged = dict(data)
    for name, value in fields.items():
        old = merged.get(name)
        if name == "network" and isinstance(old, str):
            old = {"sharing": old}
        merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
