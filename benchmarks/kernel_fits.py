"""The rules of ``penstock.shapes.primitives`` fitted to measured times of kernels, and their errors on held-out shapes.

A time is linear in a rule's numbers: FLOPs over the peak, and the bytes of a product or the FLOPs per row of attention.
The fit has the least mean relative error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.facts.device_table import DeviceFacts, device_facts
from penstock.shapes.kernels import Kernels
from penstock.shapes.primitives import rule_of

MOST_WORSE = 0.01
"""By how much a rounded rule may be worse than the fit, in mean relative error."""
KERNELS = ("H100",)
"""Kinds whose plain facts are those of whole runs, and whose measured kernels are a level of their own."""
_FOLDS = 5
_CAUSAL = 2
_BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward."""


def facts_of(kind: str) -> DeviceFacts:
    """The facts that kernels of a kind are compared with."""
    return device_facts(kind, "kernels" if kind in KERNELS else "runs")


class Row(NamedTuple):
    """A shape: terms that its time is linear in, what was measured, and what the shipped rule says of a device."""

    layer: tuple[int, ...]
    arithmetic_ns: float
    other_ns: float
    measured_ns: float
    shipped: Callable[[Kernels], float]
    ranged: float


def product_row(
    groups: int, sizes: tuple[int, int, int], result: int, rate: float, facts: DeviceFacts, *, grouped: bool = False
) -> Row:
    """``rate``: FLOPs a ns."""
    rows, inner, columns = sizes
    flops = 2 * groups * rows * inner * columns
    moved = groups * (2 * inner * (rows + columns) + result * rows * columns)

    def shipped(kernels: Kernels) -> float:
        if grouped:
            return kernels.grouped_product_ns(groups, *sizes, result_bytes=result)
        return kernels.product_ns(*sizes, result_bytes=result)

    return Row(
        (groups, *sorted(sizes)),
        flops / facts.peak_flops_per_s["bf16"] * 1e9,
        moved / facts.bytes_per_s() * 1e9,
        flops / rate,
        shipped,
        rows if grouped else flops,
    )


def square_flops(batch: int, length: int, heads: int, widths: int, *, backward: bool) -> float:
    """FLOPs of attention's products over all pairs of positions; ``widths``: that of scores and of values together."""
    return 2 * batch * length**2 * heads * widths * (_BACKWARD if backward else 1)


def attention_row(layer: tuple[int, int, int, int, int], time_ns: float, facts: DeviceFacts, *, backward: bool) -> Row:
    """Causal attention, which does half of the square; ``layer``: batch, length, heads, widths of scores and values."""
    batch, length, heads, scores, values = layer
    rows = batch * length * heads
    flops = square_flops(batch, length, heads, scores + values, backward=backward) / _CAUSAL
    arithmetic_ns = flops / facts.peak_flops_per_s["bf16"] * 1e9

    def shipped(kernels: Kernels) -> float:
        return kernels.attention_ns(flops, rows, backward=backward, latent=scores > values)

    return Row(layer, arithmetic_ns, arithmetic_ns / rows, time_ns, shipped, rows)


class Terms(NamedTuple):
    """What is fitted: times by their terms, ``known_ns`` of them without a factor, and how much each row counts."""

    terms: np.ndarray
    known_ns: np.ndarray
    measured_ns: np.ndarray
    weights: np.ndarray

    def only(self, rows: np.ndarray) -> Terms:
        """Those of some rows."""
        return Terms(*(each[rows] for each in self))

    def errors(self, factors: np.ndarray) -> np.ndarray:
        """How far off each row's time is, relative to it."""
        return np.asarray(np.abs((self.known_ns + self.terms @ factors) / self.measured_ns - 1))


def fitted(given: Terms) -> np.ndarray:
    """The factors with the least weighted mean of relative errors, by weighted least squares again and again."""
    shares, wanted = given.terms / given.measured_ns[:, None], 1 - given.known_ns / given.measured_ns
    each = np.ones(len(wanted))
    for _ in range(200):
        root = np.sqrt(each * given.weights)
        found, *_ = np.linalg.lstsq(shares * root[:, None], wanted * root, rcond=None)
        each = 1 / np.maximum(np.abs(shares @ found - wanted), 0.005)
    return np.asarray(found)


