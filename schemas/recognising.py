"""Recognition of refused documents: another kind of document, or one with a misspelt or misplaced field."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import BaseModel

from penstock.schemas.errors import Fault

MARKS: dict[str, tuple[frozenset[str], ...]] = {
    "sweep request": (frozenset({"request", "over"}),),
    "plan file": (frozenset({"plan", "request"}),),
    "placement request": (frozenset({"topology", "jobs"}),),
    "plan request": (frozenset({"profile", "topology"}), frozenset({"profile", "global_batch_size"})),
    "plan": (frozenset({"pipelines", "planner"}),),
    "job bundle": (frozenset({"plan_hash", "ranks", "lowered_for"}),),
    "trace": (frozenset({"plan_hash", "ranks", "predicted_time_per_global_batch_ns", "losses"}),),
    "pipeline profile": (frozenset({"plan_hash", "ranks", "num_pipelines"}),),
    "profile": (frozenset({"layers", "measurements"}),),
    "topology": (frozenset({"nodes"}), frozenset({"uniform"})),
}
"""Fields by which documents of users are recognised; the first kind that has one of its sets counts."""
HINTED_FAULTS = 20
"""Faults of a document that are given a hint: looking for names that are close takes time."""
LONGEST_FIELD = 64
MEANT = {"model": "profile", "cluster": "topology", "batch_size": "global_batch_size", "batch": "global_batch_size"}
"""Fields under the names that the command line, or everyday language, has for them."""
CLOSE = 0.75


def recognised(data: Any) -> str | None:
    """Return the kind of document that plain data look like, by their fields; None for an unknown kind."""
    if not isinstance(data, dict):
        return None
    return next((kind for kind, marks in MARKS.items() if any(mark <= data.keys() for mark in marks)), None)


def with_hints(faults: Iterable[Fault], model: type[BaseModel]) -> Iterator[Fault]:
    """Yield the faults. A fault about an unknown field also names the field of ``model`` that may have been meant."""
    hinted = 0
    for fault in faults:
        if fault.code != "extra_forbidden" or hinted == HINTED_FAULTS:
            yield fault
            continue
        hinted += 1
        *steps, name = [step.replace("~1", "/").replace("~0", "~") for step in fault.pointer.split("/")[1:]]
        near = _near(name, tuple(step for step in steps if not step.isdecimal()), model)
        yield fault if near is None else replace(fault, detail=f"{fault.detail}; did you mean `{near}`?")


def _near(name: str, steps: tuple[str, ...], model: type[BaseModel]) -> str | None:
    """Return the field that was meant, with its path: of the object, of one inside it, or of the whole document."""
    if len(name) > LONGEST_FIELD:
        return None
    here = _models_at(steps, model)
    if any(MEANT.get(name) in part.model_fields for part in here):
        return MEANT[name]
    inside = [(way, field) for part in here for way, field in _fields(part)]
    anywhere = [] if not steps else [(way, field) for way, field in _fields(model)]
    for candidates in ([("", field) for part in here for field in part.model_fields], inside, anywhere):
        fields = {field: f"{way}{field}" for way, field in reversed(candidates)}
        if close := difflib.get_close_matches(name, fields, 1, CLOSE):
            return fields[close[0]]
    return None


def _models_at(steps: tuple[str, ...], model: type[BaseModel]) -> tuple[type[BaseModel], ...]:
    """Return what may be at a place of a document; steps that name no field, such as a mapping's keys, lead nowhere."""
    models: tuple[type[BaseModel], ...] = (model,)
    for step in steps:
        inner = [kind for part in models if step in part.model_fields for kind in _parts_of(part, step)]
        models = tuple(dict.fromkeys(inner)) or models
    return models


@cache
def _fields(model: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    """Return all fields of a document with the path to each (``memory.``), the nearest ones first."""
    fields: list[tuple[str, str]] = []
    level, seen = [("", model)], {model}
    while level:
        below = []
        for way, part in level:
            for field in part.model_fields:
                fields.append((way, field))
                for inner in _parts_of(part, field):
                    if inner not in seen:
                        seen.add(inner)
                        below.append((f"{way}{field}.", inner))
        level = below
    return tuple(fields)


def _parts_of(model: type[BaseModel], field: str) -> tuple[type[BaseModel], ...]:
    """Return the models that a field's value may consist of."""
    left, models = [model.model_fields[field].annotation], []
    while left:
        kind = left.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            models.append(kind)
        left += typing.get_args(kind)
    return tuple(models)
