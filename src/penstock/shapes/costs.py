"""What one GPU of a tensor-parallel group does for each class of layer: times, storage and the group's collectives.

Classes are the embedding, a dense block, and the head with the last norm and the loss. A time is the sum over the
operations of `kernels`; ``megatron`` means Transformer Engine's fused norms, activations and rotary positions and one
product for queries, keys and values, ``torch`` eager modules with flash attention. Attention of decoders is causal:
it does half of the square; an encoder (a shape with segment vectors) does all of it. Collectives are listed with
``hidden_ns`` 0: neither framework promises that computation hides them.

A module of a block is recomputed by its whole forward, as Megatron's ``--recompute-modules mlp`` and torch's checkpoint
of a module do: attention and feed-forward with the product that leads out of them and its reduce-scatter, from the
result of the norm before. The norms are recomputed from their own inputs (Megatron's ``layernorm``).

.. [1] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.2.2: the
   collectives of tensor and sequence parallelism.
.. [2] Megatron-Core, ``tensor_parallel.layers``: inputs are gathered again for weight gradients.
.. [3] Megatron-Core, ``TransformerLayer`` and ``TransformerConfig.recompute_modules``: normal checkpointing of ``mlp``,
   output-discarding of ``layernorm``.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple

from penstock.executor.profiling.device_table import DeviceFacts, Dtype
from penstock.schemas.profile import DividedCost, DividedLayer
from penstock.schemas.transformers.degrees import Collective, Framework, Module, ModuleCost
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.activations import before_scores, kept_by_modules, norm_kept, per_token
from penstock.shapes.kernels import Kernels
from penstock.shapes.layout import MODULES, Layout
from penstock.shapes.memory import LOGITS, vocabulary_rows

_FP32 = 4
_IDS = 8
"""Bytes of a token's number."""
_BACKWARD_ATTENTION = 2.5
"""Products of the backward pass of flash attention, of which one makes the scores again, over the two forward."""
_ADAM_STATES = 2


Phase = Literal["forward", "backward", "step"]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce"]
Listed = tuple[tuple[Phase, Operation, int], ...]
"""How many collectives of a tensor of tokens by the hidden width a layer has, by pass and operation."""
Moved = list[tuple[float, float]]
"""Bytes that operations read and write, forward and backward."""

_SHARDED: tuple[Listed, Listed, Listed] = (
    (("forward", "reduce_scatter", 1), ("backward", "all_gather", 1)),
    (
        ("forward", "all_gather", 2),
        ("forward", "reduce_scatter", 2),
        ("backward", "all_gather", 2),
        ("backward", "reduce_scatter", 2),
    ),
    (("forward", "all_gather", 1), ("backward", "reduce_scatter", 1)),
)
"""Of embedding, block and head with sequence parallelism."""
_AGAIN: dict[Framework, tuple[int, int, int]] = {"megatron": (0, 2, 1), "torch": (0, 0, 0)}
"""How many inputs of divided products are gathered again for the gradient of their weights: Megatron keeps a part of
each [2]_, torch's DTensor all of it."""
_WHOLE: tuple[Listed, Listed, Listed] = (
    (("forward", "all_reduce", 1),),
    (("forward", "all_reduce", 2), ("backward", "all_reduce", 2)),
    (("backward", "all_reduce", 1),),
)
"""Without sequence parallelism."""
_LOSS = 3
"""All-reduces of a number per token in a loss over divided scores: largest score, sum of exponentials, own score."""


class Classes(NamedTuple):
    """One value for each class of layers."""

    embedding: int
    block: int
    head: int


class _Products(NamedTuple):
    """Inner width and columns of a block's matrix products on one GPU."""

    into_attention: list[tuple[int, int]]
    into_mlp: list[tuple[int, int]]
    out_of_attention: tuple[int, int]
    out_of_mlp: tuple[int, int]

    def of(self, module: Module) -> list[tuple[int, int]]:
        """Those of a module's forward."""
        if module == "norm":
            return []
        attention = module == "attention"
        into, out = (self.into_attention, self.out_of_attention) if attention else (self.into_mlp, self.out_of_mlp)
        return [*into, out]

    @property
    def all(self) -> list[tuple[int, int]]:
        """All of them."""
        return [*self.into_attention, *self.into_mlp, self.out_of_attention, self.out_of_mlp]


