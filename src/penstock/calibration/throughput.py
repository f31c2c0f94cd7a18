"""``penstock.calibrate_throughput``: fold the pace of one run into the computation of one kind of device.

One figure determines only one number: all computation on the plan's kind of device is multiplied by one factor, found
with the judge, such that the plan takes the measured time. Communication and updates stay as predicted, so the factor
also takes up their errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.calibration.scaling import scaled, with_kind
from penstock.calibration.trust import refuse_large, with_factor_stated
from penstock.convert import from_plan, to_problem
from penstock.convert.requested_degrees import at_choice_of
from penstock.schemas.amounts import duration
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.api.throughput import PredictedPlan, ThroughputOut, ThroughputRequest
from penstock.schemas.errors import InvalidDocument, InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.verify.verifier import check_allocation, check_rows, check_rule

PRECISION = 1e-4
"""The part of the measured time by which the prediction may differ."""
_MOST_FACTOR = 1e4
_ROUNDS = 60


class _Run(NamedTuple):
    """A plan, and the devices whose computation is calibrated."""

    file: PlanFile
    kind: str
    gpus: int

    @property
    def profile(self) -> ModelProfile:
        """The profile of the request, with costs of the kind."""
        profile, topology = self.file.request.profile, self.file.request.topology
        assert isinstance(profile, ModelProfile)
        assert isinstance(topology, ClusterTopology)
        return _with_costs(profile, topology, self.kind)

    def time_ns(self, factor: float = 1.0) -> int:
        """Return the plan's time with all computation multiplied."""
        return _simulated(self.file, scaled(self.profile, self.kind, factor))[1].time_per_global_batch_ns

    def pace(self, time_ns: int) -> float | None:
        """Return tokens per second and GPU in use; None where the length of a sample is not known."""
        shape = self.profile.shape
        if shape is None:
            return None
        return self.file.request.global_batch_size * shape.sequence_length * 1e9 / time_ns / self.gpus


def answer(request: ThroughputRequest, _terms: Terms = NO_TERMS) -> ThroughputOut:
    """Answer a request with a document. Raises as ``calibrate_throughput``."""
    return calibrate_throughput(
        request.plan_file,
        tokens_per_s_per_gpu=request.tokens_per_s_per_gpu,
        step_ns=request.step_ns,
        profile=request.profile,
        show=request.show,
        any_factor=request.any_factor,
    )


def calibrate_throughput(
    plan: PlanFile,
    *,
    tokens_per_s_per_gpu: float | None = None,
    step_ns: int | None = None,
    profile: ModelProfile | None = None,
    show: Sequence[PlanFile] = (),
    any_factor: bool = False,
) -> ThroughputOut:
    """Multiply the computation of the plan's kind of device such that the plan takes the measured time.

    Parameters
    ----------
    plan
        The plan that was run, with its request: one of ``penstock plan``, or ``even_layout(…).file``.
    tokens_per_s_per_gpu, step_ns
        The measured pace: one of the two.
    profile
        The profile that is multiplied by the factor; None: the plan's own profile. It may be of another shape.
    show
        Plans that use devices of the same kind, predicted before and after.
    any_factor
        Accept a factor beyond ``LARGEST_FACTOR``, which the profile then states.

    Raises InvalidDocument for no figure or two, or where tokens cannot be counted; InvalidPlan for a plan that does not
    verify. Raises UnsupportedRequest for devices of several kinds, for a time below the time of communication alone,
    and for too large a factor.
    """
    run = _run_of(plan)
    measured_ns = _measured_ns(run, tokens_per_s_per_gpu, step_ns)
    least_ns, before_ns = run.time_ns(0.0), run.time_ns()
    if measured_ns <= least_ns:
        raise UnsupportedRequest(
            f"the run took {duration(measured_ns)} per global batch, but its communication and updates alone are "
            f"predicted to take {duration(least_ns)} (with computation on {run.kind}: {duration(before_ns)})",
            remedy="check the figure, the number of GPUs and the layout, or measure the links: `penstock probe`",
        )
    others = [_run_of(other, run.kind) for other in show]
    factor = _factor(run, measured_ns, before_ns)
    if not any_factor:
        refuse_large(factor, measured_ns, before_ns, None)
    target = run.profile if profile is None else _with_costs_of_run(profile, run)
    return ThroughputOut(
        profile=with_factor_stated(_calibrated(target, run, factor, measured_ns), factor),
        device_kind=run.kind,
        factor=factor,
        measured_ns=measured_ns,
        least_ns=least_ns,
        run=_predicted(run, factor),
        shown=tuple(_predicted(other, factor) for other in others),
    )


def _run_of(file: PlanFile, kind: str | None = None) -> _Run:
    """Return a plan whose devices in use are all of one kind; ``kind`` is one that has to be among them.

    Its memory is not checked, since the plan was run.
    """
    problem, timeline = _simulated(file)
    used = [gpu for device in timeline.uses for gpu in problem.gpus(device)]
    kinds = sorted({gpu.kind for gpu in used})
    if kind is not None and kind not in kinds:
        raise UnsupportedRequest(
            f"the plan {file.plan.content_hash()} to show uses {', '.join(kinds)}, but the run was on {kind}",
            remedy=f"show plans for {kind}",
        )
    if kind is None and len(kinds) > 1:
        raise UnsupportedRequest(
            f"the plan uses devices of {len(kinds)} kinds, {', '.join(kinds)}: one figure cannot calibrate several "
            "kinds",
            remedy="calibrate from a run on one kind, or from a trace",
        )
    return _Run(file, kind or kinds[0], len(used))


