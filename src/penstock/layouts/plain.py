"""Plain layouts in words, as people describe the one they run, such as ``tensor=8,pipeline=4,replicas=2``."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from penstock.convert.requested_degrees import degrees_of
from penstock.layouts.even import EvenLayout, even_layout
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers.degrees import Module
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
"""The names in words, and the parameters of ``even_layout``."""
NUMBERS = ("tensor", "context", "expert", "expert-tensor", "pipeline", "replicas", "micro-batch", "chunks")
VALUES = {"sharding": get_args(Sharding), "recompute": ("none", "full")}
EXAMPLE = "tensor=8,pipeline=4,replicas=2,micro-batch=1,chunks=1,sharding=optimizer,recompute=norm+mlp"


class Written(NamedTuple):
    """A layout that was written in words, and its name among trainers: ``TP8 PP4 DP2``."""

    words: str
    layout: EvenLayout


def written_layout(request: PlanRequest, text: str) -> Written:
    """Judge the plain layout that words describe; omitted numbers are 1, and replicas fill the GPUs.

    Raises InvalidDocument for words that describe no layout, and for replicas that do not fill the GPUs; otherwise
    raises as ``even_layout`` does.
    """
    fields = _fields(text)
    replicas = fields.pop("replicas", None)
    layout = even_layout(request, **fields)
    filled = _replicas(layout.file)
    if replicas not in (None, filled):
        raise InvalidDocument(
            f"the layout {text!r} has {replicas} replicas; the cluster has GPUs for {filled}",
            remedy=f"replicas={filled}, or another cluster",
        )
    return Written(_words(fields, filled), layout)


def _fields(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for part in text.split(","):
        name, _equals, value = (each.strip() for each in part.partition("="))
        whole = name in NUMBERS and value.isdecimal() and len(value) < 10
        modules = tuple(value.split("+")) if name == "recompute" and value not in VALUES[name] else ()
        is_value = whole or value in VALUES.get(name, ()) or (modules and {*modules} <= {*get_args(Module)})
        if FIELDS.get(name) in (None, *fields) or not is_value:
            raise InvalidDocument(
                f"{part.strip()!r} is not a valid NAME=VALUE of a layout", remedy=f"each name once, such as {EXAMPLE}"
            )
        fields[FIELDS[name]] = int(value) if whole else modules or value
    return fields


def _replicas(file: PlanFile) -> int:
    return len(file.plan.pipelines[0].stages[0].devices) // degrees_of(file.plan.degrees).mesh


def _words(fields: dict[str, Any], replicas: int) -> str:
    words = [f"TP{fields.get('tensor', 1)}", f"PP{fields.get('pipeline', 1)}", f"DP{replicas}"]
    above = {"CP": "context", "EP": "expert", "ETP": "expert_tensor"}
    words[2:2] = [f"{name}{fields[field]}" for name, field in above.items() if fields.get(field, 1) > 1]
    plain = len(words)
    words += [f"VP{fields['virtual_stages']}"] if fields.get("virtual_stages", 1) > 1 else []
    words += [f"micro-batch {fields.get('micro_batch_size', 1)}"]
    if (sharding := fields.get("sharding", "none")) != "none":
        words.append(str(Choice(sharding=sharding)).partition(", ")[2])
    recompute = fields.get("recompute", "none")
    if recompute != "none":
        words.append("recomputed" if recompute == "full" else f"{' and '.join(recompute)} recomputed")
    return " ".join(words[:plain]) + "".join(f", {each}" for each in words[plain:])
