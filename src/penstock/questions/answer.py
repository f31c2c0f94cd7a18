"""The Python API for people: ``penstock.plan`` and the ``Answer`` that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from penstock.convert.requested_degrees import named_degrees
from penstock.planning.inputs import find_profile, find_topology, nanoseconds_of, with_choices
from penstock.planning.judge import Judgement, judge
from penstock.questions.solve import solve
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.errors import InvalidDocument, InvalidPlan
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile, PipelineProfile
from penstock.schemas.quantities import Scalar
from penstock.schemas.request import Effort, MemoryModel, NetworkModel, Pin, PlanRequest, Recompute, Target, UpdateRule
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Degrees, Framework, Sharding
from penstock.shapes.routing import Routing
from penstock.solvers.model.result import REQUEST_SCOPE, Progress


@dataclass(frozen=True)
class Answer:
    """A result with its request: what ``penstock.plan`` returns."""

    result: ResultOut
    request: PlanRequest

    @property
    def status(self) -> str:
        """Return optimal, feasible, infeasible, none_found or time_limit."""
        return self.result.status

    @property
    def plan(self) -> Plan:
        """The plan: stages, devices, orders and prediction. Raises InvalidPlan when there is none, with the reason."""
        return self.file.plan

    @property
    def file(self) -> PlanFile:
        """Return the plan with its request inline. Raises InvalidPlan when there is none, with the reason."""
        if self.result.plan is None:
            raise InvalidPlan(f"there is no plan: {self.result.sentence}")
        return PlanFile(plan=self.result.plan, request=self.request, why=self.result.why)

    @property
    def seconds_per_global_batch(self) -> float:
        """Return the simulated time per global batch, in seconds."""
        prediction = self.file.plan.prediction
        assert prediction is not None
        return prediction.time_per_global_batch_ns / 1e9

    @property
    def gap(self) -> float | None:
        """Return the proven bound on the relative distance to the best possible plan; None without a bound."""
        return next((c.gap for c in self.result.certificates if c.scope == REQUEST_SCOPE), None)

    def judge(self) -> Judgement:
        """Simulate and verify the plan again."""
        return judge(self.file)

    def timeline(self, width: int = 100) -> str:
        """Return the timeline as text, a line per device."""
        from penstock.report.drawing.timeline_text import render_timeline

        judgement = self.judge()
        assert judgement.timeline is not None
        return render_timeline(judgement.problem, judgement.timeline, judgement.allocation, width=width)

    def save(self, path: str | Path) -> None:
        """Write the plan file."""
        self.file.write(path)


class PlanOptions(TypedDict, total=False):
    """The keywords of ``penstock.plan``, which ``compare``, ``sweep`` and ``import_layout`` take as well."""

    global_batch_size: int
    micro_batch_sizes: Sequence[int] | None
    min_slice: int | None
    memory: MemoryModel | Mapping[str, object] | None
    network: NetworkModel | Mapping[str, object] | Literal["shared", "private"] | None
    update_rules: Sequence[UpdateRule] | None
    recompute: Recompute | None
    codec: Literal["auto"] | None
    planner: str | None
    schedule: str | None
    options: Mapping[str, Scalar] | None
    time_limit: str | float | None
    max_plans: int | None
    effort: Effort | None
    gap: float | None
    seed: int | None
    target: Target | None
    pins: Sequence[Pin | Mapping[str, object]] | None
    pipeline_profile: PipelineProfile | Mapping[str, object] | None
    degrees: Literal["auto"] | Degrees | Mapping[str, Any] | Sequence[Degrees | Mapping[str, int]] | None
    sharding: Literal["auto"] | Sharding | Sequence[Sharding] | None
    choose: Mapping[str, str | Sequence[str]] | None
    framework: Framework | None
    sequence_length: int | None
    routing_imbalance: float | None
    capacity_factor: float | None


def plan(
    profile: str | Path | Mapping[str, Any] | ModelProfile | PlanRequest,
    topology: str | Path | ClusterTopology | None = None,
    *,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **options: Unpack[PlanOptions],
) -> Answer:
    """Plan a model for a cluster, and return the best plan found with its proof.

    Parameters
    ----------
    profile, topology
        A document, a file name, or the name of a shipped example (``"bert-48"``, ``"8x8xH100"``). With a ``target`` the
        costs of a shipped transformer are computed with its trainer's kernels.
    global_batch_size
        Samples that one training step consumes, such as 256.
    micro_batch_sizes
        Samples of a micro-batch that the planner may choose from. Left out: powers of two that the profile covers.
    update_rules
        Update rules that plans may have; all but synchronous update with weights of different ages. Left out:
        synchronous.
    recompute
        Recompute activations in the backward pass, which keeps a stage's input alone. Left out: auto, where memory asks
        for it.
    codec
        Send fp32 tensors as fp16 with a scale where that saves time; it changes numbers slightly. Left out: never.
    planner
        Planner to ask, such as dapple or gpipe. Left out: auto, which asks all that apply.
    schedule
        Schedule of the plan, such as early-backward (1F1B) or zb-v. Left out: auto, the fastest.
    time_limit
        Stop after this time with the best plan so far: 30s, 5min. Left out: search to the end.
    max_plans
        Plans that each planner may judge, which gives the same answer on every machine. Left out: no limit.
    effort
        When planners end by themselves: after 8 plans in a row that are no better, after 64, or in the end. Left out:
        normal, or thorough with another limit.
    gap
        Stop at a plan within this share of the proven bound, such as 0.02. Left out: 0.
    seed
        Seed of every random choice; equal requests and seeds give equal plans, byte by byte. Left out: 0.
    target
        Plan only what this trainer can express. Left out: no trainer's limits.
    degrees
        How many GPUs share a layer, such as ``{"tensor": 8}``, or a list to choose from.
        ``{"tensor": (1, 2), "expert": "auto"}`` leaves open what is listed or ``auto``, and what it does not name.
        Left out: chosen from the degrees that the profile has costs at; 1 with a target or a codec.
    sharding
        What replicas share out (ZeRO, FSDP); gradients and parameters only in plans of one stage. Left out: auto where
        the profile has tensor degrees, else none.
    choose
        Values of further axes, such as ``{"optimizer": ["adam", "sgd"]}``; of several the quickest plan's is chosen.
    framework
        Kernels that costs are computed with: Megatron-Core and Transformer Engine, or eager PyTorch. Left out: the
        kernels of the trainer that is planned for, else torch.
    sequence_length
        Tokens of a sample of a transformer. Left out: the model's; of a config.json 8192 at most.
    routing_imbalance
        Of a mixture of experts, tokens of the busiest GPU's experts over the mean. Left out: 1, even.
    capacity_factor
        Tokens of every expert over its even share, dropped or padded to it. Left out: none is dropped.
    workers
        Processes that search a large request; the plan does not depend on it. Left out: one per processor.
    on_progress
        Called with every better plan, bound, and change of the planners at work.

    A ``PlanRequest`` in place of the profile is answered as it is, and takes none of the options. The other arguments
    are the fields of ``PlanRequest``; one that is None keeps that field's default.

    Raises
    ------
    InvalidDocument
        A value is not valid; the message names the field.
    UnsupportedRequest
        No planner here can honour the combination; the message says which one can.
    """
    request = request_of(profile, topology, options)
    return Answer(solve(request, on_progress=on_progress, workers=workers), request)


def request_of(
    profile: str | Path | Mapping[str, Any] | ModelProfile | PlanRequest,
    topology: str | Path | ClusterTopology | None,
    options: Mapping[str, Any],
    *,
    many: bool = False,
) -> PlanRequest:
    """Return the request that ``plan`` answers; a ``PlanRequest`` is returned as it is. Raises as ``plan``.

    ``many``: whether it is one of many (``with_choices``).
    """
    if isinstance(profile, PlanRequest):
        refuse_beside({"topology": topology, **options})
        return profile
    if topology is None:
        raise InvalidDocument("the topology is missing", remedy='pass a cluster, such as "8x8xH100"')
    values = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(values.keys() - PlanOptions.__annotations__.keys()):
        names = ", ".join(map(repr, unknown))
        raise TypeError(f"unexpected keyword {names}; the options are {', '.join(PlanOptions.__annotations__)}")
    if "global_batch_size" not in values:
        raise TypeError("global_batch_size is missing: samples that one training step consumes, such as 256")
    routing = Routing(values.pop("routing_imbalance", None), values.pop("capacity_factor", None))
    model = find_profile(
        profile,
        framework=values.pop("framework", None),
        sequence_length=values.pop("sequence_length", None),
        routing=routing,
        target=values.get("target"),
    )
    degrees = values.get("degrees")
    if isinstance(degrees, Mapping) and not all(isinstance(value, int) for value in degrees.values()):
        named = {name: (value,) if isinstance(value, int) else value for name, value in degrees.items()}
        values["degrees"] = named_degrees(model, named)
    if "time_limit" in values:
        values["time_limit_ns"] = nanoseconds_of(values.pop("time_limit"))
    limits = {name: values.pop(name) for name in ("time_limit_ns", "max_plans", "effort", "gap") if name in values}
    document = {"profile": model, "topology": find_topology(topology), **values}
    if limits:
        document["termination"] = limits
    return with_choices(PlanRequest.parse(document, units=True), many=many)


def refuse_beside(extra: Mapping[str, Any]) -> None:
    """Raise InvalidDocument for arguments beside a document that is the whole request; None and () are no argument."""
    if names := [name for name, value in extra.items() if value is not None and value != ()]:
        raise InvalidDocument(
            f"the request has all fields already; {', '.join(names)} would contradict it",
            remedy="change the request, or pass a model and a cluster",
        )
