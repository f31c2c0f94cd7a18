"""The embedding, and the head with the last norm and the loss, on one GPU: times and collectives."""

from __future__ import annotations

from penstock.schemas.transformers.degrees import Collective
from penstock.shapes import parameters
from penstock.shapes.costs.case import FP32, Case, Times
from penstock.shapes.costs.collectives import gathered, gathered_again, joined, loss, out_of, replicated
from penstock.shapes.costs.pieces import Product


def embedding_times(case: Case) -> Times:
    """Compute the times of the embedding.

    Every GPU looks up all tokens in its part of the words. The gradient is dense and added to the stored one.
    """
    shape, elements = case.shape, case.tokens * case.shape.hidden
    added = bool(shape.positions) + bool(shape.token_types)
    norm = case.norm_bytes if shape.embedding_norm else (0, 0)
    forward = case.kernels.moved_ns((2 + 3 * added) * case.width * elements)
    forward += case.kernels.moved_ns(norm[0] * elements / case.spread)
    stored = (case.width + 2 * FP32) if case.fused else 3 * case.width
    weight = case.kernels.moved_ns((case.width + stored) * case.rows * shape.hidden / case.layout.tensor)
    weight += case.kernels.moved_ns(3 * case.width * elements)
    return Times(forward, weight + case.kernels.moved_ns(norm[1] * elements / case.spread), weight)


def embedding_collectives(case: Case) -> tuple[Collective, ...]:
    """Return the collectives of the embedding.

    Each GPU finds some of the words, and the sum of their vectors is divided as the tokens are.
    """
    layer = parameters.embedding(case.shape)
    return joined([*out_of(case, case.hidden_bytes), *replicated(case, layer.replicated)])


def head_times(case: Case) -> Times:
    """Compute the times of the last norm, the scores and the loss."""
    shape, kernels, outputs = case.shape, case.kernels, float(case.outputs)
    norm = case.norm_bytes if shape.final_norm else (0, 0)
    elements, scores = case.tokens * shape.hidden / case.spread, case.tokens * outputs
    there, back = _loss_bytes(case)
    product = Product(case.tokens, shape.hidden, outputs)
    forward = kernels.moved_ns(norm[0] * elements) + product.forward_ns(case)
    weight = product.weights_ns(case)
    inputs = kernels.moved_ns(norm[1] * elements) + product.inputs_ns(case)
    backward = inputs + kernels.moved_ns(back * scores) + weight
    return Times(forward + kernels.moved_ns(there * scores), backward, weight)


def head_collectives(case: Case) -> tuple[Collective, ...]:
    """Return the collectives of the head, of which every GPU has the scores of some words for all tokens."""
    layer = parameters.head(case.shape)
    around = (*gathered(case, case.hidden_bytes), *gathered_again(case, case.hidden_bytes))
    return (*joined([*around, *replicated(case, layer.replicated)]), *loss(case))


def _loss_bytes(case: Case) -> tuple[int, int]:
    """Return the bytes per score that the loss moves forward and backward.

    A fused loss is read and written in fp32 and back. An eager one is cast, normalised, and both back again.
    """
    width = case.width
    if case.fused:
        return width + FP32, FP32 + width
    return (width + FP32) + 2 * FP32, FP32 + 3 * FP32 + (FP32 + width)
