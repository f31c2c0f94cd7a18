"""Command lines and Python that use a plan, or make the same plan again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from penstock.examples import catalogue
from penstock.planning.inputs import with_open_degrees
from penstock.schemas.errors import InvalidDocument, NotFound
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import MemoryModel, PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Degrees

_USES = (
    ("run", "Run it on this machine", "penstock run plan.json --job mytrain:job --check"),
    ("slurm", "As a job for Slurm", "penstock export plan.json --to sbatch --job mytrain:job --steps 1000 -o job"),
    ("pods", "As a job for Kubernetes", "penstock export plan.json --to jobset --job mytrain:job --steps 1000 -o job"),
)
_ONE_MACHINE = 16
"""The most devices of one machine: larger plans are not run on it."""


def uses(devices: int) -> tuple[tuple[str, str, str], ...]:
    """List the commands that use a plan of this many devices: id on the page, heading, and line."""
    return _USES if devices <= _ONE_MACHINE else _USES[1:]


_FILLED_IN = {"gradient", "headroom_bytes"}
"""Fields of memory that the command fills in where a request says nothing of them."""

_FLAGS = {
    "global_batch_size": "-b",
    "micro_batch_sizes": "--micro-batch-size",
    "planner": "--planner",
    "schedule": "--schedule",
    "update_rules": "--update-rule",
    "recompute": "--recompute",
    "codec": "--codec",
    "seed": "--seed",
}


def command(request: PlanRequest) -> str:
    """Return the command line of a request; where flags do not suffice, it names the request's file."""
    model, cluster = _shipped(request.profile), _shipped(request.topology)
    fields = request.model_dump(exclude_defaults=True, exclude={"profile", "topology", "schema_version"})
    words = ["--example", model or "", "--cluster", cluster or ""]
    for name, flag in _FLAGS.items():
        values = fields.pop(name, ())
        for value in values if isinstance(values, tuple) else (values,):
            words += [flag, str(value)]
    for name, value in (fields.pop("choose", None) or {}).items():
        words += ["--degrees", f"{name}={value if isinstance(value, str) else ','.join(value)}"]
    for name, value in fields.pop("options", {}).items():
        words += ["--set", f"{name}={value}"]
    words += _termination(fields.pop("termination", {}))
    words += [] if model is None else _degrees(request, fields)
    if fields or model is None or cluster is None:
        words = ["--request", "request.json"]
    return shlex.join(["penstock", "plan", *words, "-o", "plan.json"])


def _degrees(request: PlanRequest, fields: dict[str, Any]) -> Iterator[str]:
    """Yield the options for degrees and sharding, taken from what is given; none where the command chooses alike."""
    assert isinstance(request.profile, ModelProfile)
    if set(fields.get("memory", ())) <= _FILLED_IN and _chosen(request).memory == request.memory:
        fields.pop("memory", None)
    chosen = _chosen(request, degrees=None, sharding=None)
    if (chosen.degrees, chosen.sharding) == (request.degrees, request.sharding):
        for name in ("degrees", "sharding"):
            fields.pop(name, None)
        return
    degrees = request.degrees if isinstance(request.degrees, tuple) else (request.degrees or Degrees(),)
    if all(each == "auto" or each == Degrees(tensor=each.tensor) for each in degrees):
        fields.pop("degrees", None)
        yield from ("--tensor", ",".join("auto" if each == "auto" else str(each.tensor) for each in degrees))
    if isinstance(fields.get("sharding"), str):
        yield from ("--sharding", fields.pop("sharding"))


def _chosen(request: PlanRequest, **changed: object) -> PlanRequest:
    """Return the request that the command makes of one that says nothing of ``_FILLED_IN``, changed."""
    memory = MemoryModel(**request.memory.model_dump(exclude=_FILLED_IN, exclude_defaults=True))
    return with_open_degrees(request.model_copy(update={"memory": memory, **changed}))


def _termination(limits: dict[str, Any]) -> Iterator[str]:
    for name, flag, scale in (
        ("time_limit_ns", "--time-limit", 10**9),
        ("gap", "--gap", 1),
        ("max_plans", "--max-plans", 1),
    ):
        if (value := limits.get(name)) is not None:
            yield from (flag, f"{value / scale:g}")
    if "effort" in limits:
        yield from ("--effort", limits["effort"])


def _limits(limits: dict[str, Any]) -> dict[str, Any]:
    """Return the limits as arguments of ``penstock.plan``."""
    limit_ns = limits.pop("time_limit_ns", None)
    return limits if limit_ns is None else {"time_limit": limit_ns / 1e9, **limits}


def python(request: PlanRequest) -> str:
    """Return the call of the library: every field that differs from its default."""
    fields = request.model_dump(mode="json", exclude_defaults=True, exclude={"profile", "topology", "schema_version"})
    profile = _shipped(request.profile) or "profile.json"
    topology = _shipped(request.topology) or "topology.json"
    batch = fields.pop("global_batch_size")
    lines = [f"    {json.dumps(profile)},", f"    {json.dumps(topology)},", f"    global_batch_size={batch},"]
    fields |= _limits(fields.pop("termination", {}))
    lines += [f"    {name}={value!r}," for name, value in fields.items()]
    return "\n".join(["import penstock", "", "answer = penstock.plan(", *lines, ")", 'answer.save("plan.json")'])


def _shipped(document: ModelProfile | ClusterTopology | str) -> str | None:
    """Return the name of a shipped document."""
    if isinstance(document, str):
        return None
    find = catalogue.profile if isinstance(document, ModelProfile) else catalogue.cluster
    try:
        return document.name if find(document.name) == document else None
    except (NotFound, InvalidDocument):
        return None