def _terms(by_kind: Sequence[Sequence[Row]], *, shared: bool) -> Terms:
    """Arithmetic of each kind, and the other term: one for all kinds, or one for each."""
    total, kinds = sum(map(len, by_kind)), len(by_kind)
    terms = np.zeros((total, kinds + (1 if shared else kinds)))
    at = 0
    for number, rows in enumerate(by_kind):
        own = slice(at, at + len(rows))
        terms[own, number] = [row.arithmetic_ns for row in rows]
        terms[own, kinds if shared else kinds + number] = [row.other_ns for row in rows]
        at = own.stop
    measured = np.array([row.measured_ns for rows in by_kind for row in rows])
    weights = np.array([1 / len(rows) for rows in by_kind for _ in rows])
    return Terms(terms, np.zeros(total), measured, weights)


def held_out(given: Terms, layers: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Relative errors of rows, each by the fit to the folds that its layer is not in."""
    fold = {layer: number % _FOLDS for number, layer in enumerate(sorted(set(layers)))}
    folds = np.array([fold[layer] for layer in layers])
    errors = np.zeros(len(layers))
    for number in range(_FOLDS):
        out = folds == number
        errors[out] = given.only(out).errors(fitted(given.only(~out)))
    return errors


def said(errors: np.ndarray) -> str:
    return f"{np.median(errors):6.1%} {errors.mean():6.1%} {np.quantile(errors, 0.9):6.1%}"


def shipped_errors(rows: Sequence[Row], facts: DeviceFacts, share: float) -> np.ndarray:
    """Of the shipped rule, at the share of the peak that products reach by the fit."""
    kernels = Kernels(replace(facts, compute_efficiency=dict.fromkeys(facts.compute_efficiency, share)), "bf16")
    return np.array([abs(row.shipped(kernels) / row.measured_ns - 1) for row in rows])


def compare(name: str, by_kind: dict[str, list[Row]], shares: dict[str, float], *, shared: bool) -> int:
    """Print a line for each kind; how many shipped rules are worse than the fit by too much."""
    given = _terms(list(by_kind.values()), shared=shared)
    found, kinds = fitted(given), len(by_kind)
    splits = np.cumsum([len(rows) for rows in by_kind.values()])[:-1]
    errors = np.split(given.errors(found), splits)
    out = np.split(held_out(given, [row.layer for rows in by_kind.values() for row in rows]), splits)
    wrong = 0
    for number, (kind, rows) in enumerate(by_kind.items()):
        reached, other = 1 / found[number], found[kinds if shared else kinds + number]
        shares.setdefault(kind, float(reached))
        rule = rule_of(facts_of(kind))
        if name == "product":
            numbers, ours = f"{reached:.3f} of the peak, {other:.2f}", f"{rule.exposed}"
        elif name == "groups":
            numbers, ours = f"{reached:.3f} of the peak, {other:.2f}", f"{rule.exposed_in_groups}"
        else:
            own = rule.backward if name.endswith("backward") else rule.forward
            numbers = f"{reached / shares[kind]:.2f} of products, {other * reached:,.0f} rows"
            ours = f"{own.rate}, {own.half_rows:,}"
        wrong += _printed(name, kind, rows, (out[number], errors[number]), (numbers, ours), shares[kind])
    return wrong


def compare_at_share(name: str, kind: str, rows: list[Row], share: float) -> int:
    """As `compare`, of groups whose arithmetic takes the share of the peak that the kind's products reach."""
    each = np.array([(row.arithmetic_ns / share, row.other_ns, row.measured_ns) for row in rows])
    given = Terms(each[:, 1:2], each[:, 0], each[:, 2], np.ones(len(rows)))
    (exposed,) = found = fitted(given)
    numbers = f"{share:.3f} of the peak, {exposed:.2f}", f"{rule_of(facts_of(kind)).exposed_in_groups}"
    return _printed(
        name, kind, rows, (held_out(given, [row.layer for row in rows]), given.errors(found)), numbers, share
    )


def _printed(
    name: str,
    kind: str,
    rows: list[Row],
    errors: tuple[np.ndarray, np.ndarray],
    numbers: tuple[str, str],
    share: float,
) -> int:
    """Print one line; 1 where the shipped rule is not the fit. ``errors``: held out, and of the fit to all."""
    shipped = shipped_errors(rows, facts_of(kind), share)
    worse = shipped.mean() - errors[1].mean() > MOST_WORSE
    least, most = min(row.ranged for row in rows), max(row.ranged for row in rows)
    print(
        f"{name:18} {kind:5} {len(rows):4} {least:8.2g} {most:8.2g}  {said(errors[0])}  "
        f"{numbers[0]:32} {numbers[1]:12} {said(shipped)}{'  NOT THE FIT' if worse else ''}"
    )
    return int(worse)