def _with_costs(profile: ModelProfile, topology: ClusterTopology, kind: str) -> ModelProfile:
    """Return the profile with the kind's costs written out, where its topology scales them from another kind."""
    source = topology.costed_from(kind, profile.device_kinds)
    return profile if source is None or source[0] == kind else with_kind(profile, kind, *source)


def _with_costs_of_run(profile: ModelProfile, run: _Run) -> ModelProfile:
    """Return another profile with costs of the run's kind."""
    topology = run.file.request.topology
    assert isinstance(topology, ClusterTopology)
    ready = _with_costs(profile, topology, run.kind)
    if run.kind not in ready.device_kinds:
        raise InvalidDocument(
            f"the profile {profile.name!r} has costs of {', '.join(ready.device_kinds)}, but the run was on {run.kind}",
            remedy=f"`penstock profile --analytic {run.kind}` computes costs of this kind for a known model",
        )
    return ready


def _measured_ns(run: _Run, tokens_per_s_per_gpu: float | None, step_ns: int | None) -> int:
    if (tokens_per_s_per_gpu is None) == (step_ns is None):
        raise InvalidDocument("give either tokens per second and GPU or the time of a step, not both")
    if step_ns is not None:
        return step_ns
    assert tokens_per_s_per_gpu is not None
    if tokens_per_s_per_gpu <= 0:
        raise InvalidDocument(f"tokens per second and GPU have to be above 0, not {tokens_per_s_per_gpu:g}")
    unit = run.pace(10**9)
    if unit is None:
        raise InvalidDocument(
            f"the profile {run.profile.name!r} does not say how many tokens a sample has",
            remedy="give the time of a step, such as 850ms",
        )
    return max(1, round(unit / tokens_per_s_per_gpu * 1e9))


def _simulated(file: PlanFile, profile: ModelProfile | None = None) -> tuple[Problem, Timeline]:
    """Return the plan's problem and timeline, under the costs of another profile if there is one.

    Raises InvalidPlan.
    """
    plan, request = file.plan, file.request
    if plan.request_hash != request.content_hash():
        raise InvalidPlan(
            f"the plan was made for the request {plan.request_hash}, not for the given one {request.content_hash()}",
            remedy="give plan and request as one file, as `penstock plan` writes them",
        )
    changed = request if profile is None else request.model_copy(update={"profile": profile})
    problem = at_choice_of(to_problem(changed), plan)
    allocation, schedule = from_plan(plan, problem)
    faults = check_allocation(problem, allocation, plan.update_rule)
    faults = faults or check_rule(problem, allocation, schedule, plan.update_rule)
    if isinstance(schedule, Orders) and not faults:
        faults = check_rows(problem, allocation, schedule, plan.update_rule)
    if faults:
        raise InvalidPlan(f"the plan {plan.content_hash()} does not verify: {faults[0]}")
    timeline = simulate(problem, allocation, schedule, overlap=plan.overlap_all_reduce, update_rule=plan.update_rule)
    return problem, timeline


def _factor(run: _Run, measured_ns: int, before_ns: int) -> float:
    """Find the factor by bisection, from a bracket that doubles.

    Orders are fixed, so more computation never takes less time in sum.
    """
    low, high = (1.0, 1.0) if before_ns == measured_ns else (0.0, 1.0) if before_ns > measured_ns else (1.0, 2.0)
    while before_ns < measured_ns and run.time_ns(high) < measured_ns:
        low, high = high, 2 * high
        if high > _MOST_FACTOR:
            raise UnsupportedRequest(
                f"the run took {duration(measured_ns)} per global batch, {measured_ns / before_ns:,.0f} times the "
                f"predicted {duration(before_ns)}",
                remedy="check the figure and its unit",
            )
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        time_ns = run.time_ns(middle)
        if math.isclose(time_ns, measured_ns, rel_tol=PRECISION):
            return middle
        low, high = (middle, high) if time_ns < measured_ns else (low, middle)
    return (low + high) / 2


def _predicted(run: _Run, factor: float) -> PredictedPlan:
    before_ns, after_ns = run.time_ns(), run.time_ns(factor)
    return PredictedPlan(
        plan_hash=run.file.plan.content_hash(),
        model=run.profile.name,
        before_ns=before_ns,
        after_ns=after_ns,
        tokens_per_s_per_gpu_before=run.pace(before_ns),
        tokens_per_s_per_gpu_after=run.pace(after_ns),
    )


def _calibrated(profile: ModelProfile, run: _Run, factor: float, measured_ns: int) -> ModelProfile:
    """Return the profile with the factor applied and stated.

    One figure corrects the level of a kind, not the differences between plans: the expected error stays.
    """
    pace = run.pace(measured_ns)
    figure = duration(measured_ns) + ("" if pace is None else f" ({pace:,.0f} tokens/s per GPU)")
    plan = run.file.plan.content_hash()[:15]
    source = profile.source.model_copy(
        update={
            "method": "calibrated",
            "description": f"computation of {run.kind} × {factor:.4g}, from one run of the plan {plan} of "
            f"{run.profile.name} that took {figure} per global batch; before: {profile.source.description}",
        }
    )
    assumption = (
        f"computation of {run.kind} takes {factor:.4g} times what it was predicted to, so that one run takes {figure} "
        "per global batch as measured; communication and updates are as predicted, and what they are wrong by is in it"
    )
    return scaled(profile, run.kind, factor).model_copy(
        update={"source": source, "assumptions": (*profile.assumptions, assumption)}
    )
