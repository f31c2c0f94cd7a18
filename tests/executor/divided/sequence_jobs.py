"""Models in fp64 whose sequences ranks can share, and some that they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.examples import gpt, llama, transformer
from penstock.examples.synthetic import TokenJob
from penstock.examples.transformer import TranslationJob
from penstock.executor.run.job import LayerSpec

BATCH, LENGTH, WORDS = 4, 16, 64


class Double(TokenJob):
    """Random tokens of fp64 layers, whose loss has fp64, too; padding targets, of another number in each row."""

    def __init__(self, name: str, layers: Any, *, length: int = LENGTH, sequences: Sequence[str] = ("x",)) -> None:
        super().__init__(name, layers, batch_size=BATCH, length=length, vocabulary=WORDS)
        self.sequences = sequences

    def layers(self) -> Sequence[LayerSpec]:
        return [spec._replace(build=partial(_double, spec.build)) for spec in super().layers()]

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        inputs, targets = super().batch(step, rows)
        kept = [self.length - row % 3 for row in rows]
        return inputs, targets.masked_fill(torch.arange(self.length) >= torch.tensor(kept)[:, None], -100)

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        (scores,) = outputs.values()
        total = functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum")
        return total, int((targets >= 0).sum()) if targets.device.type != "meta" else targets.numel()


class Pairs(Double, TranslationJob):
    """Two sequences, of which one attends to the other."""

    outputs = ("y",)


class Pooled(Double):
    """One prediction for each sequence."""

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        return functional.cross_entropy(outputs["x"], targets[:, 0], reduction="sum"), len(targets)


class Mean(nn.Module):
    """Every position gets the mean of all: positions are mixed otherwise than by attention."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


class Pool(nn.Module):
    """The mean of all positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Windowed(nn.Module):
    """Attention with a mask that is not causal."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(-2).tril()
        heads = x[:, None]
        return functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)[:, 0]


def _double(build: Any) -> nn.Module:
    layer: nn.Module = build().double()
    return layer


def _with(layer: type[nn.Module]) -> list[LayerSpec]:
    first, *_, last = llama.layers(_LLAMA)
    return [first, LayerSpec("extra", layer, parallel="replicated"), last]


_LLAMA = llama.Config(blocks=2, width=32, heads=4, key_value_heads=2, inner=64, length=LENGTH, vocabulary=WORDS)
_GPT = gpt.Config(blocks=2, width=32, heads=4, length=LENGTH, vocabulary=WORDS)
_PAIRS = transformer.Config(depth=1, width=16, heads=2, inner=32, length=LENGTH, vocabulary=WORDS)

llama_double = Double("llama-double", partial(llama.layers, _LLAMA))
gpt_double = Double("gpt-double", partial(gpt.layers, _GPT))
pairs_double = Pairs("pairs-double", partial(transformer.layers, _PAIRS), sequences=("source", "target"))
odd = Double("odd", partial(llama.layers, replace(_LLAMA, length=18)), length=18)
mute = Double("mute", partial(llama.layers, _LLAMA), sequences=())
astray = Double("astray", partial(llama.layers, _LLAMA), sequences=("tokens",))
mean = Double("mean", partial(_with, Mean))
pool = Pooled("pool", partial(_with, Pool))
windowed = Double("windowed", partial(_with, Windowed))
