"""The dense feed-forward of one GPU: its products and the activation between them."""

from __future__ import annotations

from penstock.schemas.transformers.degrees import Module
from penstock.shapes.costs.case import Case, Moved
from penstock.shapes.costs.collectives import into, out_of
from penstock.shapes.costs.pieces import Piece, Product


def feed_forward(case: Case, width: int | None = None, modules: tuple[Module, ...] = ("mlp",)) -> tuple[Piece, ...]:
    """Return the pieces of a feed-forward, from the result of the norm before to the sum with the residual.

    ``width``: its inner width; None for the shape's.
    """
    shape = case.shape
    inner, gates = (width or shape.ffn) // case.layout.tensor, 2 if shape.gated else 1
    names = ("gate", "up")[-gates:]
    columns = [("", gates * inner)] if case.fused else [(name, inner) for name in names]
    products = [Product(case.tokens, shape.hidden, each, name=name) for name, each in columns]
    return (
        Piece(
            modules=modules,
            products=(*products, Product(case.tokens, inner, shape.hidden, name="down")),
            moved=activations(case, case.tokens, inner),
            collectives=(*into(case, case.hidden_bytes), *out_of(case, case.hidden_bytes)),
        ),
    )


def activations(case: Case, rows: float, inner: float) -> Moved:
    """Return the bytes of the activation: one tensor in, one out, back one more.

    With a gate two tensors go in, and back two out as well. Eager torch has a kernel for the function and one for the
    product with the gate.
    """
    size = case.width * rows * inner
    if not case.shape.gated:
        return ((2 * size, 3 * size),)
    return ((3 * size, 5 * size),) if case.fused else ((2 * size, 3 * size), (3 * size, 6 * size))
