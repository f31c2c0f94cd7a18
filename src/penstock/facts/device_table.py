"""Rates of devices for analytic profiles: peaks from data sheets, efficiencies stated.

The table of ``penstock.importers.cluster.hardware`` has their memory and their links.

Peaks are dense (no sparsity), without TensorFloat-32 for fp32, as PyTorch multiplies matrices by default:

* GTX 1080Ti: NVIDIA GeForce GTX 1080 Ti specification; 11.34 TFLOP/s at boost clock, fp16 at 1/64 of it, 484 GB/s.
* V100: Tesla V100 data sheet (SXM2): 15.7 TFLOP/s fp32, 125 fp16 on tensor cores, 900 GB/s. No bf16: costed as fp32.
* A100: A100 80GB data sheet (SXM4): 19.5 TFLOP/s fp32, 312 bf16 and fp16, 2,039 GB/s.
* H100: H100 data sheet (SXM5): 67 TFLOP/s fp32, 989 bf16 and fp16, 3,350 GB/s.
* H200: H200 data sheet (SXM): the compute of the H100, 4,800 GB/s.
* H20: as its resellers list it: 44 TFLOP/s fp32, 148 bf16 and fp16, 4,000 GB/s.
* B200, B300: HGX B200 and HGX B300 specifications, an eighth of the board: 75 TFLOP/s fp32, 2,250 bf16 and fp16 (36
  PFLOP/s with sparsity), 8,000 GB/s.
* GB200, GB300: NVL72 specifications, one of 72: 80 TFLOP/s fp32, 2,500 bf16 and fp16 (360 PFLOP/s with sparsity), 8,000
  GB/s.

Efficiency is the part of a peak that training reaches in a large layer; it is stated, not fitted to any plan here.
fp32 on a V100: DAPPLE's own profile of BERT-48 (2.69 ms for one layer's forward of 2 × 528 tokens, 28.9 GFLOP) is
0.68 of the peak, PipeDream's of VGG-16 0.56. Tensor cores reach 0.35 to 0.55 of theirs in published training runs
(Megatron-LM on A100: 0.44 to 0.52; LLaMA 3, section 3.3, on H100: 0.38 to 0.43). Memory: about 0.8 of the peak, as in
STREAM-like kernels. On B200 both are SimuMax's (release 1.2, Apache-2.0) measurements of single kernels: 0.51 of the
peak in matrix products (its whole steps show 0.47), 0.67 in element-wise ones. Predictions made from the table
are stated to be within 35 %, and within 40 % for a kind without measurements that is taken to be like another one.

These efficiencies are the level ``runs``. The level ``kernels`` has the efficiencies of kernels measured one by one,
for the kinds with such measurements. By default a kind has the level that is nearer to published runs in 16 bits of the
framework (`usual_level`; docs/benchmarks.md has the errors of both). H100's is our measurement
(``benchmarks/measured``, docs/benchmarks.md), fp16 taken to be as quick as bf16. H200 has the same processors, so that
kernels bound by arithmetic are as quick; those bound by memory are taken to reach the same part of its bandwidth.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.schemas.errors import UnknownName, meant
from penstock.schemas.transformers.degrees import Framework

Dtype = Literal["fp32", "bf16", "fp16"]
CPU = "cpu"
"""The kind of a processor, of which the table has no facts."""
Level = Literal["runs", "kernels"]
"""The scope of efficiencies: whole training runs, or kernels measured one by one."""

LEVELS: tuple[Level, ...] = ("runs", "kernels")
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", "fp16")
ANALYTIC_EXPECTED_ERROR = 0.35
"""The error within which 80 % of published runs in 16 bits lie, those with many experts apart (docs/benchmarks.md)."""
EXTRAPOLATED_EXPECTED_ERROR = 0.4
"""The error of kinds that are taken to be like another one."""
MANY_EXPERTS_EXPECTED_ERROR = 0.65
"""The error of experts in several nodes, or on more than `MOST_EXPERT_GPUS`: such published runs took up to 2.6 times
as long as predicted."""
MOST_EXPERT_GPUS = 8
"""The GPUs among which exchanges of tokens were measured, at most."""
_TERA = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One kind of device. ``compute_efficiency`` and ``memory_efficiency`` are parts of the peaks, in (0, 1].

    ``like``: the kind whose efficiencies these are, where the kind has no measurements.
    """

    kind: str
    peak_flops_per_s: dict[Dtype, int]
    compute_efficiency: dict[Dtype, float]
    memory_bandwidth_bytes_per_s: int
    memory_efficiency: float
    launch_ns: int
    like: str | None = None
    level: Level = "runs"

    @property
    def expected_error(self) -> float:
        """The error of predictions as stated."""
        return ANALYTIC_EXPECTED_ERROR if self.like is None else EXTRAPOLATED_EXPECTED_ERROR

    def flops_per_s(self, dtype: Dtype) -> float:
        """Return the floating-point operations a second that a large layer reaches."""
        return self.peak_flops_per_s[dtype] * self.compute_efficiency[dtype]

    def bytes_per_s(self) -> float:
        """Return the bytes of device memory a second that a large kernel reads or writes."""
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency


