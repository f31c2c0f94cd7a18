"""FLOPs that a transformer takes for a sample: of matrix products alone, each counted once.

.. [1] Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021), appendix: 2 FLOPs per
   weight and token forwards, 4 backwards.
"""

from __future__ import annotations

from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.roles import windowed_layers


def flops_per_sample(shape: TransformerShape) -> int:
    """Return the FLOPs of one sample's forward and backward, without recomputation.

    Each token costs 6 FLOPs per weight of the matrices that it goes through. Of the experts only the ones that it is
    sent to count, and the embedding is looked up. Attention costs 6 × 2 per pair of tokens and width of the heads, half
    of it where attention is causal. A window of w positions has w·(2s - w)/2 of a sequence's s² pairs.
    """
    weights = shape.hidden * (shape.outputs or shape.vocabulary)
    dense = parameters.dense_layers(shape)
    for is_dense, number in ((True, dense), (False, shape.layers - dense)):
        if number:
            weights += number * _weights(shape, dense=is_dense)
    length, width = shape.sequence_length, shape.windows.width if shape.windows else 0
    windowed = sum(windowed_layers(shape))
    twice = (shape.layers - windowed) * length**2 * (2 if shape.token_types else 1)
    twice += windowed * width * (2 * length - width)
    return 6 * weights * length + 6 * shape.heads * _head_width(shape) * twice


def _weights(shape: TransformerShape, *, dense: bool) -> int:
    """Return the weights of a layer's matrices that one token goes through."""
    weights = sum(rows * columns for rows, columns in parameters.matrices(shape, dense=dense))
    if dense or shape.experts is None:
        return weights
    each = sum(rows * columns for rows, columns in parameters.expert_matrices(shape, dense=False))
    return weights + shape.experts.per_token * each + shape.hidden * shape.experts.number


def _head_width(shape: TransformerShape) -> int:
    """Return the mean width of a head's scores and of its values."""
    latent = shape.latent
    if latent is None:
        return shape.head_width
    return (latent.plain_width + latent.rotary_width + latent.value_width) // 2
