"""Answers out: candidates and results of the core become plans, predictions and results on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import Literal

from pydantic import ValidationError

from penstock.convert.plans import home_stages
from penstock.convert.requested_degrees import to_degrees
from penstock.convert.requests import inline_documents
from penstock.schemas import plan as wire
from penstock.schemas.api.jobs import Alternative as AlternativeOut
from penstock.schemas.api.jobs import Infeasibility, ResultOut
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.program import KINDS, WEIGHT, print_row
from penstock.schemas.request import FP32_GRADIENTS, PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.costs.charges import untimed
from penstock.solvers.degrees.contract import contract
from penstock.solvers.lowering.meshes import untrained
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Alternative, Bound, JudgedPlan, Result
from penstock.solvers.model.schedule import Pattern, Schedule, kinds_of
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import PERIODIC_RULES


def to_plan(problem: Problem, request: PlanRequest, candidate: JudgedPlan, bounds: tuple[Bound, ...]) -> wire.Plan:
    """Build the plan document of a judged candidate; its numbers are the timeline's."""
    profile, _ = inline_documents(request)
    allocation = candidate.allocation
    return wire.Plan(
        request_hash=request.content_hash(),
        planner=candidate.planner,
        global_batch_size=problem.batch_samples,
        micro_batch_size=most_rows(problem, allocation) * problem.samples_per_row,
        num_micro_batches=allocation.num_micro_batches,
        pipelines=tuple(_wire_pipeline(problem, pipeline) for pipeline in allocation.pipelines),
        update_rule=candidate.update_rule,
        degrees=None if problem.choice is None else to_degrees(problem.choice.degrees),
        sharding=None if problem.choice is None else problem.choice.sharding,
        chosen=dict(problem.values) or None,
        overlap_all_reduce=candidate.overlap_all_reduce,
        schedule=_wire_schedule(problem, allocation, candidate.schedule),
        prediction=to_prediction(problem, profile, candidate.timeline),
        certificates=certificates_of(candidate, bounds),
        assumptions=_assumptions(problem, request, candidate) + _uncounted(candidate),
        versions=_versions(),
        seed=request.seed,
    )


def _wire_pipeline(problem: Problem, pipeline: Pipeline) -> wire.Pipeline:
    coded = [stage.coded[1] for stage in pipeline.stages[:-1]]
    return wire.Pipeline(
        stages=tuple(_wire_stage(problem, stage) for stage in pipeline.stages),
        micro_batches=pipeline.micro_batches,
        codecs=tuple("fp16s" if one else None for one in coded) if any(coded) else None,
    )


def _wire_stage(problem: Problem, stage: Stage) -> wire.Stage:
    recompute: Literal["none", "full"] | tuple[wire.LayerRange, ...] | wire.RecomputedModules
    recompute = "full" if stage.recompute == ((stage.first, stage.last),) else stage.recompute or "none"
    if stage.modules:
        recompute = wire.RecomputedModules(modules=stage.modules)
    return wire.Stage(
        layers=(stage.first, stage.last),
        devices=tuple(gpu.name for d in stage.devices for gpu in problem.gpus(d)),
        dispatch=stage.dispatch,
        recompute=recompute,
    )


def _wire_schedule(problem: Problem, allocation: Allocation, schedule: Schedule) -> wire.PlanSchedule:
    if isinstance(schedule, Pattern):
        return wire.PlanSchedule(
            name=schedule.name,
            pattern=wire.Pattern(
                period_ns=schedule.period_ns,
                micro_batches_per_period=schedule.micro_batches_per_period,
                operations=tuple(
                    wire.PatternOperation(
                        operation=f"{o.stage}{KINDS[o.kind]}{o.micro_batch}", start_ns=o.start_ns, shift=o.shift
                    )
                    for o in schedule.operations
                ),
            ),
        )
    homes = home_stages(allocation)
    texts: dict[str, list[int]] = {}
    printed: dict[tuple[bool, bytes], str] = {}
    for row in schedule.rows:
        by_home: dict[int | None, list[int]] = {}
        for device in row.devices:
            by_home.setdefault(homes[device], []).append(device)
        for home, devices in by_home.items():
            at_home = home is not None and bool((row.operations[:, 1] == home).all())
            key = (at_home, (row.operations[:, ::2] if at_home else row.operations).tobytes())
            if key not in printed:
                printed[key] = print_row([(k, s, m) for k, s, m in row.operations.tolist()], home)
            texts.setdefault(printed[key], []).extend(devices)
    return wire.PlanSchedule(
        name=schedule.name,
        rows=tuple(
            wire.ScheduleRow(devices=tuple(problem.devices[d].name for d in devices), text=text)
            for text, devices in texts.items()
        ),
        warmup=schedule.warmup,
    )


