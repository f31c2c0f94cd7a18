"""Attention of one GPU: the products around it, flash attention, positions, norms; latent attention is in `latent`."""

from __future__ import annotations

from penstock.shapes.costs.case import Case, Moved
from penstock.shapes.costs.collectives import into, out_of
from penstock.shapes.costs.context import added_up, exchanged, kernels
from penstock.shapes.costs.flash import flash
from penstock.shapes.costs.latent import latent_attention
from penstock.shapes.costs.pieces import Piece, Product
from penstock.shapes.heads import heads_of


def attention(case: Case) -> tuple[Piece, ...]:
    """Return the pieces of attention, from the result of the norm before to the sum with the residual."""
    if case.shape.latent is not None:
        return latent_attention(case, case.shape.latent)
    shape, t = case.shape, case.layout.tensor
    queries, keys = (heads * shape.head_width // t for heads in (shape.heads, shape.kv_heads))
    apart = {"queries": queries, "keys": keys, "values": keys}
    columns = {"": queries + 2 * keys} if case.fused else apart
    products = [Product(case.tokens, shape.hidden, each, name=name) for name, each in columns.items()]
    heads = heads_of(shape, t)
    kernel = flash(case, heads)
    return (
        Piece(
            modules=("attention",),
            products=(*products, Product(case.tokens, queries, shape.hidden, name="out")),
            moved=_query_key_norms(case) + _around(case) + added_up(case, heads),
            kernels=(kernel,) * kernels(case),
            attends=True,
            collectives=(
                *into(case, case.hidden_bytes),
                *exchanged(case, heads, kernel),
                *out_of(case, case.hidden_bytes),
            ),
        ),
    )


def _query_key_norms(case: Case) -> Moved:
    """Return the bytes of the norms of each head's queries and keys."""
    shape, each = case.shape, case.norm_bytes
    if not shape.query_key_norm:
        return ()
    heads = case.tokens * (shape.heads + shape.kv_heads) * shape.head_width / case.layout.tensor
    return ((each[0] * heads, each[1] * heads),)


def _around(case: Case) -> Moved:
    """Return the bytes of rotary positions, and of the copy of the result that eager torch makes before the projection.

    Eager torch multiplies each half of queries and keys twice (two tensors each), adds them (three) and joins them
    (two).
    """
    shape = case.shape
    moved: Moved = ()
    if not shape.positions:
        elements = case.tokens * (shape.heads + shape.kv_heads) * shape.head_width / case.layout.tensor
        tensors = 2 if case.fused else 4 + 3 + 2
        moved += ((tensors * case.width * elements, tensors * case.width * elements),)
    if not case.fused:
        copied = 2 * case.width * case.tokens * shape.heads * shape.head_width / case.layout.tensor
        moved += ((copied, copied),)
    return moved
