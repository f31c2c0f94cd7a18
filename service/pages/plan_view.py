"""What a plan's page shows: its figures, its bounds in words, where its time goes, and how to get the same again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.examples import catalogue
from penstock.planning.documents import with_open_degrees
from penstock.planning.explain import Judged
from penstock.planning.plan_schedules import schedule_csv
from penstock.report.bounds import bound_sentences, widest
from penstock.report.cluster_map import cluster_map, traffic_table
from penstock.report.drawing.picture import Picture
from penstock.report.explained import PARTS, SPANS, share_name
from penstock.report.memory import peaks
from penstock.report.sentences import pace, replicas, subtitle
from penstock.report.traffic import traffic
from penstock.report.words import amount, duration, percent, ranges, recomputed
from penstock.schemas.api.explanation import Explanation, IdleOut
from penstock.schemas.errors import InvalidDocument, InvalidPlan, NotFound, UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import MemoryModel, PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Degrees

MAX_ROWS = 100
MEMORY_PARTS = (
    "parameters", "gradients", "optimizer", "versions", "activations", "buffers", "workspace", "context",
)  # fmt: skip

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


def view(file: PlanFile, found: Judged, explained: Explanation, drawn: Picture) -> dict[str, Any]:
    """What the page of a judged plan shows in addition to its timeline."""
    plan, allocation = found.judgement.plan, found.judgement.allocation
    assert plan.prediction is not None
    assert allocation is not None
    flows = traffic(found.problem, allocation, plan.prediction.time_per_global_batch_ns, plan.update_rule)
    profile, topology = file.request.profile, file.request.topology
    assert isinstance(profile, ModelProfile)
    assert isinstance(topology, ClusterTopology)
    return {
        "plan": plan,
        "address": file.plan.content_hash(),
        "profile": profile,
        "topology": topology,
        "faults": found.judgement.faults,
        "figures": list(_figures(plan)),
        "bounds": list(bound_sentences(plan)),
        "subtitle": subtitle(plan, topology),
        "sentences": explained.sentences,
        "explained": explained,
        "span": SPANS[explained.path.span],
        "shares": [(share_name(share), share) for share in explained.path.shares],
        "idle_heads": [PARTS[part] for part in _idle_parts(explained)],
        "idle": list(_idle(explained)),
        "stages": list(_stages(plan, profile)),
        "devices": list(_devices(plan)),
        "memory_parts": [part for part in MEMORY_PARTS if _is_used(plan, part)],
        "num_devices": len(plan.prediction.devices),
        "peaks": peaks(drawn),
        "cluster_map": cluster_map(plan, topology, flows),
        "traffic": traffic_table(flows, [device.name for device in found.problem.devices]),
        "assumptions": [*plan.assumptions, *(a for a in profile.assumptions if a not in plan.assumptions)],
        "has_csv": _has_csv(file),
        "command": command(file.request),
        "python": python(file.request),
    }


def command(request: PlanRequest) -> str:
    """The command line that asks the same; of a request that has no flags for all it says, with the request's file."""
    model, cluster = _shipped(request.profile), _shipped(request.topology)
    given = request.model_dump(exclude_defaults=True, exclude={"profile", "topology", "schema_version"})
    words = ["--example", model or "", "--cluster", cluster or ""]
    for name, flag in _FLAGS.items():
        values = given.pop(name, ())
        for value in values if isinstance(values, tuple) else (values,):
            words += [flag, str(value)]
    for name, value in given.pop("options", {}).items():
        words += ["--set", f"{name}={value}"]
    words += _termination(given.pop("termination", {}))
    words += [] if model is None else _degrees(request, given)
    if given or model is None or cluster is None:
        words = ["--request", "request.json"]
    return shlex.join(["penstock", "plan", *words, "-o", "plan.json"])


def _degrees(request: PlanRequest, given: dict[str, Any]) -> Iterator[str]:
    """Yield the options for degrees and sharding, taken from what is given; none where the command chooses alike."""
    assert isinstance(request.profile, ModelProfile)
    if set(given.get("memory", ())) == {"gradient"} and _chosen(request).memory == request.memory:
        given.pop("memory")
    chosen = _chosen(request, degrees=None, sharding=None)
    if (chosen.degrees, chosen.sharding) == (request.degrees, request.sharding):
        for name in ("degrees", "sharding"):
            given.pop(name, None)
        return
    degrees = request.degrees if isinstance(request.degrees, tuple) else (request.degrees or Degrees(),)
    if all(each == "auto" or each == Degrees(tensor=each.tensor) for each in degrees):
        given.pop("degrees", None)
        yield from ("--tensor", ",".join("auto" if each == "auto" else str(each.tensor) for each in degrees))
    if isinstance(given.get("sharding"), str):
        yield from ("--sharding", given.pop("sharding"))


def _chosen(request: PlanRequest, **changed: object) -> PlanRequest:
    """The request that the command makes of one that says nothing of gradients, changed."""
    said = request.memory.model_dump(exclude={"gradient"}, exclude_defaults=True)
    return with_open_degrees(request.model_copy(update={"memory": MemoryModel(**said), **changed}))