def usual_level(kind: str, framework: Framework) -> Level:
    """Return the level that is nearer to published 16-bit runs of a framework on a kind."""
    return "kernels" if framework == "megatron" and kind in _RUN_AS_MEASURED else "runs"


def device_facts(kind: str, level: Level | None = None, framework: Framework = "torch") -> DeviceFacts:
    """Return the device called ``kind``, at the usual level of the framework where no level is named.

    Raises UnknownName naming the kinds that exist, or the kinds that have the level.
    """
    level = level or usual_level(kind, framework)
    if kind in DEVICES and level == "kernels":
        if kind not in MEASURED:
            raise UnknownName(
                f"the device table has no level 'kernels' of {kind}, only of {', '.join(MEASURED)}",
                remedy="name one of these kinds, or leave out the level",
            )
        return MEASURED[kind]
    if kind not in DEVICES:
        remedy = meant(kind.upper(), DEVICES, "measure a profile on the device instead", likeness=0.4)
        raise UnknownName(f"no device kind {kind!r} in the table; it has {', '.join(DEVICES)}", remedy=remedy)
    return DEVICES[kind]


def is_other_hardware(planned: str, kind: str) -> bool:
    """Return whether costs of the kind ``planned`` are certainly wrong for a device of ``kind``.

    ``8xH100-tp8`` is an H100. A name without a kind of the table may be anything: topologies name kinds as they like.
    """
    if planned in (kind, CPU) or planned in DEVICES:
        return planned != kind
    names = [name for name in DEVICES if name.lower() in planned.lower()]
    return bool(names) and kind not in names


def assumed_level(kinds: Sequence[str], level: Level | None, framework: Framework = "torch") -> tuple[str, ...]:
    """Return the assumptions of a profile whose times are not at the level of whole runs."""
    measured = [kind for kind in kinds if (level or usual_level(kind, framework)) == "kernels"]
    if not measured:
        return ()
    ratios = [
        device_facts(kind, "kernels").flops_per_s("bf16") / DEVICES[kind].flops_per_s("bf16") for kind in measured
    ]
    pace = [f"{ratio:.2f} times as quick on {kind}" for ratio, kind in zip(ratios, measured, strict=True)]
    why = (
        "and what runs lose besides is not in them"
        if level is not None
        else "as published runs of Megatron-Core are nearer to these"
    )
    return (
        f"times are of kernels measured one by one: large products are {', '.join(pace)} as in the table of whole runs,"
        f" {why}",
    )


