"""``penstock.calibrate``: fit a profile and a topology to the measurements of a run's ranks.

Layers are fitted to the times of stages, links to the times of messages (``penstock.calibration``). Time that no
instruction accounts for (barriers, a delayed rank) is then spread over all computation by one factor, so that the
simulated time of the plans that were run is right on average. What is left, plan by plan, is the remaining error; the
profile states that error, or that factor where it is larger, as its expected error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log
from statistics import geometric_mean, median

import numpy as np

from penstock.calibration.comparing import measured_note
from penstock.calibration.cost_fit import fit
from penstock.calibration.links import changed, changes
from penstock.calibration.observations import Observations, StageTime, StepTime, observe
from penstock.calibration.scaling import followed, scaled, with_times
from penstock.calibration.trust import refuse_large, refuse_other_hardware, with_factor_stated
from penstock.convert import from_plan, to_problem
from penstock.convert.requested_degrees import at_choice_of
from penstock.planning.judge import judge
from penstock.schemas.api.calibration import CalibratedRun, CalibrationOut, CalibrationRequest
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.errors import InvalidDocument, InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import Measurement, ModelProfile, ProfileSource
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace
from penstock.solvers.model.problem import Problem

LEAST_ERROR = 0.01
"""The smallest expected error that a calibrated profile states: two runs of one plan differ by as much."""


@dataclass(frozen=True)
class Compared:
    """A plan that was run: its measured (median) time, and its predicted time before and after the calibration.

    ``note``: why the measured time differs, where the ranks recorded it.
    """

    plan_hash: str
    measured_ns: int
    before_ns: int
    after_ns: int
    note: str | None = None

    @property
    def error(self) -> float:
        """Return the relative error of the prediction after the calibration."""
        return self.after_ns / self.measured_ns - 1


@dataclass(frozen=True)
class Calibration:
    """The calibrated profile and topology, and how well they explain the runs.

    ``unaccounted``: the factor over all computation beyond the instructions' own time. ``issue_ns``: time per operation
    for issuing messages and releasing them; it is part of the layers' times.
    """

    profile: ModelProfile
    topology: ClusterTopology
    runs: tuple[Compared, ...]
    unaccounted: float
    issue_ns: float
    num_messages: int

    def out(self) -> CalibrationOut:
        """Return the calibration as a document."""
        return CalibrationOut(
            profile=self.profile,
            topology=self.topology,
            runs=tuple(CalibratedRun(**asdict(run)) for run in self.runs),
            unaccounted=self.unaccounted,
            issue_ns=self.issue_ns,
            num_messages=self.num_messages,
            expected_error=self.profile.source.expected_error,
        )


def answer(request: CalibrationRequest, _terms: Terms = NO_TERMS) -> CalibrationOut:
    """Answer a calibration request with a document. Raises as ``calibrate``."""
    return calibrate(request.profile, request.traces, links=request.links, any_factor=request.any_factor).out()


def calibrate(
    profile: ModelProfile, traces: Sequence[Trace], *, links: bool = True, any_factor: bool = False
) -> Calibration:
    """Fit a profile, and the topology that the traces' plans share, to traces (``links``: to both).

    ``any_factor``: accept costs that change by more than ``LARGEST_FACTOR``; the profile then states that factor.

    Raises InvalidDocument without a trace, for one without its plan or of another model, and for different clusters;
    UnsupportedRequest where operations share a device at the same time, so that their times are no costs, where ranks
    computed on other hardware than the costs are for, and for too large a factor.
    """
    if not traces:
        raise InvalidDocument(
            "there is no trace to calibrate from", remedy="record one: penstock run plan.json --trace trace.json"
        )
    files = [_file_of(trace, profile) for trace in traces]
    topology = _topology(files)
    problems = [_problem(file, profile, topology) for file in files]
    seen = []
    for trace, file, problem in zip(traces, files, problems, strict=True):
        refuse_other_hardware(trace, problem)
        seen.append(observe(trace, problem, from_plan(file.plan, problem)[0]))
    messages = [message for one in seen for message in one.messages]
    after = changed(topology, changes(problems[0], topology, messages)) if links else topology
    fitted = followed(profile, _fitted(profile, problems[0], seen))
    factor = _unaccounted(traces, files, fitted, after)
    scaled = _scaled(fitted, factor)
    runs = tuple(
        Compared(
            file.plan.content_hash(),
            _measured_ns(trace),
            _judged_ns(file, profile, topology),
            _judged_ns(file, scaled, after),
            measured_note([rank.hardware for rank in trace.ranks if rank.hardware is not None]),
        )
        for trace, file in zip(traces, files, strict=True)
    )
    largest, run = _largest_factor(runs, factor)
    if not any_factor:
        refuse_large(largest, run.measured_ns, run.before_ns, run.note)
    notes = tuple(f"the run of plan {run.plan_hash[:15]} was {run.note}" for run in runs if run.note is not None)
    update = {"source": _source(runs, factor), "assumptions": (*scaled.assumptions, *notes)}
    return Calibration(
        with_factor_stated(scaled.model_copy(update=update), largest),
        after,
        runs,
        factor,
        median(one.issue_ns for one in seen),
        len(messages),
    )


def _file_of(trace: Trace, profile: ModelProfile) -> PlanFile:
    """Return the plan file of a trace. Raises as ``calibrate``."""
    file = trace.plan_file
    if file is None:
        raise InvalidDocument(
            f"the trace of plan {trace.plan_hash} does not hold the plan",
            remedy="write it with this version's `penstock run --trace`, or put the plan file into its `plan_file`",
        )
    if not trace.measured_times_per_global_batch_ns or not trace.ranks:
        raise InvalidDocument(f"the trace of plan {trace.plan_hash} has no measured step")
    run = file.request.profile
    assert isinstance(run, ModelProfile)
    names, wanted = ([layer.name for layer in each.layers] for each in (run, profile))
    if names != wanted:
        differs = next((i for i, pair in enumerate(zip(names, wanted, strict=False)) if pair[0] != pair[1]), len(names))
        raise InvalidDocument(
            f"the trace is of {run.name!r} with {len(names)} layers, the profile is of {profile.name!r} with "
            f"{len(wanted)}; they differ from layer {differs} on",
            remedy="calibrate the profile that the plan was made from",
        )
    if file.plan.update_rule == "elastic_averaging" and len(file.plan.pipelines) > 1:
        raise UnsupportedRequest(
            "operations of pipelines that share a device slow each other down, so their times are not costs",
            remedy="calibrate from a run of one pipeline",
        )
    return file


def _topology(files: Sequence[PlanFile]) -> ClusterTopology:
    first = files[0].request.topology
    assert isinstance(first, ClusterTopology)
    for file in files[1:]:
        if file.request.topology != first:
            raise InvalidDocument(
                "the traces are of plans for different clusters", remedy="calibrate from the runs of one cluster"
            )
    return first


def _problem(file: PlanFile, profile: ModelProfile, topology: ClusterTopology) -> Problem:
    problem = to_problem(file.request.model_copy(update={"profile": profile, "topology": topology}))
    return at_choice_of(problem, file.plan)


def _measured_ns(trace: Trace) -> int:
    return round(median(trace.measured_times_per_global_batch_ns))


def _judged_ns(file: PlanFile, profile: ModelProfile, topology: ClusterTopology) -> int:
    """Return the simulated time of a plan under other costs, in nanoseconds."""
    request = file.request.model_copy(update={"profile": profile, "topology": topology})
    plan = file.plan.model_copy(update={"prediction": None, "request_hash": request.content_hash()})
    timeline = judge(PlanFile(plan=plan, request=request)).timeline
    if timeline is None:
        raise InvalidPlan("the plan of the trace cannot be simulated", remedy="see `penstock verify`")
    return timeline.time_per_global_batch_ns


# ---- the profile -----------------------------------------------------------------------------------------------------


def _fitted(profile: ModelProfile, problem: Problem, seen: Sequence[Observations]) -> ModelProfile:
    stages: dict[tuple[str, int], list[StageTime]] = defaultdict(list)
    for one in (stage for each in seen for stage in each.stages):
        source, speed = problem.kind_source[one.device_kind]
        stages[source, one.rows].append(one._replace(device_kind=source, time_ns=one.time_ns * speed))
    fitted = {key: _fitted_layers(problem, key, times) for key, times in stages.items()}
    measurements = list(profile.measurements)
    for kind in {kind for kind, _ in fitted}:
        factors = {rows: costs for (source_kind, rows), costs in fitted.items() if source_kind == kind}
        measurements = [one if one.device_kind != kind else _moved(one, factors, problem) for one in measurements]
        sizes = {one.micro_batch_size for one in measurements if one.device_kind == kind}
        for rows in sorted(set(factors) - sizes):
            measurements.append(_measurement(problem, profile, kind, rows, factors[rows]))
    update_ns = _fitted_updates(problem, [step for each in seen for step in each.steps])
    layers = tuple(
        layer.model_copy(update={"update_ns": ns}) for layer, ns in zip(profile.layers, update_ns, strict=True)
    )
    ordered = sorted(measurements, key=lambda one: (profile.device_kinds.index(one.device_kind), one.micro_batch_size))
    return profile.model_copy(update={"layers": layers, "measurements": tuple(ordered)})


Layers = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Forward, input gradients, weight gradients of each layer, (L,) float64, ns."""


