"""Bytes that one layer keeps of each token for its backward pass, on one GPU of the groups that run it.

``megatron`` means Megatron-Core with Transformer Engine's fused norms and activations and flash attention. ``torch``
means eager PyTorch modules with flash attention. Its RMSNorm works in fp32 and keeps input and result in fp32, and its
gated feed-forward keeps four tensors instead of three. Under tensor parallelism by DTensor the inputs of
column-parallel products are kept as they are gathered, whole on every GPU. Megatron keeps a part and gathers again.

.. [1] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.
.. [2] Layers with experts keep tensors as in Megatron-Core, ``moe_layer``, ``token_dispatcher`` (alltoall) and
   ``experts.TEGroupedMLP``, in Transformer Engine, ``permutation``, and in torchtitan, ``models.common.moe`` and
   ``token_dispatcher``.
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
"""Halves of a block: attention and feed-forward."""


_Context = tuple[int, ContextKind] | None
"""The number of GPUs that share sequences and the way in which they see all keys; None for one GPU."""


class Kept(NamedTuple):
    """Bytes per token: ``kept`` by each layer per micro-batch in flight, ``again`` while a layer is recomputed."""

    kept: Fraction
    again: Fraction


class Norm(NamedTuple):
    """Bytes that a norm keeps: per element its input and its result, and ``statistics`` per token."""

    before: int
    after: int
    statistics: int


def norm_kept(shape: TransformerShape, framework: Framework) -> Norm:
    """Return the bytes that a norm over the hidden width keeps."""
    statistics = _FP32 * (2 if shape.norm == "layer" else 1)
    if framework == "torch" and shape.norm == "rms":
        return Norm(_FP32, _FP32 + _BF16, statistics)
    return Norm(_BF16, _BF16, statistics)


class _Pieces(NamedTuple):
    """Bytes per token that each module of a layer keeps, and ``inputs``, which only full recomputation frees."""

    inputs: Fraction
    """Inputs of the norms, dropout masks, and all else that only full recomputation frees."""
    norm: Fraction
    attention: Fraction
    mlp: Fraction
    """The whole feed-forward."""
    mla_up_proj: Fraction
    """A part of attention. The next two are parts of the feed-forward."""
    moe_act: Fraction
    shared_experts: Fraction
    operators: Fraction
    """All results but the ones that torchtitan's selective checkpoints keep; 0 where that is unknown."""

    @property
    def total(self) -> Fraction:
        return self.inputs + self.norm + self.attention + self.mlp

    def freed(self, modules: frozenset[Module]) -> Fraction:
        """Return the bytes per token that recomputing ``modules`` frees.

        A module that is a part of another listed module frees nothing more.
        """
        alone = modules & set(ALONE)
        modules = alone or modules
        return sum((getattr(self, each) for each in modules if WITHIN.get(each) not in modules), Fraction(0))


class _FeedForward(NamedTuple):
    """Bytes per token of a feed-forward, and of its parts that can be recomputed by themselves."""

    whole: Fraction
    moe_act: Fraction = Fraction(0)
    shared_experts: Fraction = Fraction(0)


def per_token(shape: TransformerShape, layout: Layout, *, dense: bool) -> Kept:
    """Compute the bytes of one layer, ``dense`` or with experts, under the layout's recomputation."""
    pieces = _pieces_of(shape, layout, dense=dense)
    if layout.recompute >= FULL:
        inputs = Fraction(_BF16 * shape.hidden, layout.tensor if layout.sequence_parallel else 1)
        return Kept(inputs, pieces.total)
    again = pieces.freed(layout.recompute)
    return Kept(pieces.total - again, again)


def kept_by_modules(shape: TransformerShape, layout: Layout, *, dense: bool) -> dict[Module, Fraction]:
    """Return the bytes per token that recomputing each module of a layer frees, ``dense`` or with experts."""
    pieces = _pieces_of(shape, layout, dense=dense)
    modules = (each for each in get_args(Module) if each not in (*WITHIN, *ALONE) or getattr(pieces, each))
    return {each: getattr(pieces, each) for each in modules}


