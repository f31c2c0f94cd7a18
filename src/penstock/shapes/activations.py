"""Bytes that one layer keeps of each token for its backward pass, on one GPU of the groups that run it.

``megatron`` means Megatron-Core with Transformer Engine's fused norms and activations and flash attention.
``torch`` means eager PyTorch modules with flash attention: RMSNorm works in fp32 and keeps its input and its
result in it, a gated feed-forward keeps four tensors instead of three. Under tensor parallelism by DTensor the inputs
of column-parallel products are kept as they are gathered, whole on every GPU; Megatron keeps a part and gathers again.

.. [1] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.
.. [2] Megatron-Core, ``moe_layer``, ``token_dispatcher`` (alltoall) and ``experts.TEGroupedMLP``; Transformer Engine,
   ``permutation``; torchtitan, ``models.common.moe`` and ``token_dispatcher``: what a layer with experts keeps.
.. [3] torchtitan, ``distributed.activation_checkpoint``: ``SelectiveAC``, by operator (0.2: ``_apply_op_sac``).
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple, get_args

from penstock.schemas.transformers.degrees import ALONE, WITHIN, ContextKind, Framework, Module
from penstock.schemas.transformers.shape import Experts, LatentAttention, TransformerShape
from penstock.shapes.heads import heads_of
from penstock.shapes.layout import FULL, Layout
from penstock.shapes.routing import busiest, copies_per_token

_BF16, _FP32, _INT32, _INT64, _MASK = 2, 4, 4, 8, 1
_HALVES = 2
"""Of a block: attention and feed-forward."""


_Context = tuple[int, ContextKind] | None
"""How many GPUs share sequences, and how they see all keys; None for one."""


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
    """The whole feed-forward."""
    mla_up_proj: Fraction
    """A part of attention, as the next two are parts of the feed-forward."""
    moe_act: Fraction
    shared_experts: Fraction
    operators: Fraction
    """All between the results that torchtitan's selective checkpoints keep; 0 where that is not known."""

    @property
    def total(self) -> Fraction:
        return self.inputs + self.norm + self.attention + self.mlp

    def freed(self, modules: frozenset[Module]) -> Fraction:
        """What recomputing these modules frees; a part of another one of them frees nothing more."""
        alone = modules & set(ALONE)
        modules = alone or modules
        return sum((getattr(self, each) for each in modules if WITHIN.get(each) not in modules), Fraction(0))


class _FeedForward(NamedTuple):
    """Bytes per token of a feed-forward, and of its parts that can be recomputed by themselves."""

    whole: Fraction
    moe_act: Fraction = Fraction(0)
    shared_experts: Fraction = Fraction(0)


def per_token(shape: TransformerShape, layout: Layout, *, dense: bool) -> Kept:
    """One layer, ``dense`` or with experts, under the layout's recomputation."""
    pieces = _pieces_of(shape, layout, dense=dense)
    if layout.recompute >= FULL:
        inputs = Fraction(_BF16 * shape.hidden, layout.tensor if layout.sequence_parallel else 1)
        return Kept(inputs, pieces.total)
    again = pieces.freed(layout.recompute)
    return Kept(pieces.total - again, again)


def kept_by_modules(shape: TransformerShape, layout: Layout, *, dense: bool) -> dict[Module, Fraction]:
    """Bytes per token that recomputing each module frees that a layer, ``dense`` or with experts, has."""
    pieces = _pieces_of(shape, layout, dense=dense)
    modules = (each for each in get_args(Module) if each not in (*WITHIN, *ALONE) or getattr(pieces, each))
    return {each: getattr(pieces, each) for each in modules}


def context_buffers(shape: TransformerShape, layout: Layout) -> Fraction:
    """Bytes per token of a GPU that a layer has in addition while it attends, where GPUs share sequences.

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


def before_scores(shape: TransformerShape, layout: Layout) -> Fraction:
    """Bytes per token that the head keeps apart from scores: the last norm's input, and what the scores are made of."""
    spread = layout.tensor if layout.sequence_parallel else 1
    norm = norm_kept(shape, layout.framework)
    whole = _BF16 if layout.framework == "torch" else 0
    shared = (norm.after - whole) * shape.hidden
    shared += norm.before * shape.hidden + norm.statistics if shape.final_norm else 0
    return whole * shape.hidden + Fraction(shared, spread)


