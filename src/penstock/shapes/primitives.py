"""The rate of kernels relative to a large matrix product, by kind of device: a few numbers for each operator.

Fitted by ``benchmarks/bench_primitives.py`` to SimuMax's measurements (MooreThreads/SimuMax, release 1.2, Apache-2.0)
on B200 and A100-PCIe in bf16: 697 matrix products, 120 products of groups, and flash attention of 88 shapes; and to our
own on one H100 (``benchmarks/measured``): 606 products, 171 of groups, attention of 33 shapes, by cuDNN. The benchmark
fails where these numbers are not, rounded, the result of the fit. Errors are measured on shapes that were held out.
H100's rule goes with the level ``kernels`` of the table of devices. At the level ``runs`` H100 and H200 have the rule
of the kinds without measurements: the rule of products of both, the attention of an earlier fit to both, the groups of
B200.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.facts.device_table import DeviceFacts


class Attention(NamedTuple):
    """Flash attention: its rate in a large layer over the rate of matrix products, and the rows that reach half of it.

    A row is a query of one head. The kernel gives blocks of rows to processors, so few rows leave some idle.
    """

    rate: float
    half_rows: int
    of_latent: float
    """The rate in latent attention (scores 192 and values 128 wide when measured) over the rate in other."""


class Rule(NamedTuple):
    """A rule of one kind; ``exposed``: the part of the time of a product's bytes that arithmetic does not hide."""

    exposed: float
    exposed_in_groups: float
    forward: Attention
    backward: Attention


LEAST_FLOPS, LEAST_GROUP_ROWS, LEAST_ATTENTION_ROWS = 6.7e9, 128, 16_384
"""The smallest product (FLOP), rows of a group and rows of attention that were measured.

Smaller ones are extrapolated. The largest are 69 TFLOP, 9,832 and 8,388,608 rows, and a rule reaches the rate of a
large layer long before.
"""

_B200 = Rule(0.5, 0.79, Attention(1.05, 61_000, 1.03), Attention(0.82, 10_400, 0.78))
_MEASURED = {
    "A100": Rule(0.5, 0.43, Attention(0.83, 21_000, 0.9), Attention(0.64, 7_500, 0.83)),
    "B200": _B200,
    "H100": Rule(0.5, 0.68, Attention(0.79, 19_000, 0.98), Attention(0.63, 17_500, 0.92)),
}
_OTHERS = Rule(
    0.5,
    _B200.exposed_in_groups,
    Attention(1.0, 55_000, _B200.forward.of_latent),
    Attention(0.85, 16_000, _B200.backward.of_latent),
)


def rule_of(facts: DeviceFacts) -> Rule:
    """Return the rule of a kind, or of the kind that it is taken to be like."""
    kind = facts.like or facts.kind
    if kind == "H100" and facts.level == "runs":  # as recorded plans and shipped profiles were made
        return _OTHERS
    return _MEASURED.get(kind, _OTHERS)
