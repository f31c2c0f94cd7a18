"""AmoebaNet-D: cells found by evolution; a cell reads the outputs of the two before it, so two tensors cross each cut.

.. [1] Real et al., Regularized Evolution for Image Classifier Architecture Search (2018), figure on AmoebaNet-D.
.. [2] GPipe, section 4, and DAPPLE, Table II: AmoebaNet-36 with 933M parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from penstock.examples.convolution import ClassifierHead
from penstock.examples.synthetic import ImageJob
from penstock.executor.run.job import LayerSpec

Operation = Callable[[int, int], nn.Module]


def _relu_conv_norm(inputs: int, outputs: int, kernel: int | tuple[int, int] = 1, stride: int = 1) -> nn.Sequential:
    padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(outputs))


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return _relu_conv_norm(channels, channels, 1, stride)


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return nn.Sequential(
        _relu_conv_norm(channels, inner),
        _relu_conv_norm(inner, inner, 3, stride),
        _relu_conv_norm(inner, channels),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return nn.Sequential(
        _relu_conv_norm(channels, inner),
        _relu_conv_norm(inner, inner, (1, 7), stride),
        _relu_conv_norm(inner, inner, (7, 1)),
        _relu_conv_norm(inner, channels),
    )


def _max_pool(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride=stride, padding=1)


def _average_pool(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)


def _none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else _relu_conv_norm(channels, channels, 1, stride)


_NORMAL: tuple[tuple[int, Operation], ...] = (
    (1, _conv_1x1),
    (1, _max_pool),
    (1, _none),
    (0, _conv_1x7_7x1),
    (0, _conv_1x1),
    (0, _conv_1x7_7x1),
    (2, _max_pool),
    (2, _none),
    (1, _average_pool),
    (5, _conv_1x1),
)
_NORMAL_OUTPUT = (0, 3, 4, 6)
_REDUCTION: tuple[tuple[int, Operation], ...] = (
    (0, _max_pool),
    (0, _max_pool),
    (2, _none),
    (1, _conv_3x3),
    (2, _conv_1x7_7x1),
    (2, _max_pool),
    (3, _none),
    (1, _max_pool),
    (2, _average_pool),
    (3, _conv_1x1),
)
_REDUCTION_OUTPUT = (4, 5, 6)


class Cell(nn.Module):
    """Five pairs of operations over the outputs of the last two cells; the chosen results are concatenated."""

    def __init__(self, before: int, last: int, channels: int, *, reduces: bool, before_is_larger: bool) -> None:
        super().__init__()
        self.adapt_last = _relu_conv_norm(last, channels)
        self.adapt_before = _relu_conv_norm(before, channels, 1, 2 if before_is_larger else 1)
        genotype = _REDUCTION if reduces else _NORMAL
        self.sources = [source for source, _ in genotype]
        self.chosen = _REDUCTION_OUTPUT if reduces else _NORMAL_OUTPUT
        self.operations = nn.ModuleList(
            operation(channels, 2 if reduces and source < 2 else 1) for source, operation in genotype
        )

    def forward(self, before: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the last cell and of this one.

        The inputs are the outputs of the last two cells.
        """
        states = [self.adapt_last(last), self.adapt_before(before)]
        for pair in range(0, len(self.sources), 2):
            one, two = (self.operations[k](states[self.sources[k]]) for k in (pair, pair + 1))
            states.append(one + two)
        return last, torch.cat([states[k] for k in self.chosen], dim=1)


class Stem(nn.Module):
    """A 3×3 convolution of stride two; it is the cell before and the last cell of the first cell."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, image: Tensor) -> Tensor:
        """Map (samples, 3, side, side) to half the side."""
        out: Tensor = self.convolution(image)
        return out


class FirstCell(Cell):
    """The cell whose two inputs are both the stem."""

    def forward(self, before: Tensor, last: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map the stem's output to the stem's output and this cell's output."""
        return super().forward(before, before)


def layers(depth: int, filters: int, classes: int = 1000) -> list[LayerSpec]:
    """Build stem, two reducing cells, three sections of cells, and head.

    A section has ``depth / 3`` cells; a reducing cell is between sections.
    """
    stem = max(8, filters // 16)
    specs = [LayerSpec("stem", partial(Stem, stem))]
    before, last, larger = stem, stem, False

    def cell(name: str, channels: int, *, reduces: bool) -> None:
        nonlocal before, last, larger
        first = len(specs) == 1
        build = partial(FirstCell if first else Cell, before, last, channels, reduces=reduces, before_is_larger=larger)
        specs.append(LayerSpec(name, build, ("x",) if first else ("before", "x"), ("before", "x")))
        before, last = last, channels * len(_REDUCTION_OUTPUT if reduces else _NORMAL_OUTPUT)
        larger = reduces

    cell("stem.0", filters // 4, reduces=True)
    cell("stem.1", filters // 2, reduces=True)
    number = 0
    for section in range(3):
        if section:
            cell(f"reduction.{section - 1}", filters * 2**section, reduces=True)
        for _ in range(depth // 3):
            cell(f"cell.{number}", filters * 2**section, reduces=False)
            number += 1
    return [*specs, LayerSpec("head", partial(ClassifierHead, last, classes))]


amoebanet_36 = ImageJob("amoebanet-36", partial(layers, 36, 512), batch_size=128, side=224)
tiny = ImageJob("amoebanet-tiny", partial(layers, 3, 16, 10), batch_size=16, side=32, classes=10)