def _pieces_of(shape: TransformerShape, layout: Layout, *, dense: bool) -> _Pieces:
    """The sizes of a layer's modules depend on the degrees and the framework alone."""
    spread = layout.tensor if layout.sequence_parallel else 1
    context = (layout.context, layout.context_by) if layout.context > 1 else None
    expert = (layout.expert, layout.expert_tensor)
    return _pieces(shape, dense, layout.tensor, spread, expert, layout.framework, context)


@lru_cache(maxsize=1024)
def _pieces(
    shape: TransformerShape,
    dense: bool,
    tensor: int,
    spread: int,
    expert: tuple[int, int],
    framework: Framework,
    context: _Context,
) -> _Pieces:
    """``spread``: how many GPUs share what lies between the tensor-parallel parts."""
    hidden, norms = shape.hidden, shape.norms_per_layer
    eager_rms = framework == "torch" and shape.norm == "rms"
    into, _after, statistics = norm_kept(shape, framework)
    masks = 2 * _MASK * hidden if shape.dropout else 0
    inputs = Fraction(norms * (into * hidden + statistics) + masks, spread)
    attention, up = _attention(shape, tensor, framework, context), Fraction(0)
    if shape.latent is None:
        attention += _around_heads(shape, tensor, eager_rms, framework)
    else:
        attention += _narrow(shape, shape.latent, spread, framework)
        up = _made_from_narrow(shape, tensor, framework, context)
    if shape.experts is None or dense:
        feed_forward = _FeedForward(_feed_forward(shape, shape.ffn, framework) / tensor)
    else:
        feed_forward = _mixture(shape, shape.experts, tensor, spread, expert, framework)
    read_whole = 1 if shape.experts is not None and not dense and not shape.experts.shared_ffn else 2
    norm = _norm_results(shape, framework, spread, read_whole)
    pieces = _Pieces(inputs, norm, attention, feed_forward.whole, up, *feed_forward[1:], Fraction(0))
    if framework == "megatron" or context is not None:
        return pieces
    kept = _between_operators(shape, dense, tensor, spread, expert)
    return pieces._replace(operators=max(Fraction(0), pieces.total - kept))


def _between_operators(
    shape: TransformerShape, dense: bool, tensor: int, spread: int, expert: tuple[int, int]
) -> Fraction:
    """Return what selective checkpoints by operator keep [3]_: input, attention's result, products, what was sent.

    Results of reduce-scatters are a GPU's part of the sequence; copies of tokens arrive at their experts and back.
    """
    kept = Fraction(_BF16 * shape.hidden, spread)
    kept += _BF16 * heads_of(shape, tensor).results + Fraction(_FP32 * shape.heads, tensor)
    kept += _BF16 * sum(result.width for result in kept_results(shape, tensor, dense=dense))
    kept += Fraction(_HALVES * _BF16 * shape.hidden, spread) if spread > 1 else 0
    experts = shape.experts
    if experts is not None and not dense:
        copies = copies_per_token(experts) / spread
        kept += Fraction(experts.per_token * (_FP32 + _INT64), spread)
        if expert != (1, 1):
            kept += _BF16 * shape.hidden * copies * (1 + expert[1] * busiest(experts, expert[0]))
    return kept


def _norm_results(shape: TransformerShape, framework: Framework, spread: int, read_whole: int) -> Fraction:
    """Results of a layer's norms, without those of norms after its halves, as Gemma's: sums keep nothing of them.

    In torch what products of ``read_whole`` of its halves read is whole on every GPU.
    """
    norms, after = shape.norms_per_layer, norm_kept(shape, framework).after
    added = max(0, norms - _HALVES)
    whole = min(norms, read_whole) if framework == "torch" else 0
    return shape.hidden * (whole * _BF16 + Fraction(norms * after - (added + whole) * _BF16, spread))


