"""Plain layouts in words: what people write of the one they run, such as ``tensor=8,pipeline=4,replicas=2``."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from penstock.convert.requested_degrees import degrees_of
from penstock.layouts.even import EvenLayout, even_layout
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.model.degrees import Choice, Sharding

FIELDS = {
    "tensor": "tensor",
    "context": "context",
    "expert": "expert",
    "expert-tensor": "expert_tensor",
    "pipeline": "pipeline",
    "replicas": "replicas",
    "micro-batch": "micro_batch_size",
    "chunks": "virtual_stages",
    "sharding": "sharding",
    "recompute": "recompute",
}
"""The names in words, and those of ``even_layout``."""
NUMBERS = ("tensor", "context", "expert", "expert-tensor", "pipeline", "replicas", "micro-batch", "chunks")
VALUES = {"sharding": get_args(Sharding), "recompute": ("none", "full")}
EXAMPLE = "tensor=8,pipeline=4,replicas=2,micro-batch=1,chunks=1,sharding=optimizer,recompute=none"


class Written(NamedTuple):
    """A layout that was written in words, and how trainers call it: ``TP8 PP4 DP2``."""

    words: str
    layout: EvenLayout


def written_layout(request: PlanRequest, text: str) -> Written:
    """Judge the plain layout that words describe; what they leave out is 1 or none, and replicas what remains.

    Raises InvalidDocument for words that describe none, and for replicas that do not fill the GPUs; and as
    ``even_layout``.
    """
    fields = _fields(text)
    replicas = fields.pop("replicas", None)
    found = even_layout(request, **fields)
    filled = _replicas(found.file)
    if replicas not in (None, filled):
        raise InvalidDocument(
            f"the layout {text!r} has {replicas} replicas, and its GPUs are filled by {filled}",
            remedy=f"replicas={filled}, or another cluster",
        )
    return Written(_words(fields, filled), found)


def _fields(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, _equals, value = (each.strip() for each in part.partition("="))
        whole = name in NUMBERS and value.isdecimal() and len(value) < 10
        if FIELDS.get(name) in (None, *fields) or not (whole or value in VALUES.get(name, ())):
            raise InvalidDocument(f"{part.strip()!r} is no part of a layout in words", remedy=f"such as {EXAMPLE}")
        fields[FIELDS[name]] = int(value) if whole else value
    return fields


def _replicas(file: PlanFile) -> int:
    return len(file.plan.pipelines[0].stages[0].devices) // degrees_of(file.plan.degrees).mesh


def _words(fields: dict[str, Any], replicas: int) -> str:
    said = [f"TP{fields.get('tensor', 1)}", f"PP{fields.get('pipeline', 1)}", f"DP{replicas}"]
    above = {"CP": "context", "EP": "expert", "ETP": "expert_tensor"}
    said[2:2] = [f"{name}{fields[field]}" for name, field in above.items() if fields.get(field, 1) > 1]
    plain = len(said)
    said += [f"VP{fields['virtual_stages']}"] if fields.get("virtual_stages", 1) > 1 else []
    said += [f"micro-batch {fields.get('micro_batch_size', 1)}"]
    if (sharding := fields.get("sharding", "none")) != "none":
        said.append(str(Choice(sharding=sharding)).partition(", ")[2])
    said += ["recomputed"] if fields.get("recompute") == "full" else []
    return " ".join(said[:plain]) + "".join(f", {each}" for each in said[plain:])
