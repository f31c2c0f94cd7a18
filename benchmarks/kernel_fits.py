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
"""The tolerance by which a rounded rule may be worse than the fit, in mean relative error."""
KERNELS = ("H100",)
"""The kinds whose plain facts come from whole runs; their measured kernels are a separate level."""
_FOLDS = 5
_CAUSAL = 2
_BACKWARD = 2.5
"""The ratio of FLOPs of attention's backward to FLOPs of its forward."""


def facts_of(kind: str) -> DeviceFacts:
    """Return the facts with which kernels of a kind are compared."""
    return device_facts(kind, "kernels" if kind in KERNELS else "runs")


class Row(NamedTuple):
    """A shape: terms in which its time is linear, the measured time, and the shipped rule's time."""

    layer: tuple[int, ...]
    arithmetic_ns: float
    other_ns: float
    measured_ns: float
    shipped: Callable[[Kernels], float]
    ranged: float


def product_row(
    groups: int, sizes: tuple[int, int, int], result: int, rate: float, facts: DeviceFacts, *, grouped: bool = False
) -> Row:
    """Return the row of a product; ``rate``: FLOPs a ns."""
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
    """Return FLOPs of attention's products over all pairs of positions.

    ``widths``: the widths of scores and of values together.
    """
    return 2 * batch * length**2 * heads * widths * (_BACKWARD if backward else 1)


def attention_row(layer: tuple[int, int, int, int, int], time_ns: float, facts: DeviceFacts, *, backward: bool) -> Row:
    """Return the row of causal attention, which does half of the square.

    ``layer``: batch, length, heads, widths of scores and values.
    """
    batch, length, heads, scores, values = layer
    rows = batch * length * heads
    flops = square_flops(batch, length, heads, scores + values, backward=backward) / _CAUSAL
    arithmetic_ns = flops / facts.peak_flops_per_s["bf16"] * 1e9

    def shipped(kernels: Kernels) -> float:
        return kernels.attention_ns(flops, rows, backward=backward, latent=scores > values)

    return Row(layer, arithmetic_ns, arithmetic_ns / rows, time_ns, shipped, rows)


class Terms(NamedTuple):
    """The input of a fit: times by their terms, ``known_ns`` of them without a factor, and the weight of each row."""

    terms: np.ndarray
    known_ns: np.ndarray
    measured_ns: np.ndarray
    weights: np.ndarray

    def only(self, rows: np.ndarray) -> Terms:
        """Return the terms of some rows."""
        return Terms(*(each[rows] for each in self))

    def errors(self, factors: np.ndarray) -> np.ndarray:
        """Return the error of each row's time, relative to it."""
        return np.asarray(np.abs((self.known_ns + self.terms @ factors) / self.measured_ns - 1))


def fitted(terms: Terms) -> np.ndarray:
    """Return the factors with the least weighted mean of relative errors.

    The method repeats weighted least squares.
    """
    shares, wanted = terms.terms / terms.measured_ns[:, None], 1 - terms.known_ns / terms.measured_ns
    each = np.ones(len(wanted))
    for _ in range(200):
        root = np.sqrt(each * terms.weights)
        factors, *_ = np.linalg.lstsq(shares * root[:, None], wanted * root, rcond=None)
        each = 1 / np.maximum(np.abs(shares @ factors - wanted), 0.005)
    return np.asarray(factors)


def _terms(by_kind: Sequence[Sequence[Row]], *, shared: bool) -> Terms:
    """Return the arithmetic of each kind, and the other term: one for all kinds, or one for each."""
    total, kinds = sum(map(len, by_kind)), len(by_kind)
    terms = np.zeros((total, kinds + (1 if shared else kinds)))
    at = 0
    for number, rows in enumerate(by_kind):
        rows_of_kind = slice(at, at + len(rows))
        terms[rows_of_kind, number] = [row.arithmetic_ns for row in rows]
        terms[rows_of_kind, kinds if shared else kinds + number] = [row.other_ns for row in rows]
        at = rows_of_kind.stop
    measured = np.array([row.measured_ns for rows in by_kind for row in rows])
    weights = np.array([1 / len(rows) for rows in by_kind for _ in rows])
    return Terms(terms, np.zeros(total), measured, weights)


