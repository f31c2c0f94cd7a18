"""A mixture of experts on the busiest GPU of its group: router, dispatch, experts, return, shared experts.

``megatron`` means its all-to-all dispatcher with fused permutations, a router in fp32, Transformer Engine's grouped
products, and activations that weigh their own results. ``torch`` means torchtitan's experts, which weigh returned
copies in fp32. Both send the copies of a token to the GPUs of its experts and back by all-to-all, forward and backward.
Where GPUs share each expert, Megatron gathers the arrived copies among them and reduces their results. Its bytes on the
links equal the bytes of an all-to-all in which every copy goes to all GPUs of its expert, and that one is listed. The
gather is of 16 bits; Megatron's reduction in fp32 is left out.

.. [1] Megatron-Core, ``moe_layer``, ``token_dispatcher.MoEAlltoAllTokenDispatcher``, ``router.TopKRouter``,
   ``experts.TEGroupedMLP``, ``shared_experts``.
.. [2] torchtitan, ``models.common.moe`` and ``models.common.token_dispatcher.AllToAllTokenDispatcher``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.schemas.transformers.degrees import Collective, Operation
from penstock.schemas.transformers.shape import Experts
from penstock.shapes.costs.case import FP32, Case, Moved, Times
from penstock.shapes.costs.collectives import Phase, collective
from penstock.shapes.costs.feed_forward import activations, feed_forward
from penstock.shapes.costs.pieces import Piece, Product
from penstock.shapes.routing import busiest, copies_per_token

_COUNT = 8
"""Bytes of a number of tokens."""
_ROUTER_KERNELS, _CAPACITY_KERNELS, _ROUTER_KERNELS_BACK = 20, 6, 8
"""Numbers of operations on scores of tokens by experts in Megatron's router [1]_.

