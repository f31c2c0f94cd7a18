"""Flash attention of one GPU.

Attention of decoders is causal: it does half of the square; an encoder (a shape with segment vectors) does all of it. A
window of w positions leaves w·(2s - w)/2 of the s² pairs of a sample.
"""

from __future__ import annotations

from fractions import Fraction

from penstock.shapes.costs.case import Case, Times
from penstock.shapes.costs.context import kernels
from penstock.shapes.heads import Heads

_BACKWARD = 2.5
"""FLOPs of the backward pass, which makes the scores again, over the forward's."""


def flash(case: Case, heads: Heads) -> Times:
    """Compute the times of one of the kernels that make all products over the positions that a token sees.

    A token of a decoder sees half of the positions. Rows are the queries of all heads. An exchange for whole sequences
    of fewer heads leaves their number unchanged. In a ring every kernel has the GPU's own queries, and an equal part of
    the products.
    """
    shape = case.shape
    each = Fraction(case.seen * case.tokens, kernels(case))
    flops, latent = float(each * (heads.queries + heads.results)), shape.latent is not None
    rows = case.tokens * (shape.heads / case.layout.tensor)
    return Times(
        case.kernels.attention_ns(flops, rows, backward=False, latent=latent),
        case.kernels.attention_ns(_BACKWARD * flops, rows, backward=True, latent=latent),
        0,
    )
