"""Parameters of a transformer by the degree of parallelism that divides them: tensor-parallel, replicated, experts'.

.. [1] Megatron-LM, module ``theoretical_memory_usage``: multi-head latent attention and experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from penstock.schemas.transformers.shape import LatentAttention, TransformerShape


class Parameters(NamedTuple):
    """Numbers of parameters by the degree that divides them.

    The tensor degree divides ``dense`` parameters, and the expert degree ``expert`` ones. Norms and routers are
    ``replicated``.
    """

    dense: int = 0
    replicated: int = 0
    expert: int = 0

    def plus(self, other: Parameters) -> Parameters:
        """Add up each class of parameters."""
        return Parameters(*(one + two for one, two in zip(self, other, strict=True)))

    def times(self, number: int) -> Parameters:
        """Multiply each class of parameters."""
        return Parameters(*(each * number for each in self))

    @property
    def total(self) -> int:
        """The sum of all classes."""
        return sum(self)


@lru_cache(maxsize=64)
def layer(shape: TransformerShape, *, dense: bool) -> Parameters:
    """Count the parameters of one layer; ``dense`` chooses the kind where the shape has experts."""
    norms = shape.norms_per_layer * norm_width(shape)
    parameters = _attention(shape).plus(Parameters(replicated=norms))
    if shape.experts is None or dense:
        return parameters.plus(_feed_forward(shape))
    return parameters.plus(_experts(shape))


def with_copied_heads(shape: TransformerShape, tensor: int) -> TransformerShape:
    """Return the shape that the GPUs of a tensor-parallel group have together.

    Where it has fewer key and value heads than GPUs, each GPU has one of each.
    """
    if shape.latent is not None or shape.kv_heads >= tensor:
        return shape
    return shape.model_copy(update={"kv_heads": tensor})


def embedding(shape: TransformerShape, rows: int | None = None) -> Parameters:
    """Count the word, position and segment vectors; ``rows`` are the words of a padded vocabulary."""
    words = (shape.vocabulary if rows is None else rows) * shape.hidden
    further = (shape.positions + shape.token_types) * shape.hidden
    return Parameters(dense=words, replicated=further + (norm_width(shape) if shape.embedding_norm else 0))


def head(shape: TransformerShape, rows: int | None = None) -> Parameters:
    """Count the last norm and the scores, with a separate weight even where it is tied to the embedding's."""
    outputs = shape.outputs or (shape.vocabulary if rows is None else rows)
    bias = outputs if shape.head_bias else 0
    return Parameters(dense=outputs * shape.hidden + bias, replicated=norm_width(shape) if shape.final_norm else 0)


def dense_layers(shape: TransformerShape) -> int:
    """Return how many layers at the front have an ordinary feed-forward."""
    return shape.layers if shape.experts is None else shape.experts.dense_layers


def total(shape: TransformerShape) -> int:
    """Count the parameters of the model, a tied head once."""
    dense = dense_layers(shape)
    body = layer(shape, dense=True).times(dense).plus(layer(shape, dense=False).times(shape.layers - dense))
    tied = shape.vocabulary * shape.hidden if shape.tied else 0
    return body.plus(embedding(shape)).plus(head(shape)).total - tied


def norm_width(shape: TransformerShape) -> int:
    """Count the parameters of one norm over the hidden width."""
    return shape.hidden * (2 if shape.norm == "layer" else 1)


def matrices(shape: TransformerShape, *, dense: bool) -> tuple[tuple[int, int], ...]:
    """Return the rows and columns of one layer's fused weights that the tensor degree divides, undivided."""
    hidden, width = shape.hidden, shape.head_width
    if shape.latent is None:
        queries, values = (shape.heads + 2 * shape.kv_heads) * width, shape.heads * width
        weights = [(queries, hidden), (hidden, values)]
    else:
        weights = _latent_matrices(shape, shape.latent)
    inner = shape.ffn if shape.experts is None or dense else shape.experts.shared_ffn
    return (*weights, *_two(shape, inner)) if inner else tuple(weights)


def expert_matrices(shape: TransformerShape, *, dense: bool) -> tuple[tuple[int, int], ...]:
    """Return the rows and columns of the fused weights of one routed expert of a layer; empty for a dense layer."""
    return () if shape.experts is None or dense else _two(shape, shape.experts.ffn)


def _two(shape: TransformerShape, inner: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((2 if shape.gated else 1) * inner, shape.hidden), (shape.hidden, inner)


def _attention(shape: TransformerShape) -> Parameters:
    if shape.latent is not None:
        weights = sum(rows * columns for rows, columns in _latent_matrices(shape, shape.latent))
        narrow = sum(rows * columns for rows, columns in _narrow_matrices(shape, shape.latent))
        norms = (shape.latent.query_rank or 0) + shape.latent.key_value_rank
        return Parameters(dense=weights - narrow, replicated=narrow + norms)
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    dense = 2 * shape.hidden * (queries + keys)
    dense += 0 if shape.attention_biases == "none" else queries + 2 * keys
    out_bias = shape.hidden if shape.attention_biases == "all" else 0
    norms = 2 * shape.head_width * (2 if shape.norm == "layer" else 1) if shape.query_key_norm else 0
    return Parameters(dense=dense + (shape.heads if shape.sinks else 0), replicated=out_bias + norms)


def local_elements(shape: TransformerShape, weights: Iterable[tuple[int, int]], tensor: int) -> Fraction:
    """Count the elements of weights (rows, columns) on one GPU; latent attention's narrow weights are whole on each."""
    narrow = set() if shape.latent is None else set(_narrow_matrices(shape, shape.latent))
    return sum((Fraction(each[0] * each[1], 1 if each in narrow else tensor) for each in weights), Fraction(0))


def _narrow_matrices(shape: TransformerShape, latent: LatentAttention) -> list[tuple[int, int]]:
    """Return the matrices to the narrow widths, which neither Megatron nor torchtitan divides."""
    queries = [] if latent.query_rank is None else [(latent.query_rank, shape.hidden)]
    return [*queries, (latent.key_value_rank + latent.rotary_width, shape.hidden)]


def _latent_matrices(shape: TransformerShape, latent: LatentAttention) -> list[tuple[int, int]]:
    hidden, heads, rank = shape.hidden, shape.heads, latent.query_rank
    query = heads * (latent.plain_width + latent.rotary_width)
    queries = [(query, hidden)] if rank is None else [(rank, hidden), (query, rank)]
    return [
        *queries,
        (latent.key_value_rank + latent.rotary_width, hidden),
        (heads * (latent.plain_width + latent.value_width), latent.key_value_rank),
        (hidden, heads * latent.value_width),
    ]


def _feed_forward(shape: TransformerShape) -> Parameters:
    first = 2 if shape.gated else 1
    weights = (first + 1) * shape.hidden * shape.ffn
    biases = (first * shape.ffn, shape.hidden) if shape.ffn_biases else (0, 0)
    return Parameters(dense=weights + biases[0], replicated=biases[1])


def _experts(shape: TransformerShape) -> Parameters:
    experts = shape.experts
    assert experts is not None
    first = 2 if shape.gated else 1
    each = (first + 1) * shape.hidden * experts.ffn
    each += first * experts.ffn + shape.hidden if experts.biases else 0
    router = experts.number * (shape.hidden + (1 if experts.router_bias else 0))
    gate = shape.hidden if experts.shared_gate else 0
    shared = (first + 1) * shape.hidden * experts.shared_ffn
    return Parameters(dense=shared, replicated=router + gate, expert=experts.number * each)