def _attention(shape: TransformerShape, tensor: int, framework: Framework, context: _Context) -> Fraction:
    """Queries, keys, values, the result and its log-sum-exp; keys and values are whole heads on every GPU.

    In torch gathered keys and values are kept as they are.
    """
    heads = heads_of(shape, tensor)
    found = _BF16 * (heads.queries + heads.results) + Fraction(_FP32 * shape.heads, tensor)
    found += _kept_with_values(shape, tensor, framework, context)
    gathered = context[0] if framework == "torch" and context is not None and context[1] == "all_gather" else 1
    return found + _BF16 * gathered * heads.moved


def _around_heads(shape: TransformerShape, tensor: int, eager_rms: bool, framework: Framework) -> Fraction:
    """Norms of heads; in torch the copy of the result of grouped attention that is made before the projection."""
    heads, found = heads_of(shape, tensor), Fraction(0)
    if shape.query_key_norm:
        found += (2 * _FP32 if eager_rms else _BF16) * (heads.queries + heads.keys)
    return found + (_BF16 * heads.results if framework == "torch" and shape.kv_heads < shape.heads else 0)


def _narrow(shape: TransformerShape, latent: LatentAttention, spread: int, framework: Framework) -> Fraction:
    """Narrow projections before and after their norms; in Megatron the rotary part of keys, in torch all tokens."""
    norm = norm_kept(shape, framework)
    ranks = [rank for rank in (latent.query_rank, latent.key_value_rank) if rank is not None]
    found = Fraction(sum(ranks) * (norm.before + norm.after))
    if framework == "torch":
        return found + len(ranks) * norm.statistics
    return (found + _BF16 * latent.rotary_width) / spread


def _made_from_narrow(shape: TransformerShape, tensor: int, framework: Framework, context: _Context) -> Fraction:
    """What the projections of latent attention made, as far as it is kept and was not sent by a GPU.

    A ring leaves another GPU's keys and values to be kept, an all-to-all everything; in torch those gathered are kept.
    """
    heads = heads_of(shape, tensor)
    if context is not None and context[1] == "all_to_all":
        return Fraction(0)
    sent = context is not None and (context[1] == "ring" or framework == "torch")
    made = _BF16 * (heads.queries if sent else heads.queries + heads.moved)
    return made + _kept_with_values(shape, tensor, framework, context)


def _kept_with_values(shape: TransformerShape, tensor: int, framework: Framework, context: _Context) -> Fraction:
    """The part of keys without positions: values of latent attention are one tensor with it in torch, until sent."""
    if framework == "megatron" or context is not None or shape.latent is None:
        return Fraction(0)
    return Fraction(_BF16 * shape.heads * shape.latent.plain_width, tensor)


def _feed_forward(shape: TransformerShape, width: int, framework: Framework) -> Fraction:
    """Before and after the activation; with a gate both factors before, and in eager torch their first result."""
    tensors = 2 if not shape.gated else 3 if framework == "megatron" else 4
    return Fraction(tensors * _BF16 * width)


def _recomputed_activation(shape: TransformerShape, width: int, framework: Framework) -> Fraction:
    """The activation's result, and with a gate in eager torch that of its first kernel."""
    return Fraction((2 if shape.gated and framework == "torch" else 1) * _BF16 * width)


def _mixture(
    shape: TransformerShape, experts: Experts, tensor: int, spread: int, expert: tuple[int, int], framework: Framework
) -> _FeedForward:
    """``expert``: how many GPUs share the experts, and each expert."""
    copies = copies_per_token(experts) / spread
    worked = copies * busiest(experts, expert[0])
    shared = _shared_experts(shape, experts, tensor, spread, framework)
    router = _router(shape, experts, framework) / spread
    routed = _routed_experts(shape, experts, worked, expert[1], framework)
    whole = router + routed + copies * _returned_copy(shape, framework) + shared
    return _FeedForward(whole, worked * _recomputed_activation(shape, experts.ffn, framework), shared)


