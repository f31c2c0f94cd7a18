"""A shape under a layout on one kind of device, and the numbers that all costs need."""

from __future__ import annotations

from copy import copy
from fractions import Fraction
from typing import NamedTuple

from penstock.facts.device_table import DeviceFacts, Dtype
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.gpu_memory import vocabulary_rows
from penstock.shapes.kernels import Kernels
from penstock.shapes.layout import Layout

FP32 = 4
Moved = tuple[tuple[float, float], ...]
"""Bytes that operations read and write, forward and backward."""


class Times(NamedTuple):
    """ns of the passes; ``weight`` is the part of ``backward`` that makes weight gradients."""

    forward: float
    backward: float
    weight: float


class Case:
    """A shape under a layout on one kind of device: a micro-batch of ``layout.micro_batch_size`` samples."""

    def __init__(self, shape: TransformerShape, layout: Layout, facts: DeviceFacts, dtype: Dtype = "bf16") -> None:
        self.shape, self.layout = parameters.with_copied_heads(shape, layout.tensor), layout
        self.kernels, self.wide_kernels = Kernels(facts, dtype), Kernels(facts, "fp32")
        self.width = self.kernels.width
        self.length = shape.sequence_length // layout.context
        """Tokens of a sample on one GPU, before tensor parallelism shares them."""
        self.tokens = self.length * layout.micro_batch_size
        self.spread = layout.tensor if layout.sequence_parallel else 1
        """GPUs that share the operations between the tensor-parallel parts."""
        self.rows = vocabulary_rows(shape, layout)
        self.outputs = Fraction(shape.outputs or self.rows, layout.tensor)
        """Scores of a token on one GPU."""
        self.seen: int | Fraction = shape.sequence_length * (2 if shape.token_types else 1)
        """Twice the positions that a token attends to in the mean: half of them in a decoder, all in an encoder."""

    def windowed(self) -> Case:
        """Return the case of a layer whose attention sees a window, as wide as a sample at most."""
        assert self.shape.windows is not None, "a shape without windows has no windowed layers"
        case, length = copy(self), self.shape.sequence_length
        width = min(self.shape.windows.width, length)
        case.seen = Fraction(width * (2 * length - width), length)
        return case

    @property
    def fused(self) -> bool:
        """True where norms, activations and rotary positions are fused kernels."""
        return self.layout.framework == "megatron"

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a sample's tokens by the hidden width, for the tokens of one tensor-parallel group."""
        return self.length * self.shape.hidden * self.width

    @property
    def norm_bytes(self) -> tuple[int, int]:
        """Bytes per element that a norm moves forward and backward.

        A fused kernel reads and writes (back: gradient, input, result). Eager RMSNorm works in fp32 by steps: to fp32,
        square, mean, scale, back, times the weight. Its backward moves twice as much.
        """
        width = self.width
        if self.fused or self.shape.norm == "layer":
            return 2 * width, 3 * width
        steps = (width + FP32) + 2 * FP32 + FP32 + 2 * FP32 + (FP32 + width) + 2 * width
        return steps, 2 * steps
