"""AvgPipe's predictor (section 5.2, equations 1 to 8; ALGORITHMS 6.3): other degrees from one measured run.

Symbols:

- m, n: ``Measured.num_micro_batches`` and ``num_pipelines``; m*, n*: ``Degrees``.
- T_gpu of GPU k: ``compute_ns``, 𝕋: ``transfer_ns``, φ(t): ``utilisation_ppm`` in equal slices of T_gpu.
- F_mod: n times ``parallel_bytes`` and ``reference_bytes``; F_dat: ``data_bytes``.

The aggregate over the GPUs, which the paper does not state, is their maximum (R-32). Everything is exact: fractions of
integers.

``mode="paper"`` has the printed formulas. There T_gpu is the time of one batch, so it falls with n*, while 𝕋, the time
of all batches on one network, grows with n* (R-33). The memory of the models, the one reference model included, grows
with n*/n. ``mode="wall"`` counts the time of an iteration everywhere and divides it by n*; F_mod counts the reference
model once (R-34), and F_dat has what the schedule keeps in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Literal, NamedTuple

Mode = Literal["paper", "wall"]
MILLION = 1_000_000


class Rank(NamedTuple):
    """A measurement of one GPU per batch (section 5.2.1); ``data_bytes`` includes everything that was in flight."""

    compute_ns: int
    transfer_ns: int
    utilisation_ppm: tuple[int, ...]
    parallel_bytes: int
    reference_bytes: int
    data_bytes: int


class Measured(NamedTuple):
    """A run of n pipelines with m micro-batches each."""

    num_micro_batches: int
    num_pipelines: int
    ranks: tuple[Rank, ...]


class Degrees(NamedTuple):
    """A setting: M micro-batches per batch, N parallel pipelines."""

    num_micro_batches: int
    num_pipelines: int


class Prediction(NamedTuple):
    """A prediction: T_gpu, 𝕋, T_com, T_up, T_down and T in ns, and F in bytes, of each GPU."""

    compute_ns: tuple[Fraction, ...]
    transfer_ns: tuple[Fraction, ...]
    blocked_ns: tuple[Fraction, ...]
    upstream_ns: tuple[Fraction, ...]
    downstream_ns: tuple[Fraction, ...]
    total_ns: tuple[Fraction, ...]
    memory_bytes: tuple[Fraction, ...]

    @property
    def time_ns(self) -> Fraction:
        """The time of the slowest GPU."""
        return max(self.total_ns)


def predict(measured: Measured, degrees: Degrees, mode: Mode = "paper", growth: Sequence[Fraction] = ()) -> Prediction:
    """Predict times and memory with other degrees.

    ``growth`` (mode ``wall``): for each GPU, the ratio of micro-batches in flight to micro-batches in flight as
    measured.
    """
    m, n = measured.num_micro_batches, measured.num_pipelines
    number, pipelines = degrees
    batches = Fraction(pipelines, n)
    denser = Fraction(m, number) * batches
    slower = 1 / denser if mode == "paper" else Fraction(number, m)
    compute = [slower * (rank.compute_ns + _overused_ns(rank, denser)) for rank in measured.ranks]
    transfer = [batches * rank.transfer_ns for rank in measured.ranks]
    blocked = [
        t / number + Fraction(number - 1, number) * max(t - c, Fraction(0))
        for t, c in zip(transfer, compute, strict=True)
    ]
    hops = [(t + c) / number for t, c in zip(transfer, compute, strict=True)]
    upstream = [Fraction(0), *accumulate(hops[:-1])]
    downstream = [Fraction(0), *accumulate(reversed(hops[1:]))][::-1]
    total = [sum(parts, Fraction(0)) for parts in zip(compute, blocked, upstream, downstream, strict=True)]
    per_batch = 1 if mode == "paper" else pipelines
    growth = growth or [Fraction(1)] * len(measured.ranks)
    memory = [
        _memory_bytes(rank, n, degrees, denser, mode, more) for rank, more in zip(measured.ranks, growth, strict=True)
    ]
    return Prediction(
        tuple(compute),
        tuple(transfer),
        tuple(blocked),
        tuple(upstream),
        tuple(downstream),
        tuple(time / per_batch for time in total),
        tuple(memory),
    )


def _overused_ns(rank: Rank, denser: Fraction) -> Fraction:
    """Compute the integral of max(denser φ(t) - 1, 0) dt over the computing time (equation 2, figure 8)."""
    slices = len(rank.utilisation_ppm)
    over = sum(max(denser * share - MILLION, Fraction(0)) for share in rank.utilisation_ppm)
    return Fraction(rank.compute_ns, slices) * over / MILLION


def _memory_bytes(rank: Rank, n: int, degrees: Degrees, denser: Fraction, mode: Mode, more: Fraction) -> Fraction:
    """Compute equation 8; in mode ``wall`` the reference model counts once (R-34)."""
    if mode == "paper":
        models = Fraction(degrees.num_pipelines, n) * (n * rank.parallel_bytes + rank.reference_bytes)
        return models + denser * rank.data_bytes
    models = Fraction(degrees.num_pipelines * rank.parallel_bytes + rank.reference_bytes)
    return models + denser * more * rank.data_bytes


def choose(predictions: Iterable[tuple[Degrees, Prediction]], capacity_bytes: Sequence[int]) -> list[Degrees]:
    """Return the settings that fit on every GPU, the fastest first.

    Ties go to fewer pipelines, then to fewer micro-batches.
    """
    fitting = [
        (prediction.time_ns, degrees.num_pipelines, degrees.num_micro_batches, degrees)
        for degrees, prediction in predictions
        if all(need <= have for need, have in zip(prediction.memory_bytes, capacity_bytes, strict=True))
    ]
    return [degrees for _time, _pipelines, _batches, degrees in sorted(fitting)]