def _router(shape: TransformerShape, experts: Experts, framework: Framework) -> Fraction:
    """Of a token: scores in fp32. Megatron has those of the loss that balances experts as well, a mask of the experts
    that were chosen, and the map of the permutation; torch the router's input in fp32, and the numbers of the chosen.
    """
    if framework == "megatron":
        return Fraction(experts.number * (2 * _FP32 + _MASK) + (2 * experts.number + 1) * _INT32)
    chosen = experts.per_token * (_FP32 + 3 * _INT64)  # scores; experts, order of their copies, token of each
    return Fraction(_FP32 * (shape.hidden + experts.number) + chosen)


def _routed_experts(
    shape: TransformerShape, experts: Experts, worked: Fraction, expert_tensor: int, framework: Framework
) -> Fraction:
    """``worked`` copies of a token, gathered where GPUs share an expert: the input, its weight in fp32, and in Megatron
    two maps of sorting by expert; then what lies around the activation, of which each GPU has its part of the width.
    """
    further = _FP32 + 2 * _INT32 if framework == "megatron" else 0
    arrived = expert_tensor * (_BF16 * shape.hidden + further)
    return worked * (arrived + _feed_forward(shape, experts.ffn, framework))


def _returned_copy(shape: TransformerShape, framework: Framework) -> Fraction:
    """Of a copy that comes back: torch weighs it in fp32; Megatron weighed what the activation made, and keeps none."""
    return Fraction(_FP32 * (shape.hidden + 1) if framework == "torch" else 0)


def _shared_experts(
    shape: TransformerShape, experts: Experts, tensor: int, spread: int, framework: Framework
) -> Fraction:
    """Shared experts, and their result with its weight where a gate weighs them."""
    gate = _BF16 * (shape.hidden + 1) if experts.shared_gate else 0
    return _feed_forward(shape, experts.shared_ffn, framework) / tensor + Fraction(gate, spread)


class Result(NamedTuple):
    """Elements per token of a product's result on one GPU, by the name of the product."""

    name: str
    width: Fraction
    has_bias: bool = False


@lru_cache(maxsize=1024)
def kept_results(shape: TransformerShape, tensor: int, *, dense: bool) -> tuple[Result, ...]:
    """Return the products of a block, ``dense`` or with experts, whose results selective checkpoints keep [3]_.

    In the order of eager torch every second product without a bias, from the first on, and each that adds one. The
    router's and grouped ones are made again.
    """
    results = [*_attention_results(shape, tensor), *_feed_forward_results(shape, tensor, dense=dense)]
    counted = [result for result in results if not result.has_bias]
    return tuple(result for result in results if result.has_bias or counted.index(result) % 2 == 0)


def _attention_results(shape: TransformerShape, tensor: int) -> tuple[Result, ...]:
    """Return the products in order; the one that leads out of the heads leaves a sum of the whole width."""
    heads, latent, biases = heads_of(shape, tensor), shape.latent, shape.attention_biases
    out = Result("out", Fraction(shape.hidden), biases == "all")
    if latent is None:
        into = zip(("queries", "keys", "values"), heads, strict=False)
        return (*(Result(name, width, biases != "none") for name, width in into), out)
    down = (Result("narrow queries", Fraction(latent.query_rank)),) if latent.query_rank is not None else ()
    up = Fraction(shape.heads * (latent.plain_width + latent.value_width), tensor)
    return (
        *down,
        Result("queries", heads.queries),
        Result("narrow keys", Fraction(latent.key_value_rank + latent.rotary_width)),
        Result("keys", up),
        out,
    )


def _feed_forward_results(shape: TransformerShape, tensor: int, *, dense: bool) -> tuple[Result, ...]:
    """Return the products of the feed-forward, or of the shared experts."""
    experts = shape.experts
    width = shape.ffn if experts is None or dense else experts.shared_ffn
    names = ("gate", "up") if shape.gated else ("up",)
    into = [Result(name, Fraction(width, tensor), shape.ffn_biases) for name in names]
    return (*into, Result("down", Fraction(shape.hidden), shape.ffn_biases)) if width else ()