def held_out(terms: Terms, layers: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return the relative errors of rows, each by the fit to the folds that its layer is not in."""
    fold = {layer: number % _FOLDS for number, layer in enumerate(sorted(set(layers)))}
    folds = np.array([fold[layer] for layer in layers])
    errors = np.zeros(len(layers))
    for number in range(_FOLDS):
        out = folds == number
        errors[out] = terms.only(out).errors(fitted(terms.only(~out)))
    return errors


def summary(errors: np.ndarray) -> str:
    return f"{np.median(errors):6.1%} {errors.mean():6.1%} {np.quantile(errors, 0.9):6.1%}"


def shipped_errors(rows: Sequence[Row], facts: DeviceFacts, share: float) -> np.ndarray:
    """Return errors of the shipped rule, at the share of the peak that products reach by the fit."""
    kernels = Kernels(replace(facts, compute_efficiency=dict.fromkeys(facts.compute_efficiency, share)), "bf16")
    return np.array([abs(row.shipped(kernels) / row.measured_ns - 1) for row in rows])


def compare(name: str, by_kind: dict[str, list[Row]], shares: dict[str, float], *, shared: bool) -> int:
    """Print a line for each kind; return how many shipped rules are worse than the fit by too much."""
    terms = _terms(list(by_kind.values()), shared=shared)
    factors, kinds = fitted(terms), len(by_kind)
    splits = np.cumsum([len(rows) for rows in by_kind.values()])[:-1]
    errors = np.split(terms.errors(factors), splits)
    out = np.split(held_out(terms, [row.layer for rows in by_kind.values() for row in rows]), splits)
    wrong = 0
    for number, (kind, rows) in enumerate(by_kind.items()):
        reached, other = 1 / factors[number], factors[kinds if shared else kinds + number]
        shares.setdefault(kind, float(reached))
        rule = rule_of(facts_of(kind))
        if name == "product":
            numbers, ours = f"{reached:.3f} of the peak, {other:.2f}", f"{rule.exposed}"
        elif name == "groups":
            numbers, ours = f"{reached:.3f} of the peak, {other:.2f}", f"{rule.exposed_in_groups}"
        else:
            attention = rule.backward if name.endswith("backward") else rule.forward
            numbers = f"{reached / shares[kind]:.2f} of products, {other * reached:,.0f} rows"
            ours = f"{attention.rate}, {attention.half_rows:,}"
        wrong += _printed(name, kind, rows, (out[number], errors[number]), (numbers, ours), shares[kind])
    return wrong


def compare_at_share(name: str, kind: str, rows: list[Row], share: float) -> int:
    """Compare as `compare`, for groups whose arithmetic takes the share of the peak that the kind's products reach."""
    each = np.array([(row.arithmetic_ns / share, row.other_ns, row.measured_ns) for row in rows])
    terms = Terms(each[:, 1:2], each[:, 0], each[:, 2], np.ones(len(rows)))
    (exposed,) = factors = fitted(terms)
    numbers = f"{share:.3f} of the peak, {exposed:.2f}", f"{rule_of(facts_of(kind)).exposed_in_groups}"
    return _printed(
        name, kind, rows, (held_out(terms, [row.layer for row in rows]), terms.errors(factors)), numbers, share
    )


def _printed(
    name: str,
    kind: str,
    rows: list[Row],
    errors: tuple[np.ndarray, np.ndarray],
    numbers: tuple[str, str],
    share: float,
) -> int:
    """Print one line; return 1 where the shipped rule is not the fit. ``errors``: held out, and of the fit to all."""
    shipped = shipped_errors(rows, facts_of(kind), share)
    worse = shipped.mean() - errors[1].mean() > MOST_WORSE
    least, most = min(row.ranged for row in rows), max(row.ranged for row in rows)
    print(
        f"{name:18} {kind:5} {len(rows):4} {least:8.2g} {most:8.2g}  {summary(errors[0])}  "
        f"{numbers[0]:32} {numbers[1]:12} {summary(shipped)}{'  NOT THE FIT' if worse else ''}"
    )
    return int(worse)
