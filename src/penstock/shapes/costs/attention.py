"""Attention of one GPU with grouped queries: its products with those around it, flash attention, positions, norms.

Attention of decoders is causal: it does half of the square; an encoder (a shape with segment vectors) does all of it.
"""

from __future__ import annotations

from penstock.shapes.costs.case import Case, Moved, Times
from penstock.shapes.costs.collectives import into, out_of
from penstock.shapes.costs.context import added_up, exchanged, kernels
from penstock.shapes.costs.pieces import Piece, Product
from penstock.shapes.heads import Heads, heads_of

_BACKWARD_ATTENTION = 2.5
"""Products of the backward pass of flash attention, of which one makes the scores again, over the two forward."""


def attention(case: Case) -> tuple[Piece, ...]:
    """From the result of the norm before to the sum with what passes by."""
    shape, t = case.shape, case.layout.tensor
    queries, keys = (heads * shape.head_width // t for heads in (shape.heads, shape.kv_heads))
    columns = [queries + 2 * keys] if case.fused else [queries, keys, keys]
    products = [Product(case.tokens, shape.hidden, each) for each in columns]
    heads = heads_of(shape, t)
    kernel = flash(case, heads)
    return (
        Piece(
            modules=("attention",),
            products=(*products, Product(case.tokens, queries, shape.hidden)),
            moved=_query_key_norms(case) + _around(case) + added_up(case, heads),
            kernels=(kernel,) * kernels(case),
            collectives=(
                *into(case, case.hidden_bytes),
                *exchanged(case, heads, kernel),
                *out_of(case, case.hidden_bytes),
            ),
        ),
    )


def flash(case: Case, heads: Heads) -> Times:
    """One of the kernels that make all products over the positions that a token sees: half of them in a decoder.

    Rows are the queries of all heads. Exchanged for whole sequences of fewer heads their number stays; in a ring every
    kernel has those of the GPU, and an equal part of the products.
    """
    shape = case.shape
    seen_twice = shape.sequence_length * (2 if shape.token_types else 1)
    flops = float(seen_twice * (heads.queries + heads.results) * case.tokens) / kernels(case)
    rows = case.tokens * (shape.heads / case.layout.tensor)
    return Times(
        case.kernels.attention_ns(flops, rows, backward=False),
        case.kernels.attention_ns(_BACKWARD_ATTENTION * flops, rows, backward=True),
        0,
    )


def _query_key_norms(case: Case) -> Moved:
    """Norms of each head's queries and keys."""
    shape, each = case.shape, case.norm_bytes
    if not shape.query_key_norm:
        return ()
    heads = case.tokens * (shape.heads + shape.kv_heads) * shape.head_width / case.layout.tensor
    return ((each[0] * heads, each[1] * heads),)


def _around(case: Case) -> Moved:
    """Rotary positions, and the copy of the result that eager torch makes before the projection.

    Eagerly each half of queries and keys is multiplied twice (two tensors each), added (three) and joined (two).
    """
    shape = case.shape
    found: Moved = ()
    if not shape.positions:
        elements = case.tokens * (shape.heads + shape.kv_heads) * shape.head_width / case.layout.tensor
        tensors = 2 if case.fused else 4 + 3 + 2
        found += ((tensors * case.width * elements, tensors * case.width * elements),)
    if not case.fused:
        copied = 2 * case.width * case.tokens * shape.heads * shape.head_width / case.layout.tensor
        found += ((copied, copied),)
    return found
