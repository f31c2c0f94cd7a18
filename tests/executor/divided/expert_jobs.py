"""Small decoders with experts: in fp64, and with a router that sends equally many tokens to each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from penstock.examples import moe
from penstock.examples.synthetic import TokenJob
from penstock.executor.run.job import LayerSpec

CONFIG = moe.Config(
    blocks=2, width=16, heads=4, key_value_heads=2, inner=12, shared=8, length=8, vocabulary=32, experts=4, per_token=2
)
BATCH = 8


class Equal(nn.Module):
    """A router that looks at no token: the positions take turns with the experts."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (tokens, width) to (tokens, experts), so that each pair of neighbours has equally many tokens."""
        first = torch.arange(len(tokens), device=tokens.device).unsqueeze(-1) * CONFIG.per_token
        apart = (torch.arange(CONFIG.experts, device=tokens.device) - first) % CONFIG.experts
        return (apart < CONFIG.per_token).to(tokens.dtype)


class Decoder(TokenJob):
    """Altered layers, and a loss in their data type; SGD, whose steps depend on the size of gradients."""

    def __init__(self, name: str, alter: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(
            name, partial(moe.layers, CONFIG), batch_size=BATCH, length=CONFIG.length, vocabulary=CONFIG.vocabulary
        )
        self._alter = alter

    def layers(self) -> Sequence[LayerSpec]:
        return [spec._replace(build=partial(self._built, spec.build)) for spec in super().layers()]

    def _built(self, build: Callable[[], nn.Module]) -> nn.Module:
        return self._alter(build())

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        total = functional.cross_entropy(outputs["x"].flatten(0, -2), targets.flatten(), reduction="sum")
        return total, targets.numel()

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(params, lr=0.1, momentum=0.9)


def _balanced(module: nn.Module) -> nn.Module:
    if isinstance(module, moe.Block):
        module.feed_forward.router = Equal()  # type: ignore[assignment]
    return module


def _dropping(module: nn.Module) -> nn.Module:
    if isinstance(module, moe.Block):
        module.norm_feed_forward = nn.Sequential(module.norm_feed_forward, nn.Dropout(0.2))  # type: ignore[assignment]
    return module.double()


wide = Decoder("experts-wide", nn.Module.double)
dropping = Decoder("experts-dropping", _dropping)
balanced = Decoder("experts-balanced", _balanced)
