"""Degrees of parallelism inside a stage, and what the replicas of a stage share out. Standard library and pydantic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from penstock.schemas.document import Part
from penstock.schemas.quantities import Bytes, Nanoseconds, PositiveCount

Framework = Literal["megatron", "torch"]
Sharding = Literal["none", "optimizer", "gradients", "parameters", "parameters_kept"]
"""ZeRO by its stages 1, 2 and 3; ``parameters_kept``: sharded parameters that stay gathered until the step's end."""


ContextKind = Literal["ring", "all_gather", "all_to_all"]
"""Method by which GPUs that share a sequence see all of its keys and values."""


Module = Literal["attention", "mlp", "norm", "mla_up_proj", "moe_act", "shared_experts", "operators"]
"""Modules of a layer that can be recomputed by themselves.

``attention`` includes its projections. ``mlp`` is the whole feed-forward (Megatron's ``mlp``); in a layer with experts
it is Megatron's ``moe``: router, dispatch, experts, shared experts. ``norm``: the norms of the hidden width (Megatron's
``layernorm``). ``mla_up_proj``: the projections of latent attention from its narrow widths, with the rotary positions.
``moe_act``: the activation between the products of experts. ``operators``: all but the results of attention and of
every second product and what was sent, as torchtitan's selective checkpoints do. Megatron's ``core_attn`` is missing:
it keeps nothing under flash attention.
"""

WITHIN: dict[Module, Module] = {"mla_up_proj": "attention", "moe_act": "mlp", "shared_experts": "mlp"}
"""Modules that are parts of another one: recomputing that makes them again as well."""
ALONE: tuple[Module, ...] = ("operators",)
"""Modules that overlap with all others, so that no other one is recomputed with them."""

ShardingChoice = Literal["auto", "none", "optimizer", "gradients", "parameters", "parameters_kept"]
"""A sharding, or the choice among the shardings that plans may have."""

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


class Degrees(Part):
    """The number of GPUs that share a layer. Left out: 1 each, every device holds whole layers."""

    tensor: PositiveCount = Field(default=1, description="GPUs of a node that split each layer's matrices")
    context: PositiveCount = Field(default=1, description="groups of them that split the sequence")
    expert: PositiveCount = Field(default=1, description="GPUs that share out a layer's experts")
    expert_tensor: PositiveCount = Field(default=1, description="GPUs that split each expert's matrices")

    @property
    def gpus(self) -> int:
        """GPUs that hold a replica of a stage together."""
        return max(self.tensor * self.context, self.expert * self.expert_tensor)

    @property
    def initials(self) -> str:
        """The degrees above 1 by their usual initials, as in "TP 8 × CP 2"; empty where all degrees are 1."""
        names = {"tensor": "TP", "context": "CP", "expert": "EP", "expert_tensor": "ETP"}
        return " × ".join(f"{names[name]} {value}" for name, value in self.model_dump().items() if value > 1)

    def __str__(self) -> str:
        """Return the degrees above 1, as in "tensor 8, context 2"."""
        above = [f"{name.replace('_', ' ')} {value}" for name, value in self.model_dump().items() if value > 1]
        return ", ".join(above) or "no degree above 1"


def listed(degrees: Iterable[Degrees]) -> str:
    """Return the values that each degree has, as in "tensor 1, 2, 4; expert 1, 8", or "" where all are 1."""
    every = list(degrees)
    values = {name: sorted({getattr(each, name) for each in every}) for name in Degrees.model_fields}
    above = {name: numbers for name, numbers in values.items() if numbers != [1]}
    return "; ".join(f"{name.replace('_', ' ')} {', '.join(map(str, numbers))}" for name, numbers in above.items())


class Collective(Part):
    """Collectives of one layer in one pass of a micro-batch, or once a step, by each group of GPUs that runs it."""

    phase: Literal["forward", "backward", "step"]
    operation: Operation
    over: Literal["tensor", "context", "expert"]
    bytes_per_sample: Bytes = Field(
        description="of the whole tensors (count × ranks); of all_to_all and send what one GPU sends; in a step: in all"
    )
    count: PositiveCount = 1
    hidden_ns: Nanoseconds = Field(default=0, description="what computation hides, at the measurement's size")


class ModuleCost(Part):
    """The cost of making a module's activations again on one GPU before the backward, and the memory it frees."""

    module: Module
    forward_ns: Nanoseconds = Field(description="of the module's forward, without collectives")
    freed_bytes: Bytes = Field(description="of the layer's stash; they are there while the layer runs backward")
    collectives: tuple[Collective, ...] = Field(default=(), description="of the module's forward")