def _layers_of(problem: Problem, kind: str, rows: int) -> Layers:
    costs = problem.costs(kind, rows)
    sums = costs.forward_ns, costs.backward_ns, costs.weight_ns
    forward, backward, weight = (np.diff(each).astype(np.float64) for each in sums)
    return forward, backward - weight, weight


def _fitted_layers(problem: Problem, key: tuple[str, int], times: Sequence[StageTime]) -> Layers:
    """Return the cost per layer of forward, input and weight gradients; a backward is both plus its recomputation."""
    count = problem.num_layers
    parts = np.zeros((len(times), 3 * count))
    for row, one in enumerate(times):
        for letter, start in (("F", 0), ("I", count), ("W", 2 * count)):
            if one.letter == letter or (one.letter == "B" and letter in "IW"):
                parts[row, start + one.first : start + one.last + 1] = 1
        for first, last in one.again:
            parts[row, first : last + 1] += 1
    prior = np.concatenate(_layers_of(problem, *key))
    costs = fit(parts, np.array([one.time_ns for one in times]), prior)
    return costs[:count], costs[count : 2 * count], costs[2 * count :]


def _moved(measurement: Measurement, layers_by_rows: dict[int, Layers], problem: Problem) -> Measurement:
    """Return a measurement with each layer scaled as at the nearest number of rows that was observed."""
    rows = min(layers_by_rows, key=lambda seen: abs(log(seen / measurement.micro_batch_size)))
    before = _layers_of(problem, measurement.device_kind, rows)
    forward, inputs, weight = (
        after / np.maximum(prior, 1.0) if prior.any() else np.ones_like(prior)
        for prior, after in zip(before, layers_by_rows[rows], strict=True)
    )
    layers = []
    for i, layer in enumerate(measurement.layers):
        part = layer.weight_ns
        times = layer.forward_ns * forward[i], (layer.backward_ns - part) * inputs[i], part * weight[i]
        if measurement.micro_batch_size == rows:
            times = tuple(float(each[i]) for each in layers_by_rows[rows])  # type: ignore[assignment]
        layers.append(with_times(layer, *times))
    return measurement.model_copy(update={"layers": tuple(layers)})


