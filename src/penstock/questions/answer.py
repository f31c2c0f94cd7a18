"""The Python API for people: ``penstock.plan`` and the ``Answer`` that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.convert.requested_degrees import named_degrees
from penstock.planning.inputs import find_profile, find_topology, nanoseconds_of, with_effort, with_open_degrees
from penstock.planning.judge import Judgement, judge
from penstock.questions.solve import solve
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.errors import InvalidPlan
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


def plan(
    profile: str | Path | ModelProfile,
    topology: str | Path | ClusterTopology,
    *,
    global_batch_size: int,
    micro_batch_sizes: Sequence[int] | None = None,
    min_slice: int | None = None,
    memory: MemoryModel | Mapping[str, object] | None = None,
    network: NetworkModel | Mapping[str, object] | Literal["shared", "private"] | None = None,
    update_rules: Sequence[UpdateRule] | None = None,
    recompute: Recompute | None = None,
    codec: Literal["auto"] | None = None,
    planner: str | None = None,
    schedule: str | None = None,
    options: Mapping[str, Scalar] | None = None,
    time_limit: str | float | None = None,
    max_plans: int | None = None,
    effort: Effort | None = None,
    gap: float | None = None,
    seed: int | None = None,
    target: Target | None = None,
    pins: Sequence[Pin | Mapping[str, object]] | None = None,
    pipeline_profile: PipelineProfile | Mapping[str, object] | None = None,
    degrees: Literal["auto"] | Degrees | Mapping[str, Any] | Sequence[Degrees | Mapping[str, int]] | None = None,
    sharding: Literal["auto"] | Sharding | Sequence[Sharding] | None = None,
    choose: Mapping[str, str | Sequence[str]] | None = None,
    framework: Framework | None = None,
    sequence_length: int | None = None,
    routing_imbalance: float | None = None,
    capacity_factor: float | None = None,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Answer:
    """Plan a model for a cluster, and return the best plan found with its proof.

    Parameters
    ----------
    profile, topology
        A document, a file name, or the name of a shipped example (``"bert-48"``, ``"8x8xH100"``). With a ``target`` the
        costs of a shipped transformer are those of its trainer's kernels.
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
        Left out: chosen from those that the profile has costs at; 1 with a target or a codec.
    sharding
        What replicas share out (ZeRO, FSDP); gradients and parameters only in plans of one stage. Left out: auto where
        the profile has tensor degrees, else none.
    choose
        Values of further axes, such as ``{"optimizer": ["adam", "sgd"]}``; of several the quickest plan's is chosen.
    framework
        Kernels that costs are computed with: Megatron-Core and Transformer Engine, or eager PyTorch. Left out: those of
        the trainer that is planned for, else torch.
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

    The other arguments are the fields of ``PlanRequest``; one that is None keeps that field's default.

    Raises
    ------
    InvalidDocument
        A value is not valid; the message names the field.
    UnsupportedRequest
        No planner here can honour the combination; the message says which one can.
    """
    routing = Routing(routing_imbalance, capacity_factor)
    found = find_profile(profile, framework=framework, sequence_length=sequence_length, routing=routing, target=target)
    if isinstance(degrees, Mapping) and not all(isinstance(value, int) for value in degrees.values()):
        named = {name: (value,) if isinstance(value, int) else value for name, value in degrees.items()}
        degrees = named_degrees(found, named)  # type: ignore[assignment]
    limits = {"time_limit_ns": nanoseconds_of(time_limit), "max_plans": max_plans, "effort": effort, "gap": gap}
    given = {
        "micro_batch_sizes": micro_batch_sizes,
        "min_slice": min_slice,
        "memory": memory,
        "network": network,
        "update_rules": update_rules,
        "recompute": recompute,
        "codec": codec,
        "planner": planner,
        "schedule": schedule,
        "options": options,
        "termination": {name: value for name, value in limits.items() if value is not None} or None,
        "seed": seed,
        "target": target,
        "pins": pins,
        "pipeline_profile": pipeline_profile,
        "degrees": degrees,
        "sharding": sharding,
        "choose": choose,
    }
    request = PlanRequest.parse(
        {
            "profile": found,
            "topology": find_topology(topology),
            "global_batch_size": global_batch_size,
            **{name: value for name, value in given.items() if value is not None},
        },
        units=True,
    )
    request = with_effort(with_open_degrees(request))
    return Answer(solve(request, on_progress=on_progress, workers=workers), request)
