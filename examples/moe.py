"""A small decoder with mixtures of experts: LLaMA's attention, and experts of which each token goes through a few.

No token is dropped. ``tiny`` is for tests, ``small`` trains on two CPU cores.

.. [1] Jiang et al., Mixtral of Experts (2024), section 2.1: the router's softmax is over the chosen experts alone.
.. [2] Dai et al., DeepSeekMoE (2024), section 3.2: an expert that all tokens go through.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.executor.divided.routing import tokens_per_expert
from penstock.executor.run.job import LayerSpec, Styles

from .attention import MODULES
from .llama import Config as Sizes
from .llama import GroupedQueryAttention, Head, SwiGLU, divided_embedding, divided_head
from .synthetic import TokenJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Sizes):
    """The sizes of one decoder; ``inner``: of one expert, ``shared``: of the expert of all tokens (0: none)."""

    experts: int
    per_token: int
    shared: int = 0


class Experts(nn.Module):
    """SwiGLUs whose matrices are stacked: (experts, in, out)."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate = _drawn(experts, width, inner)
        self.up = _drawn(experts, width, inner)
        self.down = _drawn(experts, inner, width)

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Transform (number, width), in the order of experts, to the same shape; ``counts`` of each."""
        results = [
            (functional.silu(local_tokens @ gate) * (local_tokens @ up)) @ down
            for local_tokens, gate, up, down in zip(
                tokens.split(counts), self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True
            )
        ]
        return torch.cat(results)


class MixtureOfExperts(nn.Module):
    """The sum of what a token's experts make of it, weighted by the router, and of the shared expert."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.number, self.per_token = config.experts, config.per_token
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width, config.inner)
        self.shared = SwiGLU(config.width, config.shared) if config.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """Transform (samples, positions, width) to the same shape."""
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).topk(self.per_token)
        weights = scores.softmax(-1)
        order = chosen.flatten().argsort(stable=True)
        results = self.experts(tokens[order // self.per_token], tokens_per_expert(chosen, self.number))
        of_token = results[order.argsort()].unflatten(0, (-1, self.per_token))
        out: Tensor = (weights.unsqueeze(-1) * of_token).sum(1).view_as(x)
        return out if self.shared is None else out + self.shared(x)


class Block(nn.Module):
    """Attention and a mixture of experts, each with a residual around it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = GroupedQueryAttention(config)
        self.norm_feed_forward = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = MixtureOfExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (samples, positions, width) to the same shape."""
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.feed_forward(self.norm_feed_forward(x))
        return out


def layers(config: Config) -> list[LayerSpec]:
    """Return embedding, blocks, head."""
    specs = [
        LayerSpec(
            "embedding", partial(nn.Embedding, config.vocabulary, config.width), parallel=divided_embedding, modules={}
        )
    ]
    divided = partial(divided_block, shared=config.shared > 0)
    specs += [
        LayerSpec(f"block.{i}", partial(Block, config), parallel=divided, modules=MODULES) for i in range(config.blocks)
    ]
    return [*specs, LayerSpec("head", partial(Head, config), parallel=divided_head, modules={})]


def divided_block(*, shared: bool) -> Styles:
    """Divide the heads and the experts over the GPUs; the router sees a part of the sequence."""
    from penstock.executor.divided.experts import ExpertParallel

    from .division import columns, gathered, norm, rows

    styles = {
        "norm_attention": norm(),
        "attention": gathered(),
        **{f"attention.{name}": columns() for name in ("query", "key", "value")},
        "attention.out": rows(),
        "norm_feed_forward": norm(local=True),
        "feed_forward.experts": ExpertParallel(),
    }
    if shared:
        styles |= {
            "feed_forward.shared": gathered(),
            "feed_forward.shared.gate": columns(),
            "feed_forward.shared.up": columns(),
            "feed_forward.shared.down": rows(),
        }
    return styles


def make(name: str, config: Config, *, batch_size: int, learning_rate: float = 3e-4) -> TokenJob:
    """Return a job that trains this decoder on random tokens."""
    return TokenJob(
        name,
        partial(layers, config),
        batch_size=batch_size,
        length=config.length,
        vocabulary=config.vocabulary,
        learning_rate=learning_rate,
    )


def _drawn(experts: int, inputs: int, outputs: int) -> nn.Parameter:
    """Draw a parameter as the weights of ``nn.Linear``."""
    bound = inputs**-0.5
    return nn.Parameter(torch.empty(experts, inputs, outputs).uniform_(-bound, bound))


_TINY = Config(
    blocks=2,
    width=32,
    heads=4,
    key_value_heads=2,
    inner=24,
    length=16,
    vocabulary=64,
    experts=4,
    per_token=2,
    shared=32,
)
_SMALL = Config(
    blocks=4, width=128, heads=4, key_value_heads=2, inner=128, length=64, vocabulary=512, experts=8, per_token=2
)

tiny = make("moe-tiny", _TINY, batch_size=16)
small = make("moe-small", _SMALL, batch_size=32)