class _Times(NamedTuple):
    """ns of the passes; ``weight`` is the part of ``backward`` that makes weight gradients."""

    forward: float
    backward: float
    weight: float


class Case:
    """A shape under a layout on one kind of device: a micro-batch of ``layout.micro_batch_size`` samples."""

    def __init__(self, shape: TransformerShape, layout: Layout, facts: DeviceFacts, dtype: Dtype = "bf16") -> None:
        self.shape, self.layout = parameters.with_copied_heads(shape, layout.tensor), layout
        self.kernels = Kernels(facts, dtype)
        self.width = self.kernels.width
        self.tokens = shape.sequence_length * layout.micro_batch_size
        self.spread = layout.tensor if layout.sequence_parallel else 1
        """GPUs that share what lies between the tensor-parallel parts."""
        self.rows = vocabulary_rows(shape, layout)
        self.outputs = Fraction(shape.outputs or self.rows, layout.tensor)
        """Scores of a token on one GPU."""

    @property
    def fused(self) -> bool:
        """Whether norms, activations and rotary positions are kernels of their own."""
        return self.layout.framework == "megatron"


def costs_of(case: Case) -> tuple[DividedCost, DividedCost, DividedCost]:
    """What embedding, a block and the head cost one GPU."""
    times = (_embedding(case), _block(case), _head(case))
    stash, workspace = _stash(case), _workspace(case)
    found = [
        DividedCost(
            forward_ns=math.ceil(time.forward),
            backward_ns=math.ceil(time.backward),
            backward_weight_ns=math.ceil(time.weight),
            stash_bytes=kept,
            workspace_bytes=needed,
            collectives=collectives,
        )
        for time, kept, needed, collectives in zip(times, stash, workspace, _collectives(case), strict=True)
    ]
    return found[0], found[1].model_copy(update={"modules": _modules(case)}), found[2]


def layers_of(case: Case) -> tuple[DividedLayer, DividedLayer, DividedLayer]:
    """What one GPU holds of each class; a tied weight is the embedding's, and its copy is updated with the head."""
    held = local_parameters(case.shape, case.layout)
    updated = local_parameters(case.shape.model_copy(update={"tied": False}), case.layout)
    found = [
        DividedLayer(parameter_bytes=case.width * number, update_ns=math.ceil(_update_ns(case, own)))
        for number, own in zip(held, updated, strict=True)
    ]
    return found[0], found[1], found[2]


def local_parameters(shape: TransformerShape, layout: Layout) -> Classes:
    """Parameters of each class on one GPU; a tied weight counts with the embedding."""
    rows, shape = vocabulary_rows(shape, layout), parameters.with_copied_heads(shape, layout.tensor)
    head = parameters.head(shape, rows)
    if shape.tied:
        head = head._replace(dense=head.dense - rows * shape.hidden)
    each = (parameters.embedding(shape, rows), parameters.layer(shape, dense=True), head)
    return Classes(*(math.ceil(Fraction(held.dense, layout.tensor)) + held.replicated for held in each))


def _attention_flops_per_token(shape: TransformerShape) -> int:
    """Of the two products with all heads, over the positions that a token sees: half of them in a decoder."""
    seen_twice = shape.sequence_length * (2 if shape.token_types else 1)
    return 2 * seen_twice * shape.heads * shape.head_width


def _products(case: Case) -> _Products:
    shape, t = case.shape, case.layout.tensor
    queries = shape.heads * shape.head_width // t
    keys = shape.kv_heads * shape.head_width // t
    inner, gates = shape.ffn // t, 2 if shape.gated else 1
    attention, mlp = ([queries + 2 * keys], [gates * inner]) if case.fused else ([queries, keys, keys], [inner] * gates)
    into = [[(shape.hidden, width) for width in each] for each in (attention, mlp)]
    return _Products(into[0], into[1], (queries, shape.hidden), (inner, shape.hidden))


