"""The parts of a block: pieces with their operations and collectives, each in the modules that recompute it."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from penstock.schemas.transformers.degrees import ALONE, Collective, Module, ModuleCost, Operation
from penstock.shapes.costs.case import FP32, Case, Moved, Times
from penstock.shapes.costs.collectives import joined

KEPT_WHERE_SENT: tuple[Operation, ...] = ("reduce_scatter", "all_to_all")
"""Collectives whose results selective checkpoints keep."""


class Product(NamedTuple):
    """A product of one GPU, of (rows, inner) and a weight of (inner, columns).

    ``groups`` is the number of such products in one call; ``name`` is the name of eager torch's product in
    `activations`.
    """

    rows: float
    inner: float
    columns: float
    groups: int | None = None
    name: str = ""

    def forward_ns(self, case: Case) -> float:
        """Return the time of the product."""
        return self._ns(case, self.inner, self.columns)

    def inputs_ns(self, case: Case) -> float:
        """Return the time of the gradient of its input."""
        return self._ns(case, self.columns, self.inner)

    def weights_ns(self, case: Case) -> float:
        """Return the time of the gradient of its weight.

        Megatron's product adds to the fp32 buffer; eager torch adds afterwards.
        """
        result_bytes = 2 * FP32 if case.fused else None
        if self.groups is None:
            time_ns = case.kernels.product_ns(self.inner, self.rows, self.columns, result_bytes=result_bytes)
        else:
            time_ns = case.kernels.grouped_product_ns(
                self.groups, self.inner, self.rows, self.columns, result_bytes=result_bytes
            )
        added = 3 * case.width * self.inner * self.columns * (self.groups or 1)
        return time_ns if case.fused else time_ns + case.kernels.moved_ns(added)

    def _ns(self, case: Case, inner: float, columns: float) -> float:
        if self.groups is None:
            return case.kernels.product_ns(self.rows, inner, columns)
        return case.kernels.grouped_product_ns(self.groups, self.rows, inner, columns)


class Piece(NamedTuple):
    """Operations of a block, what they communicate, and the modules whose recomputation runs them again."""

    modules: tuple[Module, ...] = ()
    products: tuple[Product, ...] = ()
    moved: Moved = ()
    kernels: tuple[Times, ...] = ()
    """Kernels that are neither products nor bound by the bytes that they move, such as attention."""
    attends: bool = False
    """Whether these kernels are attention."""
    collectives: tuple[Collective, ...] = ()

    def forward_ns(self, case: Case, kept: Container[str] | None = None) -> float:
        """Return the forward time, without collectives.

        For selective checkpoints attention and the ``kept`` products are left out.
        """
        time_ns = sum(each.forward_ns(case) for each in self.products if each.name not in (kept or ()))
        time_ns += 0 if self.attends and kept is not None else sum(each.forward for each in self.kernels)
        return time_ns + sum(case.kernels.moved_ns(there) for there, _back in self.moved)

    def times(self, case: Case) -> Times:
        """Return the times of both passes, without collectives."""
        inputs = sum(each.inputs_ns(case) for each in self.products)
        weights = sum(each.weights_ns(case) for each in self.products)
        inputs += sum(each.backward - each.weight for each in self.kernels)
        weights += sum(each.weight for each in self.kernels)
        inputs += sum(case.kernels.moved_ns(back) for _there, back in self.moved)
        return Times(self.forward_ns(case), inputs + weights, weights)


def times_of(case: Case, pieces: Iterable[Piece]) -> Times:
    """Return the times of all pieces one after another."""
    each = [piece.times(case) for piece in pieces]
    return Times(*(sum(times) for times in zip(*each, strict=True)))


def collectives_of(pieces: Iterable[Piece]) -> tuple[Collective, ...]:
    """Return the collectives of all pieces; equal ones are counted together."""
    return joined(each for piece in pieces for each in piece.collectives)


def module_costs(
    case: Case, pieces: Sequence[Piece], freed: dict[Module, Fraction], kept: Container[str]
) -> tuple[ModuleCost, ...]:
    """Compute the costs of recomputing each module, and the bytes that this frees.

    ``freed``: bytes per token for tensors of 16 bits. ``kept``: the products whose results selective checkpoints keep,
    besides the results of reduce-scatters and exchanges with experts.
    """
    scale = Fraction(case.width, 2) * case.tokens
    costs = []
    for module, size in freed.items():
        alone = module in ALONE
        again = [piece for piece in pieces if alone or module in piece.modules]
        sent = (each for piece in again for each in piece.collectives if each.phase == "forward")
        costs.append(
            ModuleCost(
                module=module,
                forward_ns=math.ceil(sum(piece.forward_ns(case, kept if alone else None) for piece in again)),
                freed_bytes=math.floor(scale * size),
                collectives=joined(each for each in sent if not (alone and each.operation in KEPT_WHERE_SENT)),
            )
        )
    return tuple(costs)