def _measurement(problem: Problem, profile: ModelProfile, kind: str, rows: int, fitted: Layers) -> Measurement:
    """Return the measurement of a size that the profile lacks; its memory is scaled from the profile's."""
    costs = problem.costs(kind, rows)
    kept = np.diff(costs.stash_bytes)
    template = next(one for one in profile.measurements if one.device_kind == kind)
    layers = []
    for i, layer in enumerate(template.layers):
        sizes = {"stash_bytes": int(kept[i]), "workspace_bytes": int(costs.workspace_bytes[i])}
        layers.append(with_times(layer.model_copy(update=sizes), *(float(each[i]) for each in fitted)))
    return template.model_copy(update={"micro_batch_size": rows, "layers": tuple(layers)})


def _fitted_updates(problem: Problem, steps: Sequence[StepTime]) -> list[int]:
    """Return ``update_ns`` of each layer; where the profile has no times, in proportion to the parameters."""
    before = np.diff(problem.update_ns).astype(np.float64)
    if not steps:
        return [int(each) for each in before]
    prior = before if before.any() else np.diff(problem.trainable_bytes).astype(np.float64)
    parts = np.zeros((len(steps), problem.num_layers))
    for row, one in enumerate(steps):
        parts[row, one.first : one.last + 1] = 1 / one.sharers
    return [round(each) for each in fit(parts, np.array([one.time_ns for one in steps]), prior)]


def _unaccounted(
    traces: Sequence[Trace], files: Sequence[PlanFile], profile: ModelProfile, topology: ClusterTopology
) -> float:
    """Return the factor on all computation that makes simulated times right on average, by a few secant steps."""
    factor = 1.0
    for _ in range(3):
        scaled = _scaled(profile, factor)
        factor *= geometric_mean(
            _measured_ns(trace) / _judged_ns(file, scaled, topology) for trace, file in zip(traces, files, strict=True)
        )
    return factor


def _largest_factor(runs: Sequence[Compared], factor: float) -> tuple[float, Compared]:
    """Return the largest factor, either way, on a run's time or beyond its instructions, and that run."""
    factors = [(run.measured_ns / max(1, run.before_ns), run) for run in runs]
    return max([*factors, (factor, runs[0])], key=lambda pair: abs(log(pair[0])))


def _scaled(profile: ModelProfile, factor: float) -> ModelProfile:
    for kind in profile.device_kinds:
        profile = scaled(profile, kind, factor)
    return profile


def _source(runs: Sequence[Compared], factor: float) -> ProfileSource:
    worst = max(abs(run.error) for run in runs)
    what = ", ".join(f"{run.plan_hash[:15]} ({run.error:+.1%})" for run in runs)
    return ProfileSource(
        method="calibrated",
        description=f"from runs of the plans {what}, by remaining error; {factor - 1:+.1%} beyond the instructions",
        expected_error=round(min(1.0, max(worst, abs(factor - 1), LEAST_ERROR)), 4),
    )
