"""Bytes that a layer keeps for its backward pass on one GPU, and bytes that it needs while it runs."""

from __future__ import annotations

import math
from fractions import Fraction

from penstock.shapes.activations import before_scores, context_buffers, norm_kept, per_token
from penstock.shapes.costs.case import Case
from penstock.shapes.gpu_memory import LOGITS, dummy_bytes
from penstock.shapes.roles import Role, is_dense, roles_of

_IDS = 8
"""Bytes of a token's number."""


def stash_bytes(case: Case, role: Role) -> int:
    """Return the bytes kept for the backward pass, with the tokens' numbers at both ends, the head's norm and scores.

    A norm's result is kept by the module that reads it, and the last block's by the head; in torch it is kept as
    gathered, whole.
    """
    shape, layout = case.shape, case.layout
    scale = Fraction(case.width, 2)
    """Scale of the counts of `activations`, which are for tensors of 16 bits."""
    if role == "embedding":
        norm = norm_kept(shape, layout.framework)
        before = Fraction(norm.before * shape.hidden + norm.statistics, case.spread) if shape.embedding_norm else 0
        return math.ceil(case.tokens * (_IDS + scale * before))
    if role == "head":
        kept = _IDS + scale * before_scores(shape, layout) + LOGITS[layout.framework].kept * case.outputs
        return math.ceil(case.tokens * kept)
    return math.ceil(case.tokens * scale * per_token(shape, layout, dense=is_dense(role)).kept)


def workspace_bytes(case: Case, role: Role) -> int:
    """Return the bytes needed while a layer runs.

    These are gradients of scores, buffers of attention where GPUs share sequences, and dummies. Dummies are Transformer
    Engine's weight gradients, one per shape of weight. They are kept, so each layer counts the dummies that its GPU
    then has: the head also the last block's.
    """
    if role == "embedding":
        return 0
    shape, layout = case.shape, case.layout
    block = roles_of(shape)[-2] if role == "head" else role
    outputs = (shape.outputs or case.rows) if role == "head" else None
    dummies = dummy_bytes(shape, layout, kinds=[is_dense(block)], outputs=outputs) * case.width // 2
    if role == "head":
        return dummies + math.ceil(case.tokens * LOGITS[layout.framework].again * case.outputs)
    return dummies + math.ceil(case.tokens * Fraction(case.width, 2) * context_buffers(shape, layout))
