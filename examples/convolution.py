"""Convolution with normalisation and ReLU, and the last layers of an image classifier, shared by the examples."""

from __future__ import annotations

from torch import nn


class ConvNormRelu(nn.Sequential):
    """Convolution without bias, batch normalisation, ReLU; padded so that stride alone changes the size."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] | None = None,
        groups: int = 1,
        relu: bool = True,
    ) -> None:
        if padding is None:
            padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
        parts: list[nn.Module] = [
            nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        super().__init__(*parts, *([nn.ReLU(inplace=True)] if relu else []))


class ClassifierHead(nn.Sequential):
    """Average over the image, then a linear layer."""

    def __init__(self, inputs: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(inputs, classes))
