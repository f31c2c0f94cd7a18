"""DenseNet-121: every layer of a block reads the features of all before it; they cross a cut as one growing tensor.

.. [1] Huang et al., Densely Connected Convolutional Networks (2016), table 1; 7.98M parameters in torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from penstock.examples.convolution import ClassifierHead, ConvNormRelu
from penstock.examples.synthetic import ImageJob
from penstock.executor.run.job import LayerSpec

_BOTTLENECK = 4


class Stem(nn.Sequential):
    """A 7×7 convolution and a pool: a quarter of the side."""

    def __init__(self, width: int) -> None:
        super().__init__(ConvNormRelu(3, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))


class DenseLayer(nn.Module):
    """A layer that appends ``growth`` new features, computed from all before, to them."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        inner = _BOTTLENECK * growth
        self.new = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            ConvNormRelu(inputs, inner, 1),
            nn.Conv2d(inner, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (samples, channels, height, width) to ``growth`` more channels."""
        return torch.cat((x, self.new(x)), dim=1)


class Transition(nn.Sequential):
    """Half the channels, half the side."""

    def __init__(self, inputs: int) -> None:
        super().__init__(
            nn.BatchNorm2d(inputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(inputs, inputs // 2, 1, bias=False),
            nn.AvgPool2d(2),
        )


class Head(nn.Sequential):
    """The last normalisation and the classifier."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), ClassifierHead(inputs, classes))


def layers(depths: Sequence[int], growth: int, width: int, classes: int = 1000) -> list[LayerSpec]:
    """Build the layers; ``depths``: dense layers of each block."""
    specs = [LayerSpec("stem", partial(Stem, width))]
    for block, depth in enumerate(depths, start=1):
        if block > 1:
            specs.append(LayerSpec(f"transition{block - 1}", partial(Transition, width)))
            width //= 2
        for i in range(depth):
            specs.append(LayerSpec(f"dense{block}.{i}", partial(DenseLayer, width, growth)))
            width += growth
    return [*specs, LayerSpec("head", partial(Head, width, classes))]


densenet_121 = ImageJob("densenet-121", partial(layers, (6, 12, 24, 16), 32, 64), batch_size=1024, side=224)
tiny = ImageJob("densenet-tiny", partial(layers, (2, 2), 4, 8, 10), batch_size=16, side=16, classes=10)
