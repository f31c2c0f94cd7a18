"""Multi-head latent attention of one GPU: narrow projections, projections from them to the heads, flash attention.

The weights to the narrow widths are whole on every GPU. Megatron [1]_ multiplies a GPU's own part of the tokens with
them. It gathers the narrow results, a fraction of the hidden width, before the products that are divided, and the
rotary part of the keys after the projection. torchtitan [2]_ gathers the result of the norm before, as for other
attention, and multiplies all tokens on every GPU.

.. [1] Megatron-Core, ``MLASelfAttention``: ``parallel_mode`` duplicated, ``get_query_key_value_tensors``.
.. [2] torchtitan, ``models.deepseek_v3.sharding``.
"""

from __future__ import annotations

from penstock.schemas.transformers.degrees import Collective
from penstock.schemas.transformers.shape import LatentAttention
from penstock.shapes.costs.case import Case, Moved
from penstock.shapes.costs.collectives import gathered, into, out_of
from penstock.shapes.costs.context import added_up, exchanged, kernels
from penstock.shapes.costs.flash import flash
from penstock.shapes.costs.pieces import Piece, Product
from penstock.shapes.heads import heads_of

NARROW = ("narrow queries", "narrow keys")


def latent_attention(case: Case, latent: LatentAttention) -> tuple[Piece, ...]:
    """Return the pieces of latent attention, from the result of the norm before to the sum with the residual."""
    shape, t = case.shape, case.layout.tensor
    heads = heads_of(shape, t)
    kernel = flash(case, heads)
    return (
        _down(case, latent),
        _up(case, latent),
        Piece(
            modules=("attention",),
            products=(Product(case.tokens, shape.heads * latent.value_width // t, shape.hidden, name="out"),),
            moved=added_up(case, heads),
            kernels=(kernel,) * kernels(case),
            attends=True,
            collectives=(*exchanged(case, heads, kernel), *out_of(case, case.hidden_bytes)),
        ),
    )


def _down(case: Case, latent: LatentAttention) -> Piece:
    """Return the projections to the narrow widths, and the norms there."""
    rows, ranks = _narrow_rows(case), _ranks(latent)
    widths = [*ranks[:-1], ranks[-1] + latent.rotary_width]
    each = case.norm_bytes
    rotary: tuple[Collective, ...] = ()
    if case.fused and case.spread > 1:
        rotary = gathered(case, case.length * latent.rotary_width * case.width)
    return Piece(
        modules=("attention",),
        products=tuple(
            Product(rows, case.shape.hidden, width, name=name)
            for name, width in zip(NARROW[-len(widths) :], widths, strict=True)
        ),
        moved=tuple((each[0] * rows * rank, each[1] * rows * rank) for rank in ranks),
        collectives=rotary,
    )


def _up(case: Case, latent: LatentAttention) -> Piece:
    """Return the projections to all heads, and rotary positions; Megatron's ``mla_up_proj``."""
    shape, t, direct = case.shape, case.layout.tensor, latent.query_rank is None
    inner = [latent.query_rank or shape.hidden, latent.key_value_rank]
    queries = shape.heads * (latent.plain_width + latent.rotary_width) // t
    keys = shape.heads * (latent.plain_width + latent.value_width) // t
    narrow = [case.length * width * case.width for width in (inner[1:] if direct else inner)]
    around = into(case, case.hidden_bytes) if direct or not case.fused else ()
    if case.fused:
        around += tuple(each for size in narrow for each in into(case, size))
    return Piece(
        modules=("attention", "mla_up_proj"),
        products=(
            Product(case.tokens, inner[0], queries, name="queries"),
            Product(case.tokens, inner[1], keys, name="keys"),
        ),
        moved=_rotary(case, latent),
        collectives=around,
    )


def _ranks(latent: LatentAttention) -> list[int]:
    return [*([] if latent.query_rank is None else [latent.query_rank]), latent.key_value_rank]


def _narrow_rows(case: Case) -> float:
    """Return the tokens that one GPU multiplies with the whole weights."""
    return case.tokens / case.spread if case.fused else case.tokens


def _rotary(case: Case, latent: LatentAttention) -> Moved:
    """Return the bytes of rotary positions.

    One kernel of Megatron turns a part of the queries in place, and another joins keys and splits off values. Eager
    torch multiplies halves twice (two tensors each), adds them (three) and joins them (two), and then joins the part
    without positions; values stay where they are.
    """
    heads = case.width * case.tokens * case.shape.heads / case.layout.tensor
    shared = case.width * case.tokens * latent.rotary_width
    turned, whole = heads * latent.rotary_width, heads * (latent.plain_width + latent.rotary_width)
    if case.fused:
        up = heads * (latent.plain_width + latent.value_width)
        joined = up + shared + whole + heads * latent.value_width
        return ((2 * turned, 2 * turned), (joined, joined))
    steps = (4 + 3 + 2) * (turned + shared)
    return ((steps, steps), (2 * whole, 2 * whole), (2 * whole, 2 * whole))
