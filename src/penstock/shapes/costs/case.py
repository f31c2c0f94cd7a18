"""A shape under a layout on one kind of device: whose costs are asked for, and the numbers that all of them need."""

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
        """GPUs that share what lies between the tensor-parallel parts."""
        self.rows = vocabulary_rows(shape, layout)
        self.outputs = Fraction(shape.outputs or self.rows, layout.tensor)
        """Scores of a token on one GPU."""
        self.seen: int | Fraction = shape.sequence_length * (2 if shape.token_types else 1)
        """Twice the positions that a token attends to in the mean: half of them in a decoder, all in an encoder."""

    def windowed(self) -> Case:
        """The case of a layer whose attention sees a window, as wide as a sample at most."""
        assert self.shape.windows is not None, "a shape without windows has no windowed layers"
        made, length = copy(self), self.shape.sequence_length
        width = min(self.shape.windows.width, length)
        made.seen = Fraction(width * (2 * length - width), length)
        return made

    @property
    def fused(self) -> bool:
        """Whether norms, activations and rotary positions are kernels of their own."""
        return self.layout.framework == "megatron"

    @property
    def hidden_bytes(self) -> int:
        """Of a sample's tokens by the hidden width, as far as one tensor-parallel group has them."""
        return self.length * self.shape.hidden * self.width

    @property
    def norm_bytes(self) -> tuple[int, int]:
        """Per element: a kernel reads and writes (back: gradient, input, result); eager RMSNorm works in fp32 by steps.

        Its steps are to fp32, square, mean, scale, back, times the weight; backward moves twice as much.
        """
        width = self.width
        if self.fused or self.shape.norm == "layer":
            return 2 * width, 3 * width
        steps = (width + FP32) + 2 * FP32 + FP32 + 2 * FP32 + (FP32 + width) + 2 * width
        return steps, 2 * steps
