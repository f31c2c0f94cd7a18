"""Inception-V3 without the auxiliary classifier; the parallel branches of a block are one layer, as SPP merges them.

.. [1] Szegedy et al., Rethinking the Inception Architecture (2015), table 1; 23.8M parameters in torchvision.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from penstock.examples.convolution import ClassifierHead, ConvNormRelu
from penstock.examples.synthetic import ImageJob
from penstock.executor.run.job import Builder, LayerSpec

_conv = ConvNormRelu


class Branches(nn.Module):
    """The paths from one input, their channels concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate the branches' (samples, channels, height, width)."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _pooled(convolution: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), convolution)


def _block_a(inputs: int, pooled: int) -> Branches:
    return Branches(
        _conv(inputs, 64, 1),
        nn.Sequential(_conv(inputs, 48, 1), _conv(48, 64, 5)),
        nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3)),
        _pooled(_conv(inputs, pooled, 1)),
    )


def _block_b(inputs: int) -> Branches:
    return Branches(
        _conv(inputs, 384, 3, stride=2, padding=0),
        nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3, stride=2, padding=0)),
        nn.MaxPool2d(3, stride=2),
    )


def _block_c(inputs: int, inner: int) -> Branches:
    wide, tall = (1, 7), (7, 1)
    return Branches(
        _conv(inputs, 192, 1),
        nn.Sequential(_conv(inputs, inner, 1), _conv(inner, inner, wide), _conv(inner, 192, tall)),
        nn.Sequential(
            _conv(inputs, inner, 1),
            _conv(inner, inner, tall),
            _conv(inner, inner, wide),
            _conv(inner, inner, tall),
            _conv(inner, 192, wide),
        ),
        _pooled(_conv(inputs, 192, 1)),
    )


def _block_d(inputs: int) -> Branches:
    return Branches(
        nn.Sequential(_conv(inputs, 192, 1), _conv(192, 320, 3, stride=2, padding=0)),
        nn.Sequential(
            _conv(inputs, 192, 1),
            _conv(192, 192, (1, 7)),
            _conv(192, 192, (7, 1)),
            _conv(192, 192, 3, stride=2, padding=0),
        ),
        nn.MaxPool2d(3, stride=2),
    )


def _block_e(inputs: int) -> Branches:
    return Branches(
        _conv(inputs, 320, 1),
        nn.Sequential(_conv(inputs, 384, 1), Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))),
        nn.Sequential(
            _conv(inputs, 448, 1),
            _conv(448, 384, 3),
            Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1))),
        ),
        _pooled(_conv(inputs, 192, 1)),
    )


def layers() -> list[LayerSpec]:
    """Build stem, blocks A to E, head."""
    builders: dict[str, Builder] = {
        "stem.0": partial(_conv, 3, 32, 3, stride=2, padding=0),
        "stem.1": partial(_conv, 32, 32, 3, padding=0),
        "stem.2": partial(_conv, 32, 64, 3),
        "stem.pool0": partial(nn.MaxPool2d, 3, stride=2),
        "stem.3": partial(_conv, 64, 80, 1),
        "stem.4": partial(_conv, 80, 192, 3, padding=0),
        "stem.pool1": partial(nn.MaxPool2d, 3, stride=2),
        "a.0": partial(_block_a, 192, 32),
        "a.1": partial(_block_a, 256, 64),
        "a.2": partial(_block_a, 288, 64),
        "b": partial(_block_b, 288),
        "c.0": partial(_block_c, 768, 128),
        "c.1": partial(_block_c, 768, 160),
        "c.2": partial(_block_c, 768, 160),
        "c.3": partial(_block_c, 768, 192),
        "d": partial(_block_d, 768),
        "e.0": partial(_block_e, 1280),
        "e.1": partial(_block_e, 2048),
        "head": partial(ClassifierHead, 2048, 1000, 0.5),
    }
    return [LayerSpec(name, build) for name, build in builders.items()]


job = ImageJob("inception-v3", layers, batch_size=1024, side=299)