def to_prediction(problem: Problem, profile: ModelProfile, timeline: Timeline) -> wire.Prediction:
    """Return the judge's numbers for a plan. Raises UnsupportedRequest for times and sizes beyond the wire's."""
    try:
        return _prediction(problem, profile, timeline)
    except ValidationError as error:
        first = error.errors()[0]
        raise UnsupportedRequest(
            f"the plan's {first['loc'][-1]} is {first['input']}, which no document can hold: {first['msg']}",
            remedy="check the units: nanoseconds, bytes and bytes per second, in the profile and the topology",
        ) from None


def _prediction(problem: Problem, profile: ModelProfile, timeline: Timeline) -> wire.Prediction:
    devices = tuple(
        wire.DevicePrediction(
            device=problem.devices[d].name,
            busy_ns=use.busy_ns,
            communication_ns=use.communication_ns,
            idle_ns=use.idle_ns,
            peak_memory_bytes=use.memory.total,
            memory_bytes=problem.devices[d].memory_bytes,
            memory=wire.MemoryBreakdown(**{f"{k}_bytes": v for k, v in use.memory._asdict().items()}),
        )
        for d, use in sorted(timeline.uses.items())
    )
    return wire.Prediction(
        time_per_global_batch_ns=timeline.time_per_global_batch_ns,
        fill_ns=timeline.fill_ns,
        drain_ns=timeline.drain_ns,
        bubble=timeline.bubble,
        peak_memory_bytes=timeline.peak_memory_bytes,
        devices=devices,
        basis=profile.source.method,
        expected_error=_expected_error(problem, profile, timeline),
        cost_per_sample=_cost_per_sample(problem, timeline),
        **_pace(problem, profile, timeline),
    )


def _expected_error(problem: Problem, profile: ModelProfile, timeline: Timeline) -> float:
    """Return the profile's stated error, or a larger one for computed costs.

    Kinds with another kind's efficiencies have the larger error, and experts on many GPUs or several nodes.
    """
    error = profile.source.expected_error
    if profile.source.method != "analytic":
        return error
    from penstock.facts import device_table as table

    groups = [problem.gpus(d) for d in timeline.uses]
    sources = (problem.real or problem).kind_source
    kinds = {sources[gpu.kind][0] for gpus in groups for gpu in gpus} & table.DEVICES.keys()
    framework = profile.framework or "torch"
    if any(table.device_facts(kind, framework=framework).like is not None for kind in kinds):
        error = max(error, table.EXTRAPOLATED_EXPECTED_ERROR)
    if problem.degrees.expert == 1:
        return error
    size = problem.degrees.expert_group
    expert_groups = [gpus[at : at + size] for gpus in groups for at in range(0, len(gpus), size)]
    many = size > table.MOST_EXPERT_GPUS or any(len({gpu.node for gpu in group}) > 1 for group in expert_groups)
    return max(error, table.MANY_EXPERTS_EXPECTED_ERROR) if many else error


def _pace(problem: Problem, profile: ModelProfile, timeline: Timeline) -> dict[str, float]:
    """Return tokens per second and GPU, and the part of the GPUs' peak that the model's FLOPs take, where known."""
    if profile.shape is None or profile.parameter_dtype != "bf16":
        return {}
    gpus = [gpu for d in timeline.uses for gpu in problem.gpus(d)]
    seconds = timeline.time_per_global_batch_ns / 1e9
    tokens = problem.batch_samples * profile.shape.sequence_length
    pace = {"tokens_per_s_per_gpu": tokens / seconds / len(gpus)}
    if (share := problem.peak_share(gpus, timeline.time_per_global_batch_ns)) is not None:
        pace["model_flops_utilisation"] = share
    return pace


def _cost_per_sample(problem: Problem, timeline: Timeline) -> float | None:
    prices = [problem.devices[d].price for d in timeline.uses]
    if any(price is None for price in prices):
        return None
    hours = timeline.time_per_global_batch_ns / 3_600_000_000_000
    return sum(price for price in prices if price is not None) * hours / problem.batch_samples


