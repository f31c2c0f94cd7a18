"""Attention of GPUs that share a sequence: the data that they exchange, and the part of it that attention hides.

The sequence is cut into 2c parts of equal length, of which GPU i has part i and part 2c - 1 - i: under a causal mask
all have the same work. There are three ways to let its queries see all keys:

``ring``
    c attention kernels on one block of keys and values each, while the next block comes from a neighbour. A step takes
    the longer of kernel and sends, so that the kernels of c - 1 steps hide that much of the c - 1 sends. Backward the
    gradients of keys and values follow one step later: in Transformer Engine [1]_ the first step sends only keys and
    values, the last only gradients, and the steps between send both. torch [2]_ adds gradients up in fp32, and sends
    them once more, to their owners, when no kernel is left.
``all_gather``
    Every GPU gets all keys and values before it attends, and their gradients are reduced and scattered; nothing is
    hidden. Transformer Engine [1]_ gathers them again for the backward pass, torch [3]_ keeps them.
``all_to_all``
    Each GPU gets the queries, keys and values of fewer heads and all tokens, and the result is exchanged back
    (DeepSpeed Ulysses [4]_); nothing is hidden.

.. [1] Transformer Engine, module ``context_parallel`` of its attention: ``AttnFuncWithCPAndKVP2P``,
   ``AttnFuncWithCPAndKVAllGather``, ``AttnFuncWithCPAndQKVOA2A``.
.. [2] torch, ``torch.distributed.tensor.experimental``, ``_templated_ring_attention`` with its rotation by all-to-all.
.. [3] torch, ``flex_cp_allgather``, which torchtitan uses.
.. [4] Jacobs et al., DeepSpeed Ulysses (2023).
"""

from __future__ import annotations

import math
from fractions import Fraction

from penstock.schemas.transformers.degrees import Collective, Operation
from penstock.shapes.costs.case import FP32, Case, Moved, Times
from penstock.shapes.costs.collectives import Phase, collective
from penstock.shapes.heads import Heads


def kernels(case: Case) -> int:
    """Return the number of attention kernels in a pass; in a ring each sees one GPU's keys and values, else all."""
    return case.layout.context if case.layout.context_by == "ring" else 1


def added_up(case: Case, heads: Heads) -> Moved:
    """Return the bytes that a ring adds up after each kernel but the first, of three tensors.

    These are results forward, and gradients backward.
    """
    steps = kernels(case) - 1
    each = 3 * (case.width if case.fused else FP32) * case.tokens
    return ((float(each * heads.results), float(each * (heads.queries + heads.moved))),) * steps


def exchanged(case: Case, heads: Heads, kernel: Times) -> tuple[Collective, ...]:
    """Return the collectives over the GPUs that share a sequence; ``kernel`` has the times of one attention kernel."""
    if case.layout.context == 1:
        return ()
    match case.layout.context_by:
        case "ring":
            return _ring(case, heads, kernel)
        case "all_gather":
            return _all_gather(case, heads)
        case "all_to_all":
            return _all_to_all(case, heads)


def _ring(case: Case, heads: Heads, kernel: Times) -> tuple[Collective, ...]:
    steps = case.layout.context
    moved = case.length * heads.moved
    block, gradient = case.width * moved, (case.width if case.fused else FP32) * moved
    there, back = math.floor(kernel.forward), math.floor(kernel.backward)
    return (
        *_sends("forward", block, steps - 1, there),
        *_sends("backward", block, 1, back),
        *_sends("backward", block + gradient, steps - 2, back),
        *_sends("backward", gradient, 1, back),
        *(() if case.fused else _sends("backward", gradient, 1, 0)),
    )


def _sends(phase: Phase, size: Fraction, count: int, hidden_ns: int) -> tuple[Collective, ...]:
    """Return ``count`` sends, each during a kernel of ``hidden_ns``."""
    if count == 0:
        return ()
    return (collective(phase, "send", math.ceil(size), count, over="context", hidden_ns=count * hidden_ns),)


def _all_gather(case: Case, heads: Heads) -> tuple[Collective, ...]:
    whole = [math.ceil(case.width * case.shape.sequence_length * width) for width in (heads.keys, heads.values)]
    passes: list[tuple[Phase, Operation]] = [("forward", "all_gather"), ("backward", "reduce_scatter")]
    if case.fused:
        passes.append(("backward", "all_gather"))
    return tuple(collective(phase, operation, size, over="context") for phase, operation in passes for size in whole)


def _all_to_all(case: Case, heads: Heads) -> tuple[Collective, ...]:
    sizes = [math.ceil(case.width * case.length * width) for width in heads]
    phases: tuple[Phase, ...] = ("forward", "backward")
    return tuple(collective(phase, "all_to_all", size, over="context") for phase in phases for size in sizes)
