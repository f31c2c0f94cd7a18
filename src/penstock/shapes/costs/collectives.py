"""Collectives of layers, and those of the tensor-parallel group around what its GPUs divide.

Collectives are listed with ``hidden_ns`` 0 unless a function says otherwise: no framework promises that computation
hides them.

.. [1] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.2.2: the
   collectives of tensor and sequence parallelism.
.. [2] Megatron-Core, ``tensor_parallel.layers``: inputs are gathered again for weight gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from penstock.schemas.transformers.degrees import Collective, Operation
from penstock.shapes.costs.case import FP32, Case

Phase = Literal["forward", "backward", "step"]
Over = Literal["tensor", "context", "expert"]

_ORDER = [(phase, operation) for phase in get_args(Phase) for operation in get_args(Operation)]
_LOSS = 3
"""All-reduces of a number per token in a loss over divided scores: largest score, sum of exponentials, own score."""


def collective(
    phase: Phase, operation: Operation, size: int, count: int = 1, *, over: Over = "tensor", hidden_ns: int = 0
) -> Collective:
    """``count`` collectives of ``size`` bytes a sample each; in a step of ``size`` bytes in all."""
    return Collective(
        phase=phase, operation=operation, over=over, bytes_per_sample=count * size, count=count, hidden_ns=hidden_ns
    )


def joined(listed: Iterable[Collective]) -> tuple[Collective, ...]:
    """Collectives of which one is as another counted together, by pass and operation."""
    found: dict[tuple[object, ...], Collective] = {}
    for each in listed:
        key = (each.phase, each.operation, each.over, each.bytes_per_sample // each.count, each.hidden_ns // each.count)
        known = found.get(key)
        sums = ("bytes_per_sample", "count", "hidden_ns")
        found[key] = (
            each
            if known is None
            else known.model_copy(update={name: getattr(known, name) + getattr(each, name) for name in sums})
        )
    return tuple(sorted(found.values(), key=lambda each: _ORDER.index((each.phase, each.operation))))


def gathered(case: Case, size: int) -> tuple[Collective, ...]:
    """Around the input of products whose columns are divided, of ``size`` bytes a sample: forward it is gathered."""
    if case.layout.tensor == 1:
        return ()
    if case.spread == 1:
        return (collective("backward", "all_reduce", size),)
    return (collective("forward", "all_gather", size), collective("backward", "reduce_scatter", size))


def gathered_again(case: Case, size: int) -> tuple[Collective, ...]:
    """What gathers such an input again for the gradient of the weights: Megatron keeps a part [2]_, torch all of it."""
    return (collective("backward", "all_gather", size),) if case.spread > 1 and case.fused else ()


def into(case: Case, size: int) -> tuple[Collective, ...]:
    """Around the input of a half of a block; under sequence parallelism torch gathers it with the norm before."""
    if case.spread > 1 and not case.fused:
        return ()
    return (*gathered(case, size), *gathered_again(case, size))


def out_of(case: Case, size: int) -> tuple[Collective, ...]:
    """Around the result of a product whose inner width is divided, of ``size`` bytes a sample: forward it is summed."""
    if case.layout.tensor == 1:
        return ()
    if case.spread == 1:
        return (collective("forward", "all_reduce", size),)
    return (collective("forward", "reduce_scatter", size), collective("backward", "all_gather", size))


def replicated(case: Case, number: int) -> tuple[Collective, ...]:
    """Under sequence parallelism GPUs have parts of the gradients of ``number`` parameters that each has a copy of."""
    return (collective("step", "all_reduce", FP32 * number),) if case.spread > 1 and number else ()


def loss(case: Case) -> tuple[Collective, ...]:
    """Of a loss over scores that the GPUs divide."""
    if case.layout.tensor == 1:
        return ()
    return (collective("forward", "all_reduce", FP32 * case.length, _LOSS),)
