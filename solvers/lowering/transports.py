"""The choice of the transports that a plan's programs are lowered for (decision 38); no other module makes it."""

from __future__ import annotations

from typing import Literal

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import TRANSPORTS, Transport
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.update_rules import UpdateRule

TransportChoice = Literal["auto", "auto-on-gpus", "gloo", "nccl"]
"""The caller's choice; ``auto-on-gpus`` is ``auto`` for ranks on GPUs, whatever kinds of device the plan names."""

GLOO: tuple[Transport, ...] = ("gloo",)

_REMEDY = "leave the transport at auto; or plan with codec: never, and without elastic averaging"


def transports_to_try(
    problem: Problem, allocation: Allocation, update_rule: UpdateRule, choice: TransportChoice
) -> tuple[tuple[Transport, ...], ...]:
    """Return the sets of transports to lower all programs of the plan for; the first that succeeds is used.

    ``auto``: gloo and NCCL where some device is not a CPU and nothing in the plan needs tags; gloo alone where no order
    of receives and reductions suits NCCL. Raises UnsupportedRequest when ``choice`` is NCCL and the plan needs tags.
    """
    needs_tags = _needs_tags(allocation, update_rule)
    if choice == "nccl":
        if needs_tags is not None:
            raise UnsupportedRequest(f"the transport nccl cannot carry this plan: {needs_tags}", remedy=_REMEDY)
        return (TRANSPORTS,)
    on_gpus = choice == "auto-on-gpus" or any(
        problem.devices[device].kind != "cpu" for stage in allocation.stages for device in stage.devices
    )
    if choice == "gloo" or needs_tags is not None or not on_gpus:
        return (GLOO,)
    return TRANSPORTS, GLOO


def _needs_tags(allocation: Allocation, update_rule: UpdateRule) -> str | None:
    """Return why NCCL, which matches messages by their order alone, cannot carry a plan; None where it can."""
    if update_rule == "elastic_averaging":
        return "under elastic averaging pipelines share their devices, and NCCL connects one rank per GPU"
    for stage in allocation.stages:
        if any(stage.coded):
            return (
                f"tensors to or from the stage of layers {stage.first} to {stage.last} are encoded, and where a codec "
                "falls back it sends a second message that the receiver does not expect"
            )
    return None
