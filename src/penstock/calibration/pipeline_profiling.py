"""AvgPipe's profile of a running pipeline: run a plan for some batches and measure each of its ranks.

.. [1] AvgPipe, section 5.2.1: twenty batches with many micro-batches and few pipelines; computation and communication
   time of each stage, how much of its processor it used over its computing time, bytes of model and of data.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from penstock.executor.profiling.busy_clock import BusyClock
from penstock.executor.run.local import RunReport, run_locally
from penstock.planning.judge import Judgement, judge
from penstock.planning.programs.lower import programs
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile, PipelineProfile, PipelineStageMeasurement
from penstock.solvers.costs.memory import activation_bytes, static_bytes
from penstock.solvers.model.timeline import Transfers

SLICES = 20
_WARM_UP = 1
_COMPUTES = re.compile(r"(\d+)(?:[FBIWR]\d+|STEP)")

Spans = list[tuple[int, int]]


class _Batch(NamedTuple):
    """A step as this process observed it: its end (``perf_counter_ns``) and the duration that rank 0 reports."""

    end_ns: int
    time_ns: int


def profile_pipeline(
    file: PlanFile,
    job: str,
    *,
    batches: int = 20,
    directory: Path,
    progress: Callable[[str], None] | None = None,
) -> PipelineProfile:
    """Run the plan for ``batches`` global batches (after one warm-up batch), and measure each stage's rank.

    Ranks run on this machine's CPUs. Computation comes from their traces, utilisation from their processor clocks.
    Communication is the transfers' own time according to the plan's topology, because messages move in
    the background. Raises UnsupportedRequest for a plan of several pipelines or with replicas.
    """
    plan = file.plan
    _refuse(file)
    judgement = judge(file)
    if judgement.faults or judgement.timeline is None or judgement.allocation is None:
        raise InvalidPlan("; ".join(judgement.faults) or "the plan has no timeline")
    lowered = programs(file)
    seen: dict[int, _Batch] = {}
    clocks: list[BusyClock] = []

    def on_progress(event: dict[str, Any]) -> None:
        if event.get("kind") == "step":
            seen[event["step"]] = _Batch(time.perf_counter_ns(), event["time_ns"])
            if progress is not None:
                progress(f"batch {event['step'] + 1} of {batches + _WARM_UP}")

    profile = file.request.profile
    assert isinstance(profile, ModelProfile)
    try:
        report = run_locally(
            lowered,
            job,
            directory=directory,
            steps=batches + _WARM_UP,
            seed=0,
            trace_steps=batches,
            layers=[layer.name for layer in profile.layers],
            on_progress=on_progress,
            on_started=lambda pids: clocks.append(BusyClock(pids)),
        )
    finally:
        for clock in clocks:
            clock.stop()
    measured = _of_stages(report, seen, clocks[0])
    transfers = transfer_times(judgement.timeline.transfers, len(lowered))
    return PipelineProfile(
        plan_hash=plan.content_hash(),
        device_kind=profile.measurements[0].device_kind,
        num_micro_batches=plan.num_micro_batches,
        num_pipelines=1,
        batches=batches,
        ranks=_measurements(judgement, measured, transfers),
    )


def _measurements(
    judgement: Judgement, measured: Mapping[int, tuple[int, tuple[float, ...]]], transfers: tuple[list[int], list[int]]
) -> tuple[PipelineStageMeasurement, ...]:
    """Return the measurement of each stage: measured computation, simulated transfers, memory by the price list."""
    assert judgement.allocation is not None
    measurements = []
    for number, stage in enumerate(judgement.allocation.pipelines[0].stages):
        compute_ns, curve = measured[number]
        static = static_bytes(judgement.problem, stage)
        measurements.append(
            PipelineStageMeasurement(
                compute_ns=compute_ns,
                send_ns=transfers[0][number],
                receive_ns=transfers[1][number],
                utilisation=curve,
                model_bytes=static.parameters + static.gradients,
                optimizer_bytes=static.optimizer,
                activation_bytes=activation_bytes(judgement.problem, stage, judgement.plan.micro_batch_size),
            )
        )
    return tuple(measurements)


def transfer_times(transfers: Transfers, stages: int) -> tuple[list[int], list[int]]:
    """Return the time that each stage's transfers occupy the links in a batch, in nanoseconds."""
    sent, received = [0] * stages, [0] * stages
    lasted = transfers.end_ns - transfers.start_ns
    for stage, direction, time_ns in zip(transfers.stage, transfers.direction, lasted, strict=True):
        sent[int(stage)] += int(time_ns)
        received[int(stage) + (-1 if direction else 1)] += int(time_ns)
    return sent, received


