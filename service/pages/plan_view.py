"""What a plan's page shows: its figures, its bounds in words, where its time goes, and how to get the same again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from penstock.manifests import TARGETS
from penstock.planning.bound_sentences import bound_sentence, bound_sentences, widest
from penstock.planning.explain import Judged
from penstock.planning.plan_schedules import schedule_csv
from penstock.planning.sentences import pace, replicas, subtitle
from penstock.report.cluster_map import cluster_map, traffic_table
from penstock.report.device_names import alike, idle_sentence, num_used, times, together
from penstock.report.drawing.picture import Picture, rows_in_words
from penstock.report.explained import PARTS, SPANS, in_words, largest_shares, path_words
from penstock.report.gists import alike_devices, cluster_words, devices_words, some, stages_words
from penstock.report.memory import fullest, peaks
from penstock.report.page import SMALL_DEVICES, SMALL_STAGES
from penstock.report.traffic import traffic
from penstock.schemas.amounts import amount, duration, percent, ranges
from penstock.schemas.api.explanation import Explanation, IdleOut
from penstock.schemas.api.words import recomputed
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology
from penstock.service.pages.commands import command, python, uses

MAX_ROWS = 100
MEMORY_PARTS = (
    "parameters", "gradients", "optimizer", "versions", "activations", "buffers", "workspace", "context",
)  # fmt: skip


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
        "other_version": other_version(plan),
        "figures": list(_figures(plan)),
        "said": list(_said(plan, topology, explained)),
        "bounds": list(bound_sentences(plan)),
        "subtitle": subtitle(plan, topology),
        "rows_in_words": rows_in_words(drawn),
        "gists": _gists(plan, topology, profile, explained, drawn),
        "in_words": in_words(explained),
        "sentences": explained.sentences,
        "explained": explained,
        "span": SPANS[explained.path.span],
        "shares": largest_shares(explained.path),
        "idle_heads": [PARTS[part] for part in _idle_parts(explained)],
        "idle": list(_idle(explained)),
        "stages": list(_stages(plan, profile)),
        "num_stages": sum(len(pipeline.stages) for pipeline in plan.pipelines),
        "small_stages": SMALL_STAGES,
        "is_small": topology.num_devices <= SMALL_DEVICES,
        "devices": list(_devices(plan)),
        "memory_parts": [part for part in MEMORY_PARTS if _is_used(plan, part)],
        "num_devices": len(alike(plan.prediction.devices)),
        "peaks": peaks(drawn),
        "cluster_map": cluster_map(plan, topology, flows),
        "traffic": traffic_table(plan, flows, [device.name for device in found.problem.devices]),
        "assumptions": [*plan.assumptions, *(a for a in profile.assumptions if a not in plan.assumptions)],
        "has_csv": _has_csv(file),
        "uses": uses(num_used(plan)),
        "targets": _listed([name for name in TARGETS if name not in ("sbatch", "jobset")]),
        "command": command(file.request),
        "python": python(file.request),
    }


def other_version(plan: Plan) -> str | None:
    """Return what is said of a plan that another version of Penstock made; None of one that this version made."""
    made, here = plan.versions.get("penstock"), version("penstock")
    if made is None or made == here:
        return None
    return (
        f"Penstock {made} made this plan, and this is {here}. All figures below are those of {here}; where they differ "
        "from what the plan states, it is said above. Plan again with changes asks this version."
    )


def _said(plan: Plan, topology: ClusterTopology, explained: Explanation) -> Iterator[str]:
    """Yield what the first screen says in sentences: what binds, who is idle, how good the plan is."""
    assert plan.prediction is not None
    yield in_words(explained)
    if (idle := idle_sentence(plan, topology)) is not None:
        yield idle
    if (bound := widest(plan.certificates)) is not None:
        yield bound_sentence(bound, plan.prediction.time_per_global_batch_ns)


def _gists(
    plan: Plan, topology: ClusterTopology, profile: ModelProfile, explained: Explanation, drawn: Picture
) -> dict[str, str]:
    """Return one line for each part of the page that is opened on demand."""
    number = len(plan.certificates)
    return {
        "explained": path_words(explained),
        "stages": stages_words(plan),
        "cluster": cluster_words(plan, topology),
        "memory": fullest(drawn),
        "devices": devices_words(plan),
        "about": f"{number} proven bound{'' if number == 1 else 's'}, {profile.source.method} costs",
    }


def _has_csv(file: PlanFile) -> bool:
    """Whether PyTorch's form of a schedule has words for this one."""
    try:
        schedule_csv(file)
    except (UnsupportedRequest, InvalidPlan):
        return False
    return True


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
        yield "proven lower bound", duration(best.bound_ns)
        yield "gap to the bound", percent(best.gap)
    yield from pace(p)
    if p.cost_per_sample is not None:
        yield "cost per sample", f"{p.cost_per_sample:.3g}"


def _idle_parts(explained: Explanation) -> list[str]:
    return [part for part in PARTS if any(getattr(each, f"{part}_ns") for each in explained.idle)]


def _idle(explained: Explanation) -> Iterator[tuple[str, list[float]]]:
    """Devices with the same rows: the share of computing, and of each reason to wait."""
    parts = _idle_parts(explained)
    for each in explained.idle[:MAX_ROWS]:
        shares = [_share(each, "busy"), *(_share(each, part) for part in parts)]
        yield alike_devices(each.devices, each.num_gpus), shares


def _share(each: IdleOut, part: str) -> float:
    return float(getattr(each, f"{part}_ns")) / max(1, each.whole_ns)


def _stages(plan: Plan, profile: ModelProfile) -> Iterator[dict[str, Any]]:
    stages = [(p, stage) for p, pipeline in enumerate(plan.pipelines) for stage in pipeline.stages]
    for number, (p, stage) in enumerate(stages[:MAX_ROWS]):
        first, last = stage.layers
        names = [profile.layers[i].name for i in dict.fromkeys((first, last))]
        yield {
            "number": number,
            "pipeline": p if len(plan.pipelines) > 1 else None,
            "layers": ranges(stage.layers),
            "names": " … ".join(names),
            "parameters": profile.held_bytes(first, last),
            "shown": some(stage.devices),
            "every": ", ".join(stage.devices) if len(stage.devices) <= MAX_ROWS else "",
            "replicas": replicas(plan, stage),
            "dispatch": stage.dispatch.replace("_", " ") if replicas(plan, stage) > 1 else "–",
            "recompute": recomputed(stage),
            "warmup": plan.schedule.warmup[number] if number < len(plan.schedule.warmup) else None,
        }


def _devices(plan: Plan) -> Iterator[dict[str, Any]]:
    assert plan.prediction is not None
    total = plan.prediction.time_per_global_batch_ns
    for use, count in alike(plan.prediction.devices)[:MAX_ROWS]:
        yield {
            "name": times(use.device, count * together(plan)),
            "shares": [share / total for share in (use.busy_ns, use.communication_ns, use.idle_ns)],
            "peak": use.peak_memory_bytes,
            "has": use.memory_bytes,
            "memory": [getattr(use.memory, f"{part}_bytes") for part in MEMORY_PARTS if _is_used(plan, part)],
        }


def _is_used(plan: Plan, part: str) -> bool:
    assert plan.prediction is not None
    return any(getattr(use.memory, f"{part}_bytes") for use in plan.prediction.devices)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