def _block(case: Case) -> _Times:
    kernels, tokens, products = case.kernels, case.tokens, _products(case).all
    forward = sum(kernels.product_ns(tokens, inner, columns) for inner, columns in products)
    inputs = sum(kernels.product_ns(tokens, columns, inner) for inner, columns in products)
    weights = sum(_weight_ns(case, inner, columns) for inner, columns in products)
    flops, rows = _attention(case)
    forward += kernels.attention_ns(flops, rows, backward=False)
    inputs += kernels.attention_ns(_BACKWARD_ATTENTION * flops, rows, backward=True)
    elementwise = _norms(case) + _sums(case) + _query_key_norms(case) + _around_attention(case) + _activations(case)
    forward += sum(kernels.moved_ns(there) for there, _back in elementwise)
    inputs += sum(kernels.moved_ns(back) for _there, back in elementwise)
    return _Times(forward, inputs + weights, weights)


def _attention(case: Case) -> tuple[float, float]:
    """FLOPs of attention's forward on one GPU, and its rows: the queries of all heads."""
    tensor = case.layout.tensor
    flops = _attention_flops_per_token(case.shape) * case.tokens / tensor
    return flops, case.tokens * (case.shape.heads / tensor)


def _modules(case: Case) -> tuple[ModuleCost, ...]:
    """What recomputing each module of a block costs and frees."""
    freed = kept_by_modules(case.shape, case.layout)
    scale = Fraction(case.width, 2) * case.tokens
    return tuple(
        ModuleCost(
            module=module,
            forward_ns=math.ceil(_module_ns(case, module)),
            freed_bytes=math.floor(scale * freed[module]),
            collectives=_module_collectives(case, module),
        )
        for module in MODULES
    )


def _module_ns(case: Case, module: Module) -> float:
    """A module's forward, without collectives."""
    moved: dict[Module, Moved] = {
        "attention": _query_key_norms(case) + _around_attention(case),
        "mlp": _activations(case),
        "norm": _norms(case),
    }
    found = sum(case.kernels.product_ns(case.tokens, *each) for each in _products(case).of(module))
    if module == "attention":
        found += case.kernels.attention_ns(*_attention(case), backward=False)
    return found + sum(case.kernels.moved_ns(there) for there, _back in moved[module])


def _module_collectives(case: Case, module: Module) -> tuple[Collective, ...]:
    """Megatron gathers a module's input again; torch keeps it gathered, and gathers it with the norm that makes it."""
    if case.layout.tensor == 1:
        return ()
    hidden = case.shape.sequence_length * case.shape.hidden * case.width
    if case.spread == 1:
        return () if module == "norm" else (_collective("forward", "all_reduce", hidden, 1),)
    gathered = min(2, case.shape.norms_per_layer)
    if module == "norm":
        return () if case.fused else (_collective("forward", "all_gather", hidden, gathered),)
    gather = (_collective("forward", "all_gather", hidden, 1),) if case.fused else ()
    return (*gather, _collective("forward", "reduce_scatter", hidden, 1))


def _weight_ns(case: Case, inner: float, columns: float) -> float:
    """A weight's gradient: Megatron's product adds to the fp32 buffer, eager torch adds the result afterwards."""
    if case.fused:
        return case.kernels.product_ns(inner, case.tokens, columns, result_bytes=2 * _FP32)
    return case.kernels.product_ns(inner, case.tokens, columns) + case.kernels.moved_ns(
        3 * case.width * inner * columns
    )


def _norm_bytes(case: Case) -> tuple[int, int]:
    """Per element: a kernel reads and writes (back: gradient, input, result); eager RMSNorm works in fp32 by steps.

    Its steps are to fp32, square, mean, scale, back, times the weight; backward moves twice as much.
    """
    width = case.width
    if case.fused or case.shape.norm == "layer":
        return 2 * width, 3 * width
    steps = (width + _FP32) + 2 * _FP32 + _FP32 + 2 * _FP32 + (_FP32 + width) + 2 * width
    return steps, 2 * steps


