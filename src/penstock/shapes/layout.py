"""A uniform layout of a training job, one value of each degree for the whole model; and all that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import get_args

from penstock.schemas.transformers.degrees import ContextKind, Framework, Module, Sharding

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
FULL: frozenset[Module] = frozenset(("attention", "mlp", "norm"))
"""All of a layer: what is kept of it is its input alone. The other modules are parts of these."""
FRAMEWORKS: dict[str, Framework] = {"megatron": "megatron", "torchtitan": "torch"}
"""Whose rules and kernels a trainer has; DeepSpeed's layers are the user's own."""
USUAL_CONTEXT: dict[Framework, ContextKind] = {"megatron": "ring", "torch": "all_gather"}
"""Megatron's ``--cp-comm-type p2p``; what torchtitan does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism and what goes with them; ``data`` is the number of replicas."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    data: int = 1
    virtual_stages: int = 1
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    sharding: Sharding = "optimizer"
    recompute: frozenset[Module] = frozenset()
    sequence_parallel: bool = True
    framework: Framework = "megatron"
    context_kind: ContextKind | None = None
    """Left out: the framework's usual one."""
    ends_as_layers: bool = True
    """Whether Megatron may be told to count embedding and head as a layer each, where stages are even that way only."""

    @property
    def context_by(self) -> ContextKind:
        """How keys and values get to all GPUs that share a sequence."""
        return self.context_kind or USUAL_CONTEXT[self.framework]

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def shards(self) -> int:
        """GPUs that share the optimizer states of parameters outside experts."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """GPUs that hold the same experts."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches per replica and step; None where no global batch size was given."""
        if self.global_batch_size is None:
            return None
        return self.global_batch_size // (self.micro_batch_size * self.data)


def layers_of_stages(layers: int, layout: Layout) -> tuple[int, ...] | None:
    """Transformer layers of each virtual stage in the model's order; None where the framework cannot split them.

    Megatron splits evenly, or evenly with embedding and head counted as a layer each
    (``--account-for-embedding-in-pipeline-split``, ``--account-for-loss-in-pipeline-split``). In torch the first stages
    get one layer more.
    """
    stages = layout.pipeline * layout.virtual_stages
    if layers % stages == 0:
        return (layers // stages,) * stages
    if layout.framework == "torch":
        longer = layers % stages
        return None if stages > layers else (layers // stages + 1,) * longer + (layers // stages,) * (stages - longer)
    if (layers + 2) % stages or not layout.ends_as_layers:
        return None
    each = (layers + 2) // stages
    return (each - 1, *[each] * (stages - 2), each - 1)


@lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, in order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def layouts(
    gpus: int, asked: Mapping[str, Sequence[int]], shardings: Sequence[Sharding], rest: Layout
) -> Iterator[Layout]:
    """Every combination of the values ``asked`` of each degree, on all ``gpus``; ``rest`` gives what does not vary.

    A product that does not divide the GPUs comes with ``data`` 0, for the rules to refuse.
    """
    names = ("tensor", "context", "expert", "pipeline", "virtual_stages", "micro_batch_size")
    for degrees, sharding in product(product(*(asked[name] for name in names)), shardings):
        tensor, context, expert, pipeline, virtual_stages, micro_batch_size = degrees
        group = tensor * context * pipeline
        yield replace(
            rest,
            tensor=tensor,
            context=context,
            expert=expert,
            pipeline=pipeline,
            data=0 if gpus % group else gpus // group,
            virtual_stages=virtual_stages,
            micro_batch_size=micro_batch_size,
            sharding=sharding,
        )