def context_buffers(shape: TransformerShape, layout: Layout) -> Fraction:
    """Return the further bytes per token of a GPU while a layer attends and GPUs share sequences.

    A ring keeps the blocks of keys and values and the results of all steps until the last step, as Transformer Engine
    does. Gathered keys and values exist together with their gradients, unless the layer keeps them anyway. An
    all-to-all holds the tensors that it sends and the tensors that it receives.
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
    """Return the bytes per token that the head keeps besides scores: the last norm's input and the scores' input."""
    spread = layout.tensor if layout.sequence_parallel else 1
    norm = norm_kept(shape, layout.framework)
    whole = _BF16 if layout.framework == "torch" else 0
    shared = (norm.after - whole) * shape.hidden
    shared += norm.before * shape.hidden + norm.statistics if shape.final_norm else 0
    return whole * shape.hidden + Fraction(shared, spread)


def _pieces_of(shape: TransformerShape, layout: Layout, *, dense: bool) -> _Pieces:
    """Return the sizes of a layer's modules, which depend on the degrees and the framework alone."""
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
    """Compute the sizes of a layer's modules.

    ``spread`` is the number of GPUs that share the operations between the tensor-parallel parts.
    """
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
    """Return the bytes that selective checkpoints by operator keep [3]_.

    They keep a layer's input, attention's result, products, and the results of communication. The result of a
    reduce-scatter is a GPU's part of the sequence. Copies of tokens are kept at their experts and when they are back.
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
    """Return the bytes that a layer's norms keep of their results.

    Norms after the halves of a block, as Gemma's, count nothing: their results only enter a sum. In torch the results
    that products of ``read_whole`` halves read are whole on every GPU.
    """
    norms, after = shape.norms_per_layer, norm_kept(shape, framework).after
    added = max(0, norms - _HALVES)
    whole = min(norms, read_whole) if framework == "torch" else 0
    return shape.hidden * (whole * _BF16 + Fraction(norms * after - (added + whole) * _BF16, spread))


def _attention(shape: TransformerShape, tensor: int, framework: Framework, context: _Context) -> Fraction:
    """Return the bytes of queries, keys, values, the result and its log-sum-exp.

    Keys and values are whole heads on every GPU. In torch gathered keys and values are kept as they are.
    """
    heads = heads_of(shape, tensor)
    total = _BF16 * (heads.queries + heads.results) + Fraction(_FP32 * shape.heads, tensor)
    total += _kept_with_values(shape, tensor, framework, context)
    gathered = context[0] if framework == "torch" and context is not None and context[1] == "all_gather" else 1
    return total + _BF16 * gathered * heads.moved


def _around_heads(shape: TransformerShape, tensor: int, eager_rms: bool, framework: Framework) -> Fraction:
    """Return the bytes of the norms of heads, and of torch's copy of grouped attention's result."""
    heads, total = heads_of(shape, tensor), Fraction(0)
    if shape.query_key_norm:
        total += (2 * _FP32 if eager_rms else _BF16) * (heads.queries + heads.keys)
    return total + (_BF16 * heads.results if framework == "torch" and shape.kv_heads < shape.heads else 0)


def _narrow(shape: TransformerShape, latent: LatentAttention, spread: int, framework: Framework) -> Fraction:
    """Return the bytes of narrow projections before and after their norms.

    Megatron adds the rotary part of keys and divides all by ``spread``; in torch every GPU has all tokens.
    """
    norm = norm_kept(shape, framework)
    ranks = [rank for rank in (latent.query_rank, latent.key_value_rank) if rank is not None]
    total = Fraction(sum(ranks) * (norm.before + norm.after))
    if framework == "torch":
        return total + len(ranks) * norm.statistics
    return (total + _BF16 * latent.rotary_width) / spread


def _made_from_narrow(shape: TransformerShape, tensor: int, framework: Framework, context: _Context) -> Fraction:
    """Return the bytes kept of the results of latent attention's projections, except tensors that another GPU sent.

    A ring keeps another GPU's keys and values, and an all-to-all only received tensors; torch keeps gathered keys and
    values.
    """
    heads = heads_of(shape, tensor)
    if context is not None and context[1] == "all_to_all":
        return Fraction(0)
    sent = context is not None and (context[1] == "ring" or framework == "torch")
    total = _BF16 * (heads.queries if sent else heads.queries + heads.moved)
    return total + _kept_with_values(shape, tensor, framework, context)


def _kept_with_values(shape: TransformerShape, tensor: int, framework: Framework, context: _Context) -> Fraction:
    """Return the bytes of the part of keys without positions.

    In torch the values of latent attention are one tensor with this part, until they are sent.
    """
    if framework == "megatron" or context is not None or shape.latent is None:
        return Fraction(0)
    return Fraction(_BF16 * shape.heads * shape.latent.plain_width, tensor)


def _feed_forward(shape: TransformerShape, width: int, framework: Framework) -> Fraction:
    """Return the bytes before and after the activation.

    A gate has both factors before it, and in eager torch also the result of the first kernel.
    """
    tensors = 2 if not shape.gated else 3 if framework == "megatron" else 4
    return Fraction(tensors * _BF16 * width)


def _recomputed_activation(shape: TransformerShape, width: int, framework: Framework) -> Fraction:
    """Return the bytes of the activation's result; a gate in eager torch adds the result of its first kernel."""
    return Fraction((2 if shape.gated and framework == "torch" else 1) * _BF16 * width)