def _norms(case: Case) -> Moved:
    """Norms of a block over the hidden width."""
    each, elements = _norm_bytes(case), case.tokens * case.shape.hidden / case.spread
    return [(each[0] * elements, each[1] * elements)] * case.shape.norms_per_layer


def _sums(case: Case) -> Moved:
    """A block's two sums with what passes by, of three tensors each; masks of dropout."""
    elements = case.tokens * case.shape.hidden / case.spread
    masks = (1 if case.fused else 2 * case.width + 1) if case.shape.dropout else 0
    return [((3 * case.width + masks) * elements, (3 * case.width + masks) * elements)] * 2


def _query_key_norms(case: Case) -> Moved:
    """Norms of each head's queries and keys."""
    shape, each = case.shape, _norm_bytes(case)
    if not shape.query_key_norm:
        return []
    heads = case.tokens * (shape.heads + shape.kv_heads) * shape.head_width / case.layout.tensor
    return [(each[0] * heads, each[1] * heads)]


def _around_attention(case: Case) -> Moved:
    """Rotary positions, and the copy of the result that eager torch makes before the projection.

    Eagerly each half of queries and keys is multiplied twice (two tensors each), added (three) and joined (two).
    """
    shape = case.shape
    found: Moved = []
    if not shape.positions:
        elements = case.tokens * (shape.heads + shape.kv_heads) * shape.head_width / case.layout.tensor
        tensors = 2 if case.fused else 4 + 3 + 2
        found.append((tensors * case.width * elements, tensors * case.width * elements))
    if not case.fused:
        copied = 2 * case.width * case.tokens * shape.heads * shape.head_width / case.layout.tensor
        found.append((copied, copied))
    return found


def _activations(case: Case) -> Moved:
    """The feed-forward's activation: one tensor in, one out, back one more; with a gate two in, back two out as well.

    Eager torch has a kernel for the function and one for the product with the gate.
    """
    size = case.width * case.tokens * case.shape.ffn / case.layout.tensor
    if not case.shape.gated:
        return [(2 * size, 3 * size)]
    return [(3 * size, 5 * size)] if case.fused else [(2 * size, 3 * size), (3 * size, 6 * size)]


def _embedding(case: Case) -> _Times:
    """Every GPU looks up all tokens in its part of the words; the gradient is dense and added to the stored one."""
    shape, elements = case.shape, case.tokens * case.shape.hidden
    added = bool(shape.positions) + bool(shape.token_types)
    norm = _norm_bytes(case) if shape.embedding_norm else (0, 0)
    forward = case.kernels.moved_ns((2 + 3 * added) * case.width * elements)
    forward += case.kernels.moved_ns(norm[0] * elements / case.spread)
    stored = (case.width + 2 * _FP32) if case.fused else 3 * case.width
    weight = case.kernels.moved_ns((case.width + stored) * case.rows * shape.hidden / case.layout.tensor)
    weight += case.kernels.moved_ns(3 * case.width * elements)
    return _Times(forward, weight + case.kernels.moved_ns(norm[1] * elements / case.spread), weight)


def _head(case: Case) -> _Times:
    """The last norm, the scores and the loss."""
    shape, kernels, outputs = case.shape, case.kernels, float(case.outputs)
    norm = _norm_bytes(case) if shape.final_norm else (0, 0)
    elements, scores = case.tokens * shape.hidden / case.spread, case.tokens * outputs
    there, back = _loss_bytes(case)
    forward = kernels.moved_ns(norm[0] * elements) + kernels.product_ns(case.tokens, shape.hidden, outputs)
    weight = _weight_ns(case, shape.hidden, outputs)
    inputs = kernels.moved_ns(norm[1] * elements) + kernels.product_ns(case.tokens, outputs, shape.hidden)
    backward = inputs + kernels.moved_ns(back * scores) + weight
    return _Times(forward + kernels.moved_ns(there * scores), backward, weight)