def certificates_of(candidate: JudgedPlan, bounds: Iterable[Bound]) -> tuple[wire.Certificate, ...]:
    """Return the bounds above 0 as documents."""
    return tuple(_certificate(bound, candidate) for bound in bounds if bound.bound_ns > 0)


def _certificate(bound: Bound, candidate: JudgedPlan) -> wire.Certificate:
    """Build the certificate of a bound: the plans that it covers, and the gap that the plan leaves.

    The time of a periodic plan is a mean over some rounds. It can be below the time that every longer run takes: where
    a bound says so, the plan states no more than its time.
    """
    value = candidate.value_ns
    proven = min(bound.bound_ns, value) if candidate.update_rule in PERIODIC_RULES else bound.bound_ns
    assert proven <= value, f"{bound} is above a plan that takes {value} ns"
    return wire.Certificate(
        scope=bound.scope,
        model=bound.model,
        covers=wire.Coverage.of(bound.covers),
        bound_ns=proven,
        tolerance_ns=bound.tolerance_ns,
        gap=value / proven - 1,
        method=bound.method,
    )


def _assumptions(problem: Problem, request: PlanRequest, candidate: JudgedPlan) -> tuple[str, ...]:
    """Return the assumptions of profile and topology, and of work by ranks that the judge does not time."""
    profile, topology = inline_documents(request)
    scaled = tuple(
        f"times on {kind} are those of {source}, divided by {speed:g}"
        for kind, (source, speed) in sorted(problem.kind_source.items())
        if kind != source
    )
    left_out = tuple(each.sentence for each in untimed(problem, candidate.allocation, candidate.update_rule))
    assumptions = profile.assumptions + topology.assumptions + scaled + _measured_collectives(topology)
    further = (*_without_bf16(problem, profile, candidate), *_refused_by_ranks(problem, candidate))
    return assumptions + gradients_of_target(problem, request) + _of_cells(problem) + left_out + further


def _without_bf16(problem: Problem, profile: ModelProfile, candidate: JudgedPlan) -> tuple[str, ...]:
    """Return the kinds of used GPUs whose bf16 was computed at the rate of fp32, though fp16 is quicker there."""
    if profile.source.method != "analytic" or profile.parameter_dtype != "bf16":
        return ()
    from penstock.facts.device_table import DEVICES

    kinds = {gpu.kind for device in candidate.timeline.uses for gpu in problem.gpus(device)}
    peaks = {kind: DEVICES[kind].peak_flops_per_s for kind in sorted(kinds & DEVICES.keys())}
    return tuple(
        f"{kind} has no bf16: computed as fp32, {peak['fp32'] / 1e12:g} TFLOP/s, though its fp16 has "
        f"{peak['fp16'] / 1e12:g}"
        for kind, peak in peaks.items()
        if peak["bf16"] <= peak["fp32"] < peak["fp16"]
    )


def _of_cells(problem: Problem) -> tuple[str, ...]:
    """Return sentences on the meshes of a GPU group, which share micro-batches evenly, and on GPUs outside groups."""
    if problem.real is None or problem.choice is None:
        return ()
    degrees, sentences = problem.choice.degrees, []
    if problem.choice.in_one_stage:
        moves = {"parameters": "parameters are gathered and gradients summed", "gradients": "gradients are summed"}
        sentences.append(
            f"the {problem.samples_per_row} replicas of the one stage run equally many samples of a micro-batch; "
            f"{moves[problem.choice.sharding or 'parameters']} layer by layer, while a neighbouring layer computes, as "
            "if collectives of other groups took none of their links"
        )
    elif degrees.meshes > 1:
        sentences.append(
            f"the {degrees.meshes_in_words} of a cell at {degrees} run equally many samples of a micro-batch"
        )
    used = {gpu for cell in problem.cells for gpu in cell}
    idle = [gpu.name for number, gpu in enumerate(problem.real.devices) if number not in used]
    if idle:
        shown = f"{idle[0]} … {idle[-1]}" if len(idle) > 2 else " and ".join(idle)
        sentences.append(f"{len(idle)} GPUs that fill no cell of {degrees.cell} stay idle: {shown}")
    return tuple(sentences)


def _refused_by_ranks(problem: Problem, candidate: JudgedPlan) -> tuple[str, ...]:
    """Return the reason why `penstock run` would refuse the plan; plans are made for other trainers, too."""
    refusal = untrained(problem, candidate.allocation, candidate.update_rule, candidate.schedule)
    if refusal is None:
        return ()
    return (f"`penstock run` refuses this plan, which may be exported: {refusal.why} (remedy: {refusal.remedy})",)


