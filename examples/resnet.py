"""ResNet with bottleneck blocks, and ResNeXt. A block is two layers, so a cut may lie inside it, across the shortcut.

.. [1] He et al., Deep Residual Learning (2015), table 1; 25.6M, 44.5M and 60.2M parameters in torchvision.
.. [2] Xie et al., Aggregated Residual Transformations (2016), table 1: ResNeXt-50 (32×4d), 25.0M parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from penstock.executor.run.job import LayerSpec

from .convolution import ClassifierHead, ConvNormRelu
from .synthetic import ImageJob

_EXPANSION = 4


class Stem(nn.Sequential):
    """7×7 convolution and a pool: a quarter of the side."""

    def __init__(self, width: int) -> None:
        super().__init__(ConvNormRelu(3, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))


class Branch(nn.Sequential):
    """The 1×1 and 3×3 convolutions of a bottleneck."""

    def __init__(self, inputs: int, width: int, stride: int, groups: int) -> None:
        super().__init__(ConvNormRelu(inputs, width, 1), ConvNormRelu(width, width, 3, stride=stride, groups=groups))


class Join(nn.Module):
    """The last 1×1 convolution, added to the shortcut."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.expand = ConvNormRelu(width, outputs, 1, relu=False)
        changes = stride != 1 or inputs != outputs
        self.shortcut = ConvNormRelu(inputs, outputs, 1, stride=stride, relu=False) if changes else nn.Identity()

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """Combine the block's input and its branch to the block's output."""
        return functional.relu(self.expand(branch) + self.shortcut(x))


def layers(
    depths: Sequence[int], width: int = 64, *, groups: int = 1, group_width: int = 64, classes: int = 1000
) -> list[LayerSpec]:
    """Return the layers; ``depths``: blocks of each of the four sections."""
    specs = [LayerSpec("stem", partial(Stem, width))]
    channels = width
    for section, depth in enumerate(depths):
        inner = width * 2**section * groups * group_width // 64
        outputs = width * 2**section * _EXPANSION
        for block in range(depth):
            stride = 2 if section and not block else 1
            name = f"section{section + 1}.{block}"
            specs.append(
                LayerSpec(f"{name}.branch", partial(Branch, channels, inner, stride, groups), ("x",), ("branch",))
            )
            specs.append(
                LayerSpec(f"{name}.join", partial(Join, channels, inner, outputs, stride), ("x", "branch"), ("x",))
            )
            channels = outputs
    return [*specs, LayerSpec("head", partial(ClassifierHead, channels, classes))]


resnet_50 = ImageJob("resnet-50", partial(layers, (3, 4, 6, 3)), batch_size=2048, side=224)
resnet_101 = ImageJob("resnet-101", partial(layers, (3, 4, 23, 3)), batch_size=1024, side=224)
resnet_152 = ImageJob("resnet-152", partial(layers, (3, 8, 36, 3)), batch_size=1024, side=224)
resnext_50 = ImageJob("resnext-50", partial(layers, (3, 4, 6, 3), groups=32, group_width=4), batch_size=1024, side=224)
tiny = ImageJob("resnet-tiny", partial(layers, (1, 2), 8, classes=10), batch_size=16, side=16, classes=10)
