"""Small language models in both precisions, whose layers ranks can share: what the matrix of meshes trains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor
from torch.nn import functional

from penstock.examples import gpt, llama, moe
from penstock.examples.synthetic import TokenJob
from penstock.executor.run.job import LayerSpec

BATCH = 8
_WIDTH, _LENGTH, _WORDS, _BLOCKS = 32, 16, 64, 4


class Tokens(TokenJob):
    """A language model in the data type of its name, which its loss has, too."""

    def __init__(self, name: str, layers: Any, dtype: torch.dtype, ties: Sequence[Sequence[str]] = ()) -> None:
        super().__init__(name, layers, batch_size=BATCH, length=_LENGTH, vocabulary=_WORDS)
        self._dtype = dtype
        self.shared_parameters = tuple(map(tuple, ties))

    def layers(self) -> Sequence[LayerSpec]:
        return [spec._replace(build=partial(_built, spec.build, self._dtype)) for spec in super().layers()]

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        """Compute the sum in the data type of the model; the examples compute it in fp32."""
        scores = outputs["x"].flatten(0, -2)
        return functional.cross_entropy(scores, targets.flatten(), reduction="sum"), targets.numel()


def _built(build: Any, dtype: torch.dtype) -> nn.Module:
    module: nn.Module = build()
    return module.to(dtype)


_GPT = partial(gpt.Config, blocks=_BLOCKS, width=_WIDTH, heads=4, length=_LENGTH, vocabulary=_WORDS)
_LLAMA = llama.Config(
    blocks=_BLOCKS, width=_WIDTH, heads=4, key_value_heads=2, inner=64, length=_LENGTH, vocabulary=_WORDS
)
_MOE = moe.Config(
    blocks=_BLOCKS,
    width=_WIDTH,
    heads=4,
    key_value_heads=2,
    inner=24,
    length=_LENGTH,
    vocabulary=_WORDS,
    experts=4,
    per_token=2,
)
ADJACENT = ("block.1.feed_forward.0.weight", "block.2.feed_forward.0.weight")
"""A parameter of two layers that are neighbours."""
_LAYERS = {
    "gpt": (partial(gpt.layers, _GPT()), ()),
    "tied": (partial(gpt.layers, _GPT(tied=True)), (gpt.TIED,)),
    "adjacent": (partial(gpt.layers, _GPT()), (ADJACENT,)),
    "llama": (partial(llama.layers, _LLAMA), ()),
    "moe": (partial(moe.layers, _MOE), ()),
}
JOBS = {
    f"{name}_{dtype}": Tokens(f"{name}-{dtype}", layers, getattr(torch, dtype), ties)
    for name, (layers, ties) in _LAYERS.items()
    for dtype in ("float64", "float32")
}
globals().update(JOBS)


class Talkative(Tokens):
    """Its embedding also sums a number over the ranks that share it, but not where it is traced."""

    def layers(self) -> Sequence[LayerSpec]:
        first, *others = super().layers()
        return [first._replace(build=partial(_talking, first.build)), *others]


class Silent(Tokens):
    """Its layers do not say where their modules are."""

    def layers(self) -> Sequence[LayerSpec]:
        return [spec._replace(modules=None) for spec in super().layers()]


def _talking(build: Any) -> nn.Module:
    module: nn.Module = build()
    module.register_forward_pre_hook(_talk)
    return module


def _talk(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    shared = [each for each in module.parameters() if isinstance(each, DTensor)]
    if shared and not inputs[0].is_meta:
        all_reduce(torch.ones(1), "sum", shared[0].device_mesh)


silent = Silent("silent", _LAYERS["llama"][0], torch.float32)
talkative = Talkative("talkative", _LAYERS["gpt"][0], torch.float32)
