"""A uniform layout of a training job, with one value of each degree for the whole model, and all requested layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product
from typing import get_args

from penstock.schemas.transformers.degrees import ContextKind, Framework, Module, Sharding

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
FULL: frozenset[Module] = frozenset(("attention", "mlp", "norm"))
"""All modules of a layer: only its input is kept. The other modules are parts of these three."""
FRAMEWORKS: dict[str, Framework] = {"megatron": "megatron", "torchtitan": "torch"}
"""The framework whose rules and kernels a trainer has; DeepSpeed's layers are the user's own."""
USUAL_CONTEXT: dict[Framework, ContextKind] = {"megatron": "ring", "torch": "all_gather"}
"""Megatron's ``--cp-comm-type p2p``, and the all-gather of torchtitan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism with sharding, recomputation and batch; ``data`` is the number of replicas."""

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
    """The kind of context parallelism; None for the framework's usual kind."""
    ends_as_layers: bool = True
    """Whether Megatron may count embedding and head as a layer each, where stages are even in no other way."""
    uneven: bool = False
    """Whether some of Megatron's stages may have fewer layers than others, where they cannot be even."""

    @property
    def context_by(self) -> ContextKind:
        """The way in which keys and values get to all GPUs that share a sequence."""
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
    """Return the transformer layers of each virtual stage in the model's order, or None if they cannot be split.

    Megatron splits evenly, or evenly with embedding and head counted as a layer each
    (``--account-for-embedding-in-pipeline-split``, ``--account-for-loss-in-pipeline-split``), or unevenly
    (``uneven_flags``). In torch the first stages get one layer more.
    """
    stages = layout.pipeline * layout.virtual_stages
    if layers % stages == 0:
        return (layers // stages,) * stages
    if layout.framework == "torch":
        longer = layers % stages
        return None if stages > layers else (layers // stages + 1,) * longer + (layers // stages,) * (stages - longer)
    if (layers + 2) % stages or not layout.ends_as_layers:
        return _uneven(layers, stages, layout.virtual_stages) if layout.uneven else None
    each = (layers + 2) // stages
    return (each - 1, *[each] * (stages - 2), each - 1)


def _uneven(layers: int, stages: int, virtual_stages: int) -> tuple[int, ...] | None:
    """Return stages of which some have fewer layers, the largest being as small as possible.

    With one stage per rank the last stage has fewer layers, and the first too where that is not enough: Megatron has
    flags for both. Otherwise as few stages as possible have one layer fewer, from the back, by a layout string.
    Only the first and the last stage, which hold the embedding and the head, may have no transformer layer.
    """
    each = -(-layers // stages)
    fewer = each * stages - layers
    if virtual_stages == 1 and fewer <= 2 * (each - 1):
        at_last = min(fewer, each - 1)
        return (each - fewer + at_last, *[each] * (stages - 2), each - at_last)
    if each == 1 and fewer > 2:
        return None
    smaller = {stages - 1, 0, *range(stages - fewer + 1, stages - 1)} if fewer > 1 else {stages - 1}
    return tuple(each - (stage in smaller) for stage in range(stages))


def uneven_flags(layers: int, layout: Layout) -> str:
    """Return Megatron's flags for the stages of ``layers_of_stages``; no text where they are even."""
    stages = layout.pipeline * layout.virtual_stages
    split = None if layout.framework == "torch" or not layout.uneven else layers_of_stages(layers, layout)
    if split is None or layers % stages == 0 or (layout.ends_as_layers and (layers + 2) % stages == 0):
        return ""
    (first, *between, last), each = split, max(split)
    if layout.virtual_stages == 1 and all(number == each for number in between) and first and last:
        ends = {"first": first, "last": last}
        return " ".join(
            f"--decoder-{end}-pipeline-num-layers {number}" for end, number in ends.items() if number < each
        )
    runs = [(_letters(number), len(list(run))) for number, run in groupby(between)]
    middle = "".join(f"({letters}|)*{times}" if times > 1 else f"{letters}|" for letters, times in runs)
    return f"--pipeline-model-parallel-layout 'E{_letters(first)}|{middle}{_letters(last)}L'"


def _letters(layers: int) -> str:
    """Return transformer layers as a layout string has them."""
    return "t" * layers if layers < 2 else f"t*{layers}"


def uneven_said(layers: int, layout: Layout) -> str:
    """Return a sentence on uneven stages and the flags that Megatron needs for them; no text where they are even."""
    flags, split = uneven_flags(layers, layout), layers_of_stages(layers, layout)
    if not flags or split is None:
        return ""
    sizes = " or ".join(map(str, sorted(set(split))))
    virtual = f" × virtual stages {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    return f"pipeline {layout.pipeline}{virtual}: stages of {sizes} layers, by {flags}"


@lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, in order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def layouts(
    gpus: int, values: Mapping[str, Sequence[int]], shardings: Sequence[Sharding], rest: Layout
) -> Iterator[Layout]:
    """Yield every combination of the ``values`` of each degree on all ``gpus``; ``rest`` has the other fields.

    A product that does not divide the GPUs comes with ``data`` 0, for the rules to refuse.
    """
    names = ("tensor", "context", "expert", "pipeline", "virtual_stages", "micro_batch_size")
    for degrees, sharding in product(product(*(values[name] for name in names)), shardings):
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