The first: top k, weights and mask scattered, the scores of the loss that balances experts, that loss, tokens of each
expert. The second drop and pad tokens, and the third run backward.
"""


class _Rows(NamedTuple):
    """Tokens of a GPU, the copies that it sends, and the copies that its experts get."""

    tokens: float
    sent: float
    received: float
    worked: float
    """Copies that all GPUs together get that share an expert."""
    experts: int
    """The number of experts on the GPU, whole or in part."""


def mixture(case: Case, experts: Experts) -> tuple[Piece, ...]:
    """Return the pieces of a mixture, from the result of the norm before to the sum with the residual."""
    tokens = case.tokens / case.spread
    sent = tokens * float(copies_per_token(experts))
    received = sent * float(busiest(experts, case.layout.expert))
    rows = _Rows(tokens, sent, received, received * case.layout.expert_tensor, experts.number // case.layout.expert)
    routed = Piece(
        modules=("mlp",),
        moved=_router_moved(case, experts, rows) + _dispatch_moved(case, rows) + _return_moved(case, rows),
        kernels=(_router(case, experts, rows),),
        collectives=_exchange(case, experts, rows),
    )
    return (routed, *_routed_experts(case, experts, rows), *_shared(case, experts, rows))


def _router(case: Case, experts: Experts, rows: _Rows) -> Times:
    """Compute the times of the router's product and its two gradients in fp32.

    Megatron's forward multiplies 16 bits and keeps fp32.
    """
    whole, hidden = case.wide_kernels, case.shape.hidden
    forward = (
        case.kernels.product_ns(rows.tokens, hidden, experts.number, result_bytes=FP32)
        if case.fused
        else whole.product_ns(rows.tokens, hidden, experts.number)
    )
    weight = whole.product_ns(hidden, rows.tokens, experts.number)
    return Times(forward, whole.product_ns(rows.tokens, experts.number, hidden) + weight, weight)


def _router_moved(case: Case, experts: Experts, rows: _Rows) -> Moved:
    """Return the bytes of reading and writing scores, and of casts around the product.

    Torch casts the router's input, Megatron its gradient.
    """
    scores = 2 * FP32 * rows.tokens * experts.number
    cast = (case.width + FP32) * rows.tokens * case.shape.hidden
    if case.fused:
        forward = _ROUTER_KERNELS + (0 if experts.capacity_factor is None else _CAPACITY_KERNELS)
        return ((scores, 0),) * forward + ((0, scores),) * _ROUTER_KERNELS_BACK + ((0, cast), (0, cast))
    return ((cast, cast), (scores, scores), (scores, scores))


def _dispatch_moved(case: Case, rows: _Rows) -> Moved:
    """Return the bytes of sorting copies of tokens by expert's GPU, and again by expert where a GPU has several.

    Torch indexes, and adds gradients up in a tensor of zeros.
    """
    width, hidden = case.width, case.shape.hidden
    sort = 2 * width * rows.worked * hidden if rows.experts > 1 else 0
    if case.fused:
        permute = width * (rows.tokens + rows.sent) * hidden
        return ((permute, permute), (sort, sort))
    return ((2 * width * rows.sent * hidden, 3 * width * rows.sent * hidden), (sort, 2 * sort))


def _return_moved(case: Case, rows: _Rows) -> Moved:
    """Return the bytes of sorting copies back and summing them by token; torch first weighs copies in fp32 by steps.

    Its steps are to fp32, times the weight, and back; backward has two products.
    """
    width, hidden = case.width, case.shape.hidden
    sort = 2 * width * rows.worked * hidden if rows.experts > 1 else 0
    if case.fused:
        unpermute = width * (rows.tokens + rows.sent) * hidden
        return ((sort, sort), (unpermute, unpermute))
    cast, product = (width + FP32) * rows.sent * hidden, 2 * FP32 * rows.sent * hidden
    added = width * (rows.tokens + 3 * rows.sent) * hidden
    return (
        (sort, 2 * sort),
        (cast, cast),
        (product, 2 * product),
        (cast, cast),
        (added, 2 * width * rows.sent * hidden),
    )


def _exchange(case: Case, experts: Experts, rows: _Rows) -> tuple[Collective, ...]:
    """Return the exchanges of the busiest GPU, by the larger of its sent and received bytes.

    They are copies there and back, weights there, and the number of copies.
    """
    layout = case.layout
    if layout.expert * layout.expert_tensor == 1:
        return ()
    copies = rows.worked / layout.micro_batch_size
    tokens = math.ceil(copies * case.shape.hidden * case.width)
    phases: tuple[Phase, Phase] = ("forward", "backward")
    exchanges = [collective(phase, "all_to_all", tokens, 2, over="expert") for phase in phases]
    if case.fused:
        weights = math.ceil(copies * FP32)
        exchanges += [collective(phase, "all_to_all", weights, over="expert") for phase in phases]
    if experts.capacity_factor is None:
        ranks = layout.expert * layout.expert_tensor
        numbers: tuple[Operation, int] = ("all_gather", ranks) if case.fused else ("all_to_all", 1)
        exchanges.append(collective("forward", numbers[0], _COUNT * experts.number * numbers[1], over="expert"))
    return tuple(exchanges)


def _routed_experts(case: Case, experts: Experts, rows: _Rows) -> tuple[Piece, ...]:
    """Return a GPU's grouped products of experts, each with an even part of the rows, and the activation between."""
    hidden, inner = case.shape.hidden, experts.ffn // case.layout.expert_tensor
    gates, each = 2 if case.shape.gated else 1, rows.worked / rows.experts
    columns = [gates * inner] if case.fused else [inner] * gates
    into = [Product(each, hidden, width, rows.experts) for width in columns]
    products = (*into, Product(each, inner, hidden, rows.experts))
    return (
        Piece(modules=("mlp",), products=products),
        Piece(modules=("mlp", "moe_act"), moved=activations(case, rows.worked, inner)),
    )


def _shared(case: Case, experts: Experts, rows: _Rows) -> tuple[Piece, ...]:
    """Return the pieces of shared experts, whose result is added to the result of the routed experts.

    A gate weighs it by a product of one column.
    """
    if not experts.shared_ffn:
        return ()
    tensor = case.width * rows.tokens * case.shape.hidden
    added: Moved = ((3 * tensor, 2 * tensor),)
    gate: Moved = ((tensor, 3 * tensor), (2 * tensor, 4 * tensor)) if experts.shared_gate else ()
    return (
        *feed_forward(case, experts.shared_ffn, ("mlp", "shared_experts")),
        Piece(modules=("mlp", "shared_experts"), moved=gate),
        Piece(modules=("mlp",), moved=added),
    )