def _loss_bytes(case: Case) -> tuple[int, int]:
    """Per score: fused, it is read and written in fp32 and back; eagerly cast, normalised, and both back again."""
    width = case.width
    if case.fused:
        return width + _FP32, _FP32 + width
    return (width + _FP32) + 2 * _FP32, _FP32 + 3 * _FP32 + (_FP32 + width)


def _stash(case: Case) -> Classes:
    """Bytes kept for the backward pass: the tokens' numbers at both ends, the head's norm and scores.

    A norm's result is kept by what reads it, that of the last block by the head; in torch as it was gathered, whole.
    """
    shape, layout = case.shape, case.layout
    scale = Fraction(case.width, 2)
    """Of what `activations` counts for tensors of 16 bits."""
    block = per_token(shape, layout, dense=True)
    norm = norm_kept(shape, layout.framework)
    before = Fraction(norm.before * shape.hidden + norm.statistics, case.spread) if shape.embedding_norm else 0
    return Classes(
        math.ceil(case.tokens * (_IDS + scale * before)),
        math.ceil(case.tokens * scale * block.kept),
        math.ceil(
            case.tokens * (_IDS + scale * before_scores(shape, layout) + LOGITS[layout.framework].kept * case.outputs)
        ),
    )


def _workspace(case: Case) -> Classes:
    """Bytes needed while a layer runs: gradients of scores, and Transformer Engine's dummy weight gradients.

    Dummies are one per shape of weight and are kept, so each layer counts those that its GPU then has.
    """
    shape, layout = case.shape, case.layout
    dummies = head = 0
    if case.fused:
        shapes = set(parameters.matrices(shape, dense=True))
        dummies, head = (
            math.ceil(Fraction(case.width * sum(rows * columns for rows, columns in each), layout.tensor))
            for each in (shapes, shapes | {(shape.outputs or case.rows, shape.hidden)})
        )
    return Classes(0, dummies, head + math.ceil(case.tokens * LOGITS[layout.framework].again * case.outputs))


def _collectives(case: Case) -> tuple[tuple[Collective, ...], ...]:
    """Of embedding, block and head over the tensor-parallel group; bytes are those of the whole tensors."""
    if case.layout.tensor == 1:
        return (), (), ()
    sharded = case.spread > 1
    hidden = case.shape.sequence_length * case.shape.hidden * case.width
    held = (parameters.embedding(case.shape), parameters.layer(case.shape, dense=True), parameters.head(case.shape))
    found = []
    gathered = _AGAIN[case.layout.framework] if sharded else (0, 0, 0)
    for known, own, again in zip(_SHARDED if sharded else _WHOLE, held, gathered, strict=True):
        counts = {(phase, operation): count for phase, operation, count in known}
        if again:
            counts["backward", "all_gather"] = counts.get(("backward", "all_gather"), 0) + again
        listed = [_collective(phase, operation, hidden, count) for (phase, operation), count in counts.items()]
        if sharded and own.replicated:
            listed.append(_collective("step", "all_reduce", _FP32 * own.replicated, 1))
        found.append(listed)
    found[-1].append(_collective("forward", "all_reduce", _FP32 * case.shape.sequence_length, _LOSS))
    return tuple(map(tuple, found))


def _collective(phase: Phase, operation: Operation, size: int, count: int) -> Collective:
    return Collective(phase=phase, operation=operation, over="tensor", bytes_per_sample=count * size, count=count)


def _update_ns(case: Case, number: int) -> float:
    """A fused step of Adam: parameters read and written, gradients read, both states read and written.

    Megatron's parameters, gradients and states are in fp32, and it writes those in 16 bits as well.
    """
    each = (3 + 2 * _ADAM_STATES) * (_FP32 if case.fused else case.width) + (case.width if case.fused else 0)
    return each * number / case.kernels.bytes_per_ns
