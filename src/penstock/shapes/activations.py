"""Bytes that one layer keeps of each token for its backward pass, on one GPU of the groups that run it.

``megatron`` means Megatron-Core with Transformer Engine's fused norms and activations and flash attention.
``torch`` means eager PyTorch modules with flash attention: RMSNorm works in fp32 and keeps its input and its
result in it, a gated feed-forward keeps four tensors instead of three. Under tensor parallelism by DTensor the inputs
of column-parallel products are kept as they are gathered, whole on every GPU; Megatron keeps a part and gathers again.

.. [1] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from penstock.schemas.transformers.degrees import Framework, Module
from penstock.schemas.transformers.shape import Experts, LatentAttention, TransformerShape
from penstock.shapes.heads import heads_of
from penstock.shapes.layout import FULL, MODULES, WITHIN, Layout

_BF16, _FP32, _MASK = 2, 4, 1


class Kept(NamedTuple):
    """Bytes per token: ``kept`` by every layer of every micro-batch in flight, ``again`` while one is recomputed."""

    kept: Fraction
    again: Fraction


class Norm(NamedTuple):
    """Bytes that a norm keeps: per element its input and its result, and ``statistics`` per token."""

    before: int
    after: int
    statistics: int


def norm_kept(shape: TransformerShape, framework: Framework) -> Norm:
    """A norm over the hidden width."""
    statistics = _FP32 * (2 if shape.norm == "layer" else 1)
    if framework == "torch" and shape.norm == "rms":
        return Norm(_FP32, _FP32 + _BF16, statistics)
    return Norm(_BF16, _BF16, statistics)


class _Pieces(NamedTuple):
    """What each module of a layer keeps, and what recomputing its norms alone leaves out."""

    inputs: Fraction
    """Inputs of the norms, dropout masks, and what else nothing but full recomputation leaves out."""
    norm: Fraction
    attention: Fraction
    mlp: Fraction
    mla_up_proj: Fraction
    """A part of attention."""

    @property
    def total(self) -> Fraction:
        return self.inputs + self.norm + self.attention + self.mlp


def per_token(shape: TransformerShape, layout: Layout, *, dense: bool) -> Kept:
    """One layer, ``dense`` or with experts, under the layout's recomputation."""
    pieces = _pieces_of(shape, layout, dense=dense)
    if layout.recompute == FULL:
        inputs = Fraction(_BF16 * shape.hidden, layout.tensor if layout.sequence_parallel else 1)
        return Kept(inputs, pieces.total)
    again = sum((getattr(pieces, module) for module in _outermost(layout.recompute)), Fraction(0))
    return Kept(pieces.total - again, again)


def context_buffers(shape: TransformerShape, layout: Layout) -> Fraction:
    """Bytes per token of a GPU that a layer has besides while it attends, where GPUs share sequences.

    A ring keeps the blocks of keys and values and the results of all steps until the last, as Transformer Engine does.
    Gathered keys and values, unless they are kept, are there with their gradients. Of an all-to-all what is sent is
    there with what is received.
    """
    context, heads = layout.context, heads_of(shape, layout.tensor)
    if context == 1:
        return Fraction(0)
    if layout.context_by == "ring":
        return _BF16 * context * (heads.moved + heads.results)
    if layout.context_by == "all_gather":
        return _BF16 * context * heads.moved * (1 if layout.framework == "torch" else 2)
    return _BF16 * sum(heads, Fraction(0))


def kept_by_modules(shape: TransformerShape, layout: Layout) -> dict[Module, Fraction]:
    """Bytes per token that recomputing each module of a dense layer frees; without those that it does not have."""
    pieces = _pieces_of(shape, layout, dense=True)
    return {module: getattr(pieces, module) for module in MODULES if module not in WITHIN or getattr(pieces, module)}


def _outermost(modules: frozenset[Module]) -> frozenset[Module]:
    """Those that are no part of another one that is recomputed."""
    return frozenset(module for module in modules if WITHIN.get(module) not in modules)


def before_scores(shape: TransformerShape, layout: Layout) -> Fraction:
    """Bytes per token that the head keeps apart from scores: the last norm's input, and what the scores are made of."""
    spread = layout.tensor if layout.sequence_parallel else 1
    norm = norm_kept(shape, layout.framework)
    whole = _BF16 if layout.framework == "torch" else 0
    shared = (norm.after - whole) * shape.hidden
    shared += norm.before * shape.hidden + norm.statistics if shape.final_norm else 0
    return whole * shape.hidden + Fraction(shared, spread)