def _mixture(
    shape: TransformerShape, experts: Experts, tensor: int, spread: int, expert: tuple[int, int], framework: Framework
) -> _FeedForward:
    """Compute the bytes of a mixture; ``expert`` counts the GPUs that share the experts and the GPUs per expert."""
    copies = copies_per_token(experts) / spread
    worked = copies * busiest(experts, expert[0])
    shared = _shared_experts(shape, experts, tensor, spread, framework)
    router = _router(shape, experts, framework) / spread
    routed = _routed_experts(shape, experts, worked, expert[1], framework)
    whole = router + routed + copies * _returned_copy(shape, framework) + shared
    return _FeedForward(whole, worked * _recomputed_activation(shape, experts.ffn, framework), shared)


def _router(shape: TransformerShape, experts: Experts, framework: Framework) -> Fraction:
    """Return the router's bytes per token, with scores in fp32.

    Megatron also has the scores of the loss that balances experts, a mask of the experts that were chosen, and the map
    of the permutation. Torch has the router's input in fp32, and the numbers of the chosen experts.
    """
    if framework == "megatron":
        return Fraction(experts.number * (2 * _FP32 + _MASK) + (2 * experts.number + 1) * _INT32)
    chosen = experts.per_token * (_FP32 + 3 * _INT64)  # scores; experts, order of their copies, token of each
    return Fraction(_FP32 * (shape.hidden + experts.number) + chosen)


def _routed_experts(
    shape: TransformerShape, experts: Experts, worked: Fraction, expert_tensor: int, framework: Framework
) -> Fraction:
    """Return the bytes of ``worked`` copies of a token, gathered where GPUs share an expert.

    A copy has the input, its weight in fp32, and in Megatron two maps of sorting by expert. Each GPU has its part of
    the width of the tensors around the activation.
    """
    further = _FP32 + 2 * _INT32 if framework == "megatron" else 0
    arrived = expert_tensor * (_BF16 * shape.hidden + further)
    return worked * (arrived + _feed_forward(shape, experts.ffn, framework))


def _returned_copy(shape: TransformerShape, framework: Framework) -> Fraction:
    """Return the bytes of a copy that comes back.

    Torch weighs the copy in fp32. Megatron weighs the activation's result instead, and keeps no copy.
    """
    return Fraction(_FP32 * (shape.hidden + 1) if framework == "torch" else 0)


def _shared_experts(
    shape: TransformerShape, experts: Experts, tensor: int, spread: int, framework: Framework
) -> Fraction:
    """Return the bytes of shared experts; a gate adds their result and its weight."""
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

    In the order of eager torch these are every second product without a bias, from the first on, and each product that
    adds a bias. The router's product and grouped products are computed again.
    """
    results = [*_attention_results(shape, tensor), *_feed_forward_results(shape, tensor, dense=dense)]
    counted = [result for result in results if not result.has_bias]
    return tuple(result for result in results if result.has_bias or counted.index(result) % 2 == 0)


def _attention_results(shape: TransformerShape, tensor: int) -> tuple[Result, ...]:
    """Return the products in order; the output projection of the heads leaves a sum of the whole width."""
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