def _measured_collectives(topology: ClusterTopology) -> tuple[str, ...]:
    rows = topology.collectives or ()
    if not rows:
        return ()
    spans = {(row.devices_per_node, row.nodes) for row in rows}
    among = ", ".join(f"{devices} × {nodes}" for devices, nodes in sorted(spans))
    return (
        f"collectives take the times of the topology's {len(rows)} measurements among {among} devices × nodes; "
        "among others, those of its links",
    )


def gradients_of_target(problem: Problem, request: PlanRequest) -> tuple[str, ...]:
    """Return a sentence on the width of the gradients of 16-bit parameters, with bytes per parameter.

    The width is compared with the target's, else with the width of the trainer whose kernels the profile has, else with
    Penstock's. The result is empty for a trainer without a fixed width, and for parameters in fp32, whose gradients are
    as wide. Eager torch's kernels count as FSDP2 where the request says fp32.
    """
    profile, _ = inline_documents(request)
    wide = problem.memory.gradient_factor == 2
    keeper = "FSDP2" if request.target is None and profile.framework == "torch" and wide else None
    keeper = keeper or request.target or profile.framework or "Penstock"
    if profile.parameter_dtype == "fp32" or keeper not in ("FSDP2", "Penstock", *FP32_GRADIENTS):
        return ()
    rules = problem.memory
    kept_bytes, states = 2 + 2 * rules.gradient_factor, 2 * rules.state_factor
    shared = f"{kept_bytes} bytes per parameter and {states} shared out over its replicas"
    bytes_text = shared if rules.shard_states else f"{kept_bytes + states} bytes per parameter"
    if wide:
        return (f"{keeper} keeps gradients in fp32: {bytes_text}",)
    return (
        f"gradients in the parameters' {profile.parameter_dtype}, as requested, not in {keeper}'s fp32: {bytes_text}",
    )


def _uncounted(candidate: JudgedPlan) -> tuple[str, ...]:
    """Return sentences on memory that ranks hold and no profile states, so that no prediction has it."""
    sentences = []
    if WEIGHT in kinds_of(candidate.schedule):
        sentences.append(
            "memory has a stash until the weight half of its backward, and not the gradients that wait between the "
            "halves, which the profile does not have"
        )
    if any(first == 0 for stage in candidate.allocation.stages for first, _last in stage.recompute):
        sentences.append(
            "memory does not have the samples that the first layers are recomputed from, whose size the profile does "
            "not have"
        )
    return tuple(sentences)


@cache
def _installed_version() -> str:
    return version("penstock")


def _versions() -> dict[str, str]:
    return {"penstock": _installed_version()}


def to_result(problem: Problem, request: PlanRequest, result: Result) -> ResultOut:
    """Build the document of a planner's result."""
    if result.choice is not None:
        problem = contract(problem, result.choice)
    plan = to_plan(problem, request, result.best, result.bounds) if result.best is not None else None
    shortage = result.shortage
    infeasibility = None
    if result.status in ("infeasible", "none_found"):
        infeasibility = Infeasibility(
            sentence=result.sentence,
            stage=_layer_range(problem, shortage.first_layer, shortage.last_layer) if shortage else None,
            device=problem.devices[shortage.device].name if shortage else None,
            missing_bytes=shortage.missing_bytes if shortage else None,
            remedy=shortage.remedy if shortage else None,
        )
    return ResultOut(
        status=result.status.value,
        why=result.why,
        infeasibility=infeasibility,
        plan_hash=plan.content_hash() if plan else None,
        plan=plan,
        certificates=plan.certificates if plan else (),
        seconds=result.seconds,
        alternatives=tuple(_alternative(each) for each in result.alternatives),
    )


def _alternative(row: Alternative) -> AlternativeOut:
    choice = row.choice
    return AlternativeOut(
        degrees=to_degrees(choice.degrees),
        sharding=choice.sharding,
        excluded=choice.excluded,
        chosen=dict(choice.values) or None,
        time_ns=row.value_ns,
        peak_memory_bytes=row.peak_bytes,
        bound_ns=row.bound_ns,
        why=row.why,
    )


def _layer_range(problem: Problem, first: int, last: int) -> str:
    return f"layers {first}–{last} ({problem.layer_names[first]} … {problem.layer_names[last]})"