def _pieces_of(shape: TransformerShape, layout: Layout, *, dense: bool) -> _Pieces:
    spread = layout.tensor if layout.sequence_parallel else 1
    gathered = layout.framework == "torch" and layout.context_by == "all_gather"
    times = layout.context if gathered else 1
    return _pieces(shape, dense, layout.tensor, spread, layout.expert_tensor, layout.framework, times)


@lru_cache(maxsize=1024)
def _pieces(
    shape: TransformerShape,
    dense: bool,
    tensor: int,
    spread: int,
    expert_tensor: int,
    framework: Framework,
    gathered: int,
) -> _Pieces:
    """``spread``: how many GPUs share what lies between the tensor-parallel parts.

    ``gathered``: how many times as many keys and values are kept as a GPU's tokens have.
    """
    hidden, norms = shape.hidden, shape.norms_per_layer
    eager_rms = framework == "torch" and shape.norm == "rms"
    into, _after, statistics = norm_kept(shape, framework)
    masks = 2 * _MASK * hidden if shape.dropout else 0
    inputs = Fraction(norms * (into * hidden + statistics) + masks, spread)
    heads = heads_of(shape, tensor)
    beyond = _BF16 * (gathered - 1) * heads.moved
    up = Fraction(0)
    if shape.latent is None:
        attention = _attention(shape, tensor, eager_rms, framework)
    else:
        up = _BF16 * (heads.queries + heads.moved)
        attention = _latent(shape, shape.latent, tensor, spread)
    if shape.experts is None or dense:
        mlp = _feed_forward(shape, shape.ffn, tensor, framework)
    else:
        inputs += Fraction(_FP32 * shape.experts.number, spread)
        mlp = _experts(shape, shape.experts, tensor, expert_tensor, framework)
    return _Pieces(inputs, _norm_results(shape, framework, spread), attention + beyond, mlp, up)


def _norm_results(shape: TransformerShape, framework: Framework, spread: int) -> Fraction:
    """Results of a layer's norms; in torch what attention and feed-forward read of them is whole on every GPU."""
    norms, after = shape.norms_per_layer, norm_kept(shape, framework).after
    gathered = min(norms, 2) if framework == "torch" else 0
    return shape.hidden * (gathered * _BF16 + Fraction(norms * after - gathered * _BF16, spread))


def _attention(shape: TransformerShape, tensor: int, eager_rms: bool, framework: Framework) -> Fraction:
    """Queries, keys, values, the result and its log-sum-exp; keys and values are whole heads on every GPU."""
    heads = heads_of(shape, tensor)
    found = _BF16 * sum(heads, Fraction(0)) + Fraction(_FP32 * shape.heads, tensor)
    if shape.query_key_norm:
        found += (2 * _FP32 if eager_rms else _BF16) * (heads.queries + heads.keys)
    if framework == "torch" and shape.kv_heads < shape.heads:
        found += _BF16 * heads.results  # the result of grouped attention is copied before the projection
    return found


def _latent(shape: TransformerShape, latent: LatentAttention, tensor: int, spread: int) -> Fraction:
    """Both narrow projections before and after their norms, then heads of queries, keys and values."""
    narrow = _BF16 * (2 * (latent.query_rank or 0) + 2 * latent.key_value_rank + latent.rotary_width)
    wide = _BF16 * sum(heads_of(shape, tensor), Fraction(0)) + Fraction(_FP32 * shape.heads, tensor)
    return Fraction(narrow, spread) + wide


def _feed_forward(shape: TransformerShape, width: int, tensor: int, framework: Framework) -> Fraction:
    """Before and after the activation; with a gate both factors before, and in eager torch their first result."""
    tensors = 2 if not shape.gated else 3 if framework == "megatron" else 4
    return Fraction(tensors * _BF16 * width, tensor)


def _experts(
    shape: TransformerShape, experts: Experts, tensor: int, expert_tensor: int, framework: Framework
) -> Fraction:
    """Tokens as they are dispatched and come back, within the experts under an even routing, and the shared ones."""
    copies = experts.per_token
    dispatched = Fraction(copies * 2 * _BF16 * shape.hidden * expert_tensor, tensor)
    within = copies * _feed_forward(shape, experts.ffn, tensor, framework)
    shared = _feed_forward(shape, experts.shared_ffn, tensor, framework)
    return dispatched + within + shared
