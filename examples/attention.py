"""Multi-head attention and feed-forward, shared by the transformer examples.

.. [1] Vaswani et al., Attention Is All You Need (2017), section 3.2.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from penstock.executor.divided.context import positions
from penstock.executor.run.job import Styles

MODULES = {"attention": "attention", "mlp": "feed_forward", "norm": ("norm_attention", "norm_feed_forward")}
"""Places of the modules that plans recompute by themselves, in the blocks of the examples."""


class Attention(nn.Module):
    """Attention of ``x`` to itself, or to ``memory``; tensors are (samples, positions, width)."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"the width {width} has to be a multiple of the {heads} heads")
        self.head_width = width // heads
        self.causal = causal
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return attention to ``memory`` or ``x``; ``mask`` is True where a key may be seen, (samples, positions)."""
        key, value = self._heads(self.key_value(x if memory is None else memory), 2).chunk(2, dim=-1)
        attended = functional.scaled_dot_product_attention(
            self._heads(self.query(x), 1).transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if mask is None else mask[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor, parts: int) -> Tensor:
        """Return (samples, positions, heads, parts of each), of all heads or of the heads that a GPU has."""
        heads: Tensor = x.unflatten(-1, (-1, parts * self.head_width))
        return heads


class FeedForward(nn.Sequential):
    """Two linear layers with an activation between."""

    def __init__(self, width: int, inner: int, activation: type[nn.Module] = nn.GELU, dropout: float = 0.0) -> None:
        super().__init__(nn.Linear(width, inner), activation(), nn.Dropout(dropout), nn.Linear(inner, width))


class TokenEmbedding(nn.Module):
    """Token ids to vectors, plus a learned vector per position."""

    def __init__(self, vocabulary: int, length: int, width: int, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Transform (samples, positions) to (samples, positions, width)."""
        vectors = self.positions(positions(ids.shape[1], device=ids.device))
        out: Tensor = self.dropout(self.norm(self.tokens(ids) + vectors))
        return out


def divided_attention(path: str, *, memory: bool = False) -> Styles:
    """Divide the heads of an `Attention` at ``path`` over the GPUs; it reads and writes parts of the sequence."""
    from .division import columns, gathered, rows

    return {
        path: gathered(2 if memory else 1),
        f"{path}.query": columns(),
        f"{path}.key_value": columns(),
        f"{path}.out": rows(),
    }


def divided_feed_forward(path: str) -> Styles:
    """Divide the width of a `FeedForward` at ``path`` over the GPUs; it reads and writes parts of the sequence."""
    from .division import columns, gathered, rows

    return {path: gathered(), f"{path}.0": columns(), f"{path}.3": rows()}


def divided_embedding(path: str = "", *, norm: bool = False) -> Styles:
    """Divide the words of a `TokenEmbedding` at ``path`` over the GPUs; each has all of its positions."""
    from .division import norm as normalised
    from .division import part_of_positions, words

    inside = f"{path}." if path else ""
    plan = {f"{inside}tokens": words(), f"{inside}positions": part_of_positions()}
    return {**plan, f"{inside}norm": normalised(local=True)} if norm else plan
