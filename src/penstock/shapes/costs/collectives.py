"""Collectives of layers, and of the tensor-parallel group around the products that its GPUs divide.

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
"""All-reduces of a number per token in a loss over divided scores: largest, sum of exponentials, target's score."""


def collective(
    phase: Phase, operation: Operation, size: int, count: int = 1, *, over: Over = "tensor", hidden_ns: int = 0
) -> Collective:
    """Build ``count`` collectives of ``size`` bytes a sample each; a step's ``size`` is in bytes in all."""
    return Collective(
        phase=phase, operation=operation, over=over, bytes_per_sample=count * size, count=count, hidden_ns=hidden_ns
    )


def joined(listed: Iterable[Collective]) -> tuple[Collective, ...]:
    """Merge equal collectives into one with a count, ordered by pass and operation."""
    merged: dict[tuple[object, ...], Collective] = {}
    for each in listed:
        key = (each.phase, each.operation, each.over, each.bytes_per_sample // each.count, each.hidden_ns // each.count)
        before = merged.get(key)
        sums = ("bytes_per_sample", "count", "hidden_ns")
        merged[key] = (
            each
            if before is None
            else before.model_copy(update={name: getattr(before, name) + getattr(each, name) for name in sums})
        )
    return tuple(sorted(merged.values(), key=lambda each: _ORDER.index((each.phase, each.operation))))


def gathered(case: Case, size: int) -> tuple[Collective, ...]:
    """Return the collectives around the input, of ``size`` bytes a sample, of products whose columns are divided.

    The input is gathered forward, and its gradient reduced backward.
    """
    if case.layout.tensor == 1:
        return ()
    if case.spread == 1:
        return (collective("backward", "all_reduce", size),)
    return (collective("forward", "all_gather", size), collective("backward", "reduce_scatter", size))


def gathered_again(case: Case, size: int) -> tuple[Collective, ...]:
    """Return the collective that gathers such an input again for the weight gradients.

    Megatron keeps only a part of the input [2]_; torch keeps all of it and gathers nothing.
    """
    return (collective("backward", "all_gather", size),) if case.spread > 1 and case.fused else ()


def into(case: Case, size: int) -> tuple[Collective, ...]:
    """Return the collectives around the input of a half of a block.

    Under sequence parallelism torch gathers the input with the norm before.
    """
    if case.spread > 1 and not case.fused:
        return ()
    return (*gathered(case, size), *gathered_again(case, size))


def out_of(case: Case, size: int) -> tuple[Collective, ...]:
    """Return the collectives around the result, of ``size`` bytes a sample, of a product whose inner width is divided.

    The result is summed forward.
    """
    if case.layout.tensor == 1:
        return ()
    if case.spread == 1:
        return (collective("forward", "all_reduce", size),)
    return (collective("forward", "reduce_scatter", size), collective("backward", "all_gather", size))


def replicated(case: Case, number: int) -> tuple[Collective, ...]:
    """Return the all-reduce of the gradients of ``number`` replicated parameters.

    Under sequence parallelism each GPU has only a part of these gradients.
    """
    return (collective("step", "all_reduce", FP32 * number),) if case.spread > 1 and number else ()


def loss(case: Case) -> tuple[Collective, ...]:
    """Return the collectives of a loss over scores that the GPUs divide."""
    if case.layout.tensor == 1:
        return ()
    return (collective("forward", "all_reduce", FP32 * case.length, _LOSS),)
