"""VGG-19: sixteen convolutions in five groups, then three linear layers that hold most parameters.

.. [1] Simonyan, Zisserman, Very Deep Convolutional Networks (2014), table 2, configuration E: 144M parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from penstock.examples.synthetic import ImageJob
from penstock.executor.run.job import LayerSpec


class Convolution(nn.Sequential):
    """A 3×3 convolution and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True))


class Hidden(nn.Sequential):
    """A linear layer, ReLU, dropout; the first one flattens the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout(0.5))


def layers(groups: Sequence[tuple[int, int]], hidden: int, side: int, classes: int) -> list[LayerSpec]:
    """Build the layers; ``groups``: (channels, convolutions), each followed by a pool of two."""
    specs, channels = [], 3
    for g, (width, count) in enumerate(groups, start=1):
        for c in range(1, count + 1):
            specs.append(LayerSpec(f"conv{g}_{c}", partial(Convolution, channels, width)))
            channels = width
        specs.append(LayerSpec(f"pool{g}", partial(nn.MaxPool2d, 2)))
    flat = channels * (side // 2 ** len(groups)) ** 2
    specs.append(LayerSpec("fc1", partial(Hidden, flat, hidden)))
    specs.append(LayerSpec("fc2", partial(Hidden, hidden, hidden)))
    return [*specs, LayerSpec("prediction", partial(nn.Linear, hidden, classes))]


_GROUPS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
vgg_19 = ImageJob("vgg-19", partial(layers, _GROUPS, 4096, 224, 1000), batch_size=2048, side=224)
tiny = ImageJob("vgg-tiny", partial(layers, ((4, 1), (8, 2)), 16, 8, 10), batch_size=16, side=8, classes=10)
