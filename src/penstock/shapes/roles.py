"""Roles of layers: a model is an embedding, blocks with a dense feed-forward, blocks with experts, and a head."""

from __future__ import annotations

from typing import Literal

from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.parameters import dense_layers

Role = Literal["embedding", "dense", "experts", "head"]


def roles_of(shape: TransformerShape) -> tuple[Role, ...]:
    """Return the role of every layer of the model, in its order."""
    dense = dense_layers(shape)
    blocks: list[Role] = ["dense" if number < dense else "experts" for number in range(shape.layers)]
    return ("embedding", *blocks, "head")