def _facts(
    kind: str,
    *,
    tera: tuple[float, float, float],
    efficiency: tuple[float, float, float],
    bandwidth_gb_per_s: int,
    memory_efficiency: float = 0.8,
) -> DeviceFacts:
    return DeviceFacts(
        kind=kind,
        peak_flops_per_s=_peaks(tera),
        compute_efficiency=dict(zip(DTYPES, efficiency, strict=True)),
        memory_bandwidth_bytes_per_s=bandwidth_gb_per_s * 10**9,
        memory_efficiency=memory_efficiency,
        launch_ns=5_000,
    )


def _of_kernels(facts: DeviceFacts) -> DeviceFacts:
    """Return facts with kernels' efficiencies on one H100, for it or for a kind of the same processors."""
    efficiency: dict[Dtype, float] = {"fp32": 0.78, "bf16": 0.83, "fp16": 0.83}
    return replace(facts, compute_efficiency=efficiency, memory_efficiency=0.9, launch_ns=3_000)


def _like(source: DeviceFacts, kind: str, *, tera: tuple[float, float, float], bandwidth_gb_per_s: int) -> DeviceFacts:
    """Return a kind with separate peaks and the efficiencies of another one."""
    bandwidth = bandwidth_gb_per_s * 10**9
    return replace(
        source, kind=kind, like=source.kind, peak_flops_per_s=_peaks(tera), memory_bandwidth_bytes_per_s=bandwidth
    )


def _peaks(tera: tuple[float, float, float]) -> dict[Dtype, int]:
    return {dtype: round(peak * _TERA) for dtype, peak in zip(DTYPES, tera, strict=True)}


_GTX1080TI = _facts("GTX1080Ti", tera=(11.34, 11.34, 0.177), efficiency=(0.6, 0.6, 0.8), bandwidth_gb_per_s=484)
_V100 = _facts("V100", tera=(15.7, 15.7, 125), efficiency=(0.6, 0.6, 0.4), bandwidth_gb_per_s=900)
_A100 = _facts("A100", tera=(19.5, 312, 312), efficiency=(0.7, 0.5, 0.5), bandwidth_gb_per_s=2039)
_H100 = _facts("H100", tera=(67, 989, 989), efficiency=(0.6, 0.45, 0.45), bandwidth_gb_per_s=3350)
_H200 = _facts("H200", tera=(67, 989, 989), efficiency=(0.6, 0.45, 0.45), bandwidth_gb_per_s=4800)
_B200 = _facts(
    "B200", tera=(75, 2250, 2250), efficiency=(0.6, 0.51, 0.51), bandwidth_gb_per_s=8000, memory_efficiency=0.67
)
DEVICES: dict[str, DeviceFacts] = {
    facts.kind: facts
    for facts in (
        _GTX1080TI,
        _V100,
        _A100,
        _H100,
        _H200,
        _like(_H100, "H20", tera=(44, 148, 148), bandwidth_gb_per_s=4000),
        _B200,
        _like(_B200, "B300", tera=(75, 2250, 2250), bandwidth_gb_per_s=8000),
        _like(_B200, "GB200", tera=(80, 2500, 2500), bandwidth_gb_per_s=8000),
        _like(_B200, "GB300", tera=(80, 2500, 2500), bandwidth_gb_per_s=8000),
    )
}
MEASURED: dict[str, DeviceFacts] = {
    facts.kind: replace(facts, level="kernels")
    for facts in (
        _of_kernels(_H100),
        _of_kernels(replace(_H200, like="H100")),
        *(DEVICES[kind] for kind in ("B200", "B300", "GB200", "GB300")),
    )
}
"""Facts at the level of kernels measured one by one; B200 and its kin have the same in ``DEVICES``."""
_RUN_AS_MEASURED = ("H100", "H200")
"""Kinds on which Megatron-Core's published runs are nearer to the level ``kernels``."""
PROFILED = ("GTX1080Ti", "V100", "A100", "H100", "H200", "B200")
"""The kinds that shipped profiles have costs for."""
SCALED_FROM = "H100"
"""The kind from which B200 is scaled where a profile lacks it."""
