"""Roles of layers: a model is an embedding, blocks with a dense feed-forward or with experts, and a head.

Some blocks attend through a window, where a sample has more tokens than the window.
"""

from __future__ import annotations

from typing import Literal

from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.parameters import dense_layers

Role = Literal["embedding", "dense", "experts", "windowed dense", "windowed experts", "head"]
WINDOWED: dict[Role, Role] = {"dense": "windowed dense", "experts": "windowed experts"}


def is_dense(role: Role) -> bool:
    """Return whether a block has an ordinary feed-forward, and no experts."""
    return role in ("dense", WINDOWED["dense"])


def is_windowed(role: Role) -> bool:
    """Return whether a block's attention sees a window of positions."""
    return role in WINDOWED.values()


def windowed_layers(shape: TransformerShape) -> tuple[bool, ...]:
    """Return for each block whether its attention sees fewer positions than a sample has."""
    windows = shape.windows
    if windows is None or windows.width >= shape.sequence_length:
        return (False,) * shape.layers
    every = windows.whole_every
    return tuple(every is None or (number + 1) % every > 0 for number in range(shape.layers))


def roles_of(shape: TransformerShape) -> tuple[Role, ...]:
    """Return the role of every layer of the model, in its order."""
    dense = dense_layers(shape)
    plain: list[Role] = ["dense" if number < dense else "experts" for number in range(shape.layers)]
    blocks = [
        WINDOWED[role] if windowed else role for role, windowed in zip(plain, windowed_layers(shape), strict=True)
    ]
    return ("embedding", *blocks, "head")
