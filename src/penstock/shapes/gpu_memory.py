"""Memory of the GPUs of every pipeline stage by part, in bytes, at the peak of a training step under 1F1B.

``_STATIC`` lists the static bytes per parameter with Adam. Optimizer states are shared by D GPUs (data × context;
experts have their own group). The contexts of driver and communication library and the fragmentation of the allocator
are not counted.

.. [1] Rajbhandari et al., ZeRO (2020), section 3; Megatron-LM, guide to the distributed optimizer.
.. [2] Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021), section 2.2:
   micro-batches in flight with interleaving.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from penstock.schemas.transformers.degrees import Framework, Sharding
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.activations import before_scores, context_buffers, per_token
from penstock.shapes.layout import Layout, layers_of_stages
from penstock.shapes.parameters import Parameters

_PADDED_TO = 128
"""Megatron pads the vocabulary to a multiple of this × the tensor degree (``--make-vocab-size-divisible-by``)."""
_BF16 = 2


class Logit(NamedTuple):
    """Bytes per score: ``kept`` from forward to backward, ``again`` while backward runs."""

    kept: int
    again: int


LOGITS: dict[Framework, Logit] = {"megatron": Logit(4, 0), "torch": Logit(4, 8)}
"""Bytes per score: fused cross-entropy holds one fp32 tensor.

Eager torch keeps log-probabilities, and computes the gradients of log-probabilities and scores from them.
"""


class _Static(NamedTuple):
    """Bytes per parameter on one GPU: whole ones, and ones that the sharing group divides."""

    parameters: int
    parameters_shared: int
    gradients: int
    gradients_shared: int
    optimizer: int
    optimizer_shared: int


_STATIC: dict[Framework, dict[Sharding, _Static]] = {
    "megatron": {
        "none": _Static(2, 0, 4, 0, 12, 0),
        "optimizer": _Static(2, 0, 4, 0, 0, 12),
        "gradients": _Static(2, 0, 0, 4, 0, 12),
        "parameters": _Static(0, 2, 0, 4, 0, 12),
    },
    "torch": {
        "none": _Static(4, 0, 4, 0, 8, 0),
        "optimizer": _Static(2, 4, 4, 0, 0, 8),
        "gradients": _Static(2, 4, 0, 4, 0, 8),
        "parameters": _Static(0, 4, 0, 4, 0, 8),
        "parameters_kept": _Static(2, 4, 4, 0, 0, 8),
    },
}
"""Static bytes by framework and sharding.

Megatron has bf16 parameters and fp32 gradients; its optimizer has the fp32 parameters and both moments. Torch has fp32
parameters, sharded by FSDP2 or under autocast, bf16 copies for the computation, fp32 gradients and both moments.
"""


class Memory(NamedTuple):
    """Bytes of one GPU by part."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters gathered or cast for the computation, and a unit's gradient before it is reduced."""
    activations: int
    logits: int
    dummy_gradients: int
    """Transformer Engine's dummy gradients, one per shape of weight.

    Autograd gets them in place of the gradient, which is in fp32.
    """

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self)


class _Layers(NamedTuple):
    """The layers of a GPU: blocks with a dense feed-forward, blocks with experts, and the two ends."""

    dense: int
    sparse: int
    first: bool
    last: bool


def memory_of_stages(shape: TransformerShape, layout: Layout) -> list[Memory]:
    """Compute the memory of a GPU of each pipeline stage of a legal layout."""
    shape = parameters.with_copied_heads(shape, layout.tensor)
    tokens = Fraction(shape.sequence_length * layout.micro_batch_size, layout.context)
    kinds = [per_token(shape, layout, dense=dense) for dense in (True, False)]
    buffers = math.ceil(context_buffers(shape, layout) * tokens)
    memories: dict[_Layers, Memory] = {}
    stages = []
    for layers, in_flight_of in _stages(shape, layout):
        if layers not in memories:
            again = max((kind.again for kind, number in zip(kinds, layers[:2], strict=True) if number), default=0)
            base = _without_stash(shape, layout, layers, tokens)
            more = max(0, buffers - base.logits)  # scores are gone when blocks run backward
            memories[layers] = base._replace(activations=math.ceil(again * tokens) + more)
        stash = sum(kind.kept * number for kind, number in zip(kinds, in_flight_of, strict=True)) * tokens
        stages.append(memories[layers]._replace(activations=memories[layers].activations + math.ceil(stash)))
    return stages


def vocabulary_rows(shape: TransformerShape, layout: Layout) -> int:
    """Return the rows of the embedding, which the GPUs of a tensor-parallel group divide."""
    if shape.padded_vocabulary is not None:
        return shape.padded_vocabulary
    multiple = layout.tensor * (_PADDED_TO if layout.framework == "megatron" else 1)
    return math.ceil(shape.vocabulary / multiple) * multiple


def in_flight(layout: Layout, rank: int) -> list[int]:
    """Return how many micro-batches each virtual stage of a rank holds at most, the first virtual stage first."""
    most, depth, virtual = layout.micro_batches, layout.pipeline - rank, layout.virtual_stages
    if virtual == 1:
        return [depth if most is None else min(most, depth)]
    chunks = 2 * (depth - 1) + (virtual - 1) * layout.pipeline + 1
    # warm-up goes through the virtual stages in turn, `pipeline` micro-batches of each
    rounds, rest = divmod(chunks, layout.pipeline * virtual)
    counts = []
    for number in range(virtual):
        count = rounds * layout.pipeline + min(layout.pipeline, max(0, rest - number * layout.pipeline))
        counts.append(count if most is None else min(most, count))
    return counts


