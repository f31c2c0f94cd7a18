"""Make a job bundle from a plan: all that ranks started by another launcher need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.planning.programs.segment_programs import work_after
from penstock.schemas.api.agents import digest_of
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.program import Texts
from penstock.schemas.ranks.bundle import JobBundle
from penstock.schemas.topology import ClusterTopology

if TYPE_CHECKING:
    from penstock.schemas.plan import PlanFile
    from penstock.solvers.lowering.transports import TransportChoice

FLUSHED = ("synchronous", "elastic_averaging")
"""Update rules that repeat the program of one step; others need a program per segment length."""


def make_bundle(
    file: PlanFile,
    *,
    steps: int | None = None,
    options: RunOptions | None = None,
    transport: TransportChoice = "auto",
    seed: int = 0,
) -> JobBundle:
    """Return the bundle of a plan, for ranks that are started with these ``options`` and train up to ``steps``.

    ``steps`` matters to periodic plans alone. ``transport`` auto: programs for NCCL where the plan's devices are no
    CPUs. Raises UnsupportedRequest for options, or a transport, that the plan does not support, and for a periodic plan
    without steps; InvalidPlan when it does not verify.
    """
    plan = file.plan
    if steps is None and plan.update_rule not in FLUSHED:
        raise UnsupportedRequest(
            f"a bundle of a plan with {plan.update_rule} updates needs the number of steps: its programs run from one "
            "checkpoint or evaluation to the next",
            remedy="give steps (--steps N), and checkpoint_every and evaluate_every if any",
        )
    wanted = options or RunOptions()
    kinds = _kinds(file)
    work = work_after(file, None, steps or 1, wanted, transport=transport)
    parts: list[dict[str, Any]] = []
    texts = Texts()
    for rank, programs in enumerate(zip(*work.programs, strict=True)):
        documents = [program.to_json(texts) for program in programs]
        device = programs[0].device
        place = {"rank": rank, "device": device, "device_kind": kinds[device]}
        parts.append({**place, "programs": documents, "digest": digest_of(documents)})
    profile = file.request.profile
    assert isinstance(profile, ModelProfile)
    whole = "whole" if work.segments is None else "segments"
    return JobBundle.parse(
        {
            "plan_hash": plan.content_hash(),
            "update_rule": plan.update_rule,
            "global_batch_size": plan.global_batch_size,
            "seed": seed,
            "predicted_time_per_global_batch_ns": plan.prediction and plan.prediction.time_per_global_batch_ns,
            "layers": [layer.name for layer in profile.layers],
            "boundaries": profile.boundary_sizes(),
            "programs_are": "ladder" if wanted.advance_forward else whole,
            "lowered_for": work.transports[-1],
            "norm": wanted.needs_norm,
            "staleness": wanted.staleness,
            "ranks": parts,
        }
    )


def _kinds(file: PlanFile) -> dict[str, str]:
    """Return the kind of each device of the topology, by its id."""
    topology = file.request.topology
    assert isinstance(topology, ClusterTopology)
    return {device.id: device.kind for node in topology.expanded().nodes for device in node.devices}
