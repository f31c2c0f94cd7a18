"""A block of one GPU in pieces: norms, attention, feed-forward, and the sums with the residual."""

from __future__ import annotations

from penstock.shapes import parameters
from penstock.shapes.costs.attention import attention
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.collectives import gathered, replicated
from penstock.shapes.costs.experts import mixture
from penstock.shapes.costs.feed_forward import feed_forward
from penstock.shapes.costs.pieces import Piece

_HALVES = 2
"""Attention and feed-forward."""


def block(case: Case, *, dense: bool) -> tuple[Piece, ...]:
    """Return the pieces of a block with a dense feed-forward, or with experts."""
    layer = parameters.layer(case.shape, dense=dense)
    step = Piece(collectives=replicated(case, layer.replicated))
    experts = case.shape.experts
    if dense or experts is None:
        return (_norms(case, _HALVES), *attention(case), *feed_forward(case), _sums(case), step)
    read_whole = _HALVES if experts.shared_ffn else _HALVES - 1
    return (_norms(case, read_whole), *attention(case), *mixture(case, experts), _sums(case), step)


def _norms(case: Case, read_whole: int) -> Piece:
    """Return the norms over the hidden width.

    Under sequence parallelism torch gathers the results that products read whole.
    """
    each, elements = case.norm_bytes, case.tokens * case.shape.hidden / case.spread
    return Piece(
        modules=("norm",),
        moved=((each[0] * elements, each[1] * elements),) * case.shape.norms_per_layer,
        collectives=gathered(case, case.hidden_bytes) * read_whole if case.spread > 1 and not case.fused else (),
    )


def _sums(case: Case) -> Piece:
    """Return the two sums with the residual, of three tensors each, and the masks of dropout."""
    elements = case.tokens * case.shape.hidden / case.spread
    masks = (1 if case.fused else 2 * case.width + 1) if case.shape.dropout else 0
    moved = (3 * case.width + masks) * elements
    return Piece(moved=((moved, moved),) * _HALVES)
