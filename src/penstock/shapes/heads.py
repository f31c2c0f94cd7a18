"""The width of attention's heads on one GPU of a tensor-parallel group."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from penstock.schemas.transformers.shape import TransformerShape


class Heads(NamedTuple):
    """Elements per token of all heads of one GPU."""

    queries: Fraction
    keys: Fraction
    values: Fraction
    results: Fraction

    @property
    def moved(self) -> Fraction:
        """Keys and values, which go to the GPUs that have other tokens."""
        return self.keys + self.values


def heads_of(shape: TransformerShape, tensor: int) -> Heads:
    """Return the widths of the heads of one GPU.

    Key and value heads are whole on every GPU, and copied where they are fewer than the GPUs. In latent attention every
    head has separate keys and values. All keys share their rotary part, but attention reads it for each head.
    """
    latent = shape.latent
    if latent is None:
        queries = Fraction(shape.heads * shape.head_width, tensor)
        keys = Fraction(max(shape.kv_heads, tensor) * shape.head_width, tensor)
        return Heads(queries, keys, keys, queries)
    scored, values = latent.plain_width + latent.rotary_width, latent.value_width
    return Heads(*(Fraction(shape.heads * width, tensor) for width in (scored, scored, values, values)))