def _termination(given: dict[str, Any]) -> Iterator[str]:
    for name, flag, scale in (
        ("time_limit_ns", "--time-limit", 10**9),
        ("gap", "--gap", 1),
        ("max_plans", "--max-plans", 1),
    ):
        if (value := given.get(name)) is not None:
            yield from (flag, f"{value / scale:g}")


def python(request: PlanRequest) -> str:
    """The call of the library that asks the same: every field that differs from its default."""
    given = request.model_dump(mode="json", exclude_defaults=True, exclude={"profile", "topology", "schema_version"})
    profile = _shipped(request.profile) or "profile.json"
    topology = _shipped(request.topology) or "topology.json"
    batch = given.pop("global_batch_size")
    lines = [f"    {json.dumps(profile)},", f"    {json.dumps(topology)},", f"    global_batch_size={batch},"]
    lines += [f"    {name}={value!r}," for name, value in given.items()]
    return "\n".join(["import penstock", "", "answer = penstock.plan(", *lines, ")", 'answer.save("plan.json")'])


def _has_csv(file: PlanFile) -> bool:
    """Whether PyTorch's form of a schedule has words for this one."""
    try:
        schedule_csv(file)
    except (UnsupportedRequest, InvalidPlan):
        return False
    return True


def _shipped(document: ModelProfile | ClusterTopology | str) -> str | None:
    """The name under which a document comes with Penstock."""
    if isinstance(document, str):
        return None
    find = catalogue.profile if isinstance(document, ModelProfile) else catalogue.cluster
    try:
        return document.name if find(document.name) == document else None
    except (NotFound, InvalidDocument):
        return None


def _figures(plan: Plan) -> Iterator[tuple[str, str]]:
    p = plan.prediction
    assert p is not None
    yield "time per global batch", duration(p.time_per_global_batch_ns)
    yield f"stated error ({p.basis} costs)", f"± {percent(p.expected_error)}"
    yield "samples per second", f"{plan.global_batch_size / p.time_per_global_batch_ns * 1e9:,.1f}"
    yield "not computing (bubble)", percent(p.bubble)
    yield "peak memory", amount(p.peak_memory_bytes)
    best = widest(plan.certificates)
    if best is not None:
        yield "no plan of this request can beat", duration(best.bound_ns)
        yield "above that, at most", percent(best.gap)
    yield from pace(p)
    if p.cost_per_sample is not None:
        yield "cost per sample", f"{p.cost_per_sample:.3g}"


def _idle_parts(explained: Explanation) -> list[str]:
    return [part for part in PARTS if any(getattr(each, f"{part}_ns") for each in explained.idle)]


def _idle(explained: Explanation) -> Iterator[tuple[str, list[float]]]:
    """Devices with the same rows: the share of computing, and of each reason to wait."""
    parts = _idle_parts(explained)
    for each in explained.idle[:MAX_ROWS]:
        yield _some(each.devices), [_share(each, "busy"), *(_share(each, part) for part in parts)]


def _share(each: IdleOut, part: str) -> float:
    return float(getattr(each, f"{part}_ns")) / max(1, each.whole_ns)


def _stages(plan: Plan, profile: ModelProfile) -> Iterator[dict[str, Any]]:
    stages = [(p, stage) for p, pipeline in enumerate(plan.pipelines) for stage in pipeline.stages]
    for number, (p, stage) in enumerate(stages):
        first, last = stage.layers
        names = [profile.layers[i].name for i in dict.fromkeys((first, last))]
        yield {
            "number": number,
            "pipeline": p if len(plan.pipelines) > 1 else None,
            "layers": ranges(stage.layers),
            "names": " … ".join(names),
            "parameters": profile.held_bytes(first, last),
            "devices": stage.devices,
            "shown": _some(stage.devices),
            "replicas": replicas(plan, stage),
            "dispatch": stage.dispatch.replace("_", " ") if replicas(plan, stage) > 1 else "–",
            "recompute": recomputed(stage),
            "warmup": plan.schedule.warmup[number] if number < len(plan.schedule.warmup) else None,
        }


def _devices(plan: Plan) -> Iterator[dict[str, Any]]:
    assert plan.prediction is not None
    total = plan.prediction.time_per_global_batch_ns
    for use in plan.prediction.devices[:MAX_ROWS]:
        yield {
            "name": use.device,
            "shares": [share / total for share in (use.busy_ns, use.communication_ns, use.idle_ns)],
            "peak": use.peak_memory_bytes,
            "has": use.memory_bytes,
            "memory": [getattr(use.memory, f"{part}_bytes") for part in MEMORY_PARTS if _is_used(plan, part)],
        }


def _is_used(plan: Plan, part: str) -> bool:
    assert plan.prediction is not None
    return any(getattr(use.memory, f"{part}_bytes") for use in plan.prediction.devices)


def _some(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= 3 else f"{devices[0]} … {devices[-1]} ({len(devices)})"
