"""Refusal of calibrations that would spoil a profile: runs on other hardware, and factors that are hardly true."""

from __future__ import annotations

from math import log

from penstock.calibration.comparing import hardware_name
from penstock.facts.device_table import CPU, DEVICES, is_other_hardware
from penstock.schemas.amounts import duration
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.trace import Trace
from penstock.solvers.model.problem import Problem

LARGEST_FACTOR = 3.0
"""The largest factor on costs, either way, that a calibration accepts by default.

Published runs in FP8 and FP4 are within 2.38 of computed profiles in 16 bits; four ranks on two cores at load 4 were
3.7 times too slow.
"""


def refuse_other_hardware(trace: Trace, problem: Problem) -> None:
    """Raise UnsupportedRequest where ranks computed on hardware that the profile's costs are certainly not for."""
    kinds = {device.name: device.kind for device in problem.devices}
    for rank in trace.ranks:
        if rank.hardware is None or rank.device not in kinds:
            continue
        planned, kind = kinds[rank.device], rank.hardware.kind
        source, _ = problem.kind_source[planned]
        scaled_to_cpu = kind == CPU and planned != CPU and is_other_hardware(source, CPU)
        if not is_other_hardware(planned, kind) and not scaled_to_cpu:
            continue
        remedy = f"calibrate from a run on {source}, or measure a profile on {kind} with `penstock profile`"
        if kind != CPU and kind not in DEVICES:
            remedy += f"; if {kind} is {source} by another name, plan with topology.kinds: "
            remedy += f"[{{name: {kind}, scale_from: {source}, speed: 1.0}}]"
        raise UnsupportedRequest(
            f"rank {rank.rank} of the trace computed on {hardware_name(rank.hardware)}, but the costs of the profile "
            f"are for {source}",
            remedy=remedy,
        )


def is_large(factor: float) -> bool:
    """Return whether a factor on costs is larger than ``LARGEST_FACTOR``, or smaller than one over it."""
    return abs(log(factor)) > log(LARGEST_FACTOR)


def refuse_large(factor: float, measured_ns: int, predicted_ns: int, note: str | None) -> None:
    """Raise UnsupportedRequest for a factor that is hardly true. ``note``: what the run recorded of its machine."""
    if not is_large(factor):
        return
    causes = note or "possible causes are a busy machine, more ranks than cores, or other hardware"
    raise UnsupportedRequest(
        f"costs would change by a factor of {factor:.3g}, beyond the limit of {LARGEST_FACTOR:g}: the run took "
        f"{duration(measured_ns)} per global batch instead of {duration(predicted_ns)}; {causes}",
        remedy="run the plan on free hardware of the profile's kind, or accept the factor: --any-factor "
        "(any_factor of a request)",
    )


def with_factor_stated(profile: ModelProfile, factor: float) -> ModelProfile:
    """Return the profile with a large factor in its assumptions, and an expected error that is no smaller than it."""
    if not is_large(factor):
        return profile
    error = max(profile.source.expected_error, min(1.0, round(abs(factor - 1), 4)))
    text = (
        f"costs changed by a factor of {factor:.3g} in a calibration, beyond {LARGEST_FACTOR:g}, which was accepted: "
        "the run may have been on a busy machine or on other hardware"
    )
    source = profile.source.model_copy(update={"expected_error": error})
    return profile.model_copy(update={"source": source, "assumptions": (*profile.assumptions, text)})