def utilisation(spans: Spans, busy_ns: Callable[[int], float], slices: int = SLICES) -> list[float]:
    """Return processor time over wall-clock time in equal slices of the computing time that ``spans`` add up to.

    ``busy_ns(moment)``: processor time up to a moment. Use between two spans counts to the slice in which it
    occurs, so a slice is capped at a whole processor.
    """
    lengths = [end - start for start, end in spans]
    total = sum(lengths)
    if not total:
        return [0.0] * slices
    passed = [0, *accumulate(lengths)]

    def moment(computed_ns: float) -> int:
        k = max(i for i, before in enumerate(passed[:-1]) if before <= computed_ns)
        return round(spans[k][0] + computed_ns - passed[k])

    edges = [busy_ns(moment(total * k / slices)) for k in range(slices)] + [busy_ns(spans[-1][1])]
    return [min(1.0, (b - a) * slices / total) for a, b in pairwise(edges)]


def _of_stages(
    report: RunReport, seen: dict[int, _Batch], clock: BusyClock
) -> dict[int, tuple[int, tuple[float, ...]]]:
    """Return each stage's computing time per batch (median) and its utilisation curve (mean over batches)."""
    times: dict[int, list[int]] = defaultdict(list)
    curves: dict[int, list[list[float]]] = defaultdict(list)
    for trace in report.rank_traces:
        stage, spans = compute_spans(trace["events"])
        times[stage].append(sum(end - start for start, end in spans))
        batch = seen[trace["step"]]
        begin = batch.end_ns - batch.time_ns
        moved = [(begin + start, begin + end) for start, end in spans]
        if moved:
            curves[stage].append(utilisation(moved, partial(clock.busy_ns, trace["rank"])))
    return {
        stage: (
            round(statistics.median(times[stage])),
            tuple(round(statistics.fmean(column), 4) for column in zip(*curves[stage], strict=True)),
        )
        for stage in times
    }


def compute_spans(events: Sequence[dict[str, Any]]) -> tuple[int, Spans]:
    """Return the stage of a rank's trace, and the intervals in which it computed."""
    stage, spans = 0, []
    for event in events:
        match = _COMPUTES.fullmatch(event["instruction"])
        if match is not None:
            stage = int(match[1])
            spans.append((event["start_ns"], event["end_ns"]))
    return stage, spans


def _refuse(file: PlanFile) -> None:
    pipelines = file.plan.pipelines
    if len(pipelines) != 1:
        raise UnsupportedRequest(
            f"the plan has {len(pipelines)} parallel pipelines; AvgPipe needs a profile of one pipeline",
            remedy="profile a plan of one pipeline, planner gpipe, or avgpipe with --set pipelines=1",
        )
    for number, stage in enumerate(pipelines[0].stages):
        if len(stage.devices) != 1:
            raise UnsupportedRequest(
                f"stage {number} runs on {len(stage.devices)} devices; AvgPipe needs one device per stage"
            )
    devices = [stage.devices[0] for stage in pipelines[0].stages]
    if len(set(devices)) != len(devices):
        raise UnsupportedRequest("several stages share a device; AvgPipe needs one stage per device")