def _stages(shape: TransformerShape, layout: Layout) -> Iterator[tuple[_Layers, tuple[int, int]]]:
    """Yield the layers of every rank over its virtual stages.

    Each comes with the sums of layers × micro-batches in flight, dense layers first.
    """
    split = layers_of_stages(shape.layers, layout)
    assert split is not None
    starts = list(accumulate(split, initial=0))
    dense_until = parameters.dense_layers(shape)
    for rank in range(layout.pipeline):
        dense = sparse = dense_in_flight = sparse_in_flight = 0
        for number, micro_batches in enumerate(in_flight(layout, rank)):
            stage = number * layout.pipeline + rank
            here = min(max(dense_until - starts[stage], 0), split[stage])
            dense, sparse = dense + here, sparse + split[stage] - here
            dense_in_flight += here * micro_batches
            sparse_in_flight += (split[stage] - here) * micro_batches
        layers = _Layers(dense, sparse, first=rank == 0, last=rank == layout.pipeline - 1)
        yield layers, (dense_in_flight, sparse_in_flight)


def _without_stash(shape: TransformerShape, layout: Layout, layers: _Layers, tokens: Fraction) -> Memory:
    """Compute the memory that does not grow with the micro-batches in flight."""
    rows = vocabulary_rows(shape, layout)
    outputs = shape.outputs or rows
    kinds = [parameters.layer(shape, dense=dense) for dense in (True, False)]
    ends = [parameters.embedding(shape, rows)] if layers.first else []
    if layers.last:
        head = parameters.head(shape, rows)
        shared = layers.first and shape.tied and shape.outputs is None
        ends.append(head._replace(dense=head.dense - rows * shape.hidden) if shared else head)
    total = kinds[0].times(layers.dense).plus(kinds[1].times(layers.sparse))
    for end in ends:
        total = total.plus(end)
    units = [kind for kind, number in zip(kinds, layers[:2], strict=True) if number]
    return Memory(
        *_static(total, layout),
        gathered=_gathered(layout, total, [*units, *ends]),
        activations=0,
        logits=_scores(shape, layout, tokens, outputs) if layers.last else 0,
        dummy_gradients=dummy_bytes(
            shape,
            layout,
            kinds=[dense for dense, number in ((True, layers.dense), (False, layers.sparse)) if number],
            outputs=outputs if layers.last else None,
        ),
    )


def _local(parameters: Parameters, layout: Layout) -> tuple[Fraction, Fraction]:
    """Return the parameters of one GPU outside experts, and within."""
    others = Fraction(parameters.dense, layout.tensor) + parameters.replicated
    return others, Fraction(parameters.expert, layout.expert * layout.expert_tensor)


def _static(parameters: Parameters, layout: Layout) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and optimizer states."""
    static = _STATIC[layout.framework][layout.sharding]
    groups = tuple(zip(_local(parameters, layout), (layout.shards, max(1, layout.expert_shards)), strict=True))
    totals = [
        sum((number * whole + number * shared / shards for number, shards in groups), Fraction(0))
        for whole, shared in (static[:2], static[2:4], static[4:])
    ]
    return math.ceil(totals[0]), math.ceil(totals[1]), math.ceil(totals[2])


def _gathered(layout: Layout, parameters: Parameters, units: list[Parameters]) -> int:
    """Return the bytes that are whole for a while: two units of parameters, a unit's gradient, or autocast's copies."""
    largest = max((sum(_local(unit, layout), Fraction(0)) for unit in units), default=Fraction(0))
    if layout.sharding == "gradients":
        return math.ceil(4 * largest)
    if layout.sharding == "parameters":
        return math.ceil((2 * _BF16 + 4) * largest)
    if layout.framework == "torch" and layout.sharding == "none":
        return math.ceil(_BF16 * sum(_local(parameters, layout), Fraction(0)))
    return 0


def _scores(shape: TransformerShape, layout: Layout, tokens: Fraction, outputs: int) -> int:
    """Return the bytes of a micro-batch's scores and their input."""
    each = Fraction(sum(LOGITS[layout.framework]) * outputs, layout.tensor)
    return math.ceil(tokens * (each + before_scores(shape, layout)))


def dummy_bytes(shape: TransformerShape, layout: Layout, *, kinds: Iterable[bool], outputs: int | None) -> int:
    """Return the bytes of Transformer Engine's dummy gradients.

    ``kinds`` has a flag for each kind of layer, true if dense; a head has these ``outputs``, None without a head.
    """
    if layout.framework == "torch":
        return 0
    shapes: set[tuple[int, int]] = {(outputs, shape.hidden)} if outputs is not None else set()
    of_experts: set[tuple[int, int]] = set()
    for dense in kinds:
        shapes.update(parameters.matrices(shape, dense=dense))
        of_experts.update(parameters.expert_matrices(shape, dense=dense))
    experts = Fraction(sum(rows * columns for rows, columns in of_experts), layout.expert_tensor)
    return math.ceil(_BF16 * (parameters.local_elements(shape, shapes, layout.tensor) + experts))
