"""Which kernels of a profile lie outside what the rules of `primitives` were fitted to, and what is known of these.

A kernel outside is timed by the same rule, extrapolated; the profile says so, and by how much the rule is off where
somebody measured such a kernel.
"""

from __future__ import annotations

from penstock.executor.profiling.device_table import EXTRAPOLATED_EXPECTED_ERROR, DeviceFacts, device_facts
from penstock.schemas.profile import ModelProfile
from penstock.shapes.costs import Case, costs_of
from penstock.shapes.kernels import Kernels
from penstock.shapes.layout import Layout
from penstock.shapes.primitives import ATTENTION_ROWS, GROUP_ROWS, PRODUCTS, Range

_GIGA = 1e9


class _Watched(Kernels):
    """Kernels that remember the least and the most of what rules depend on."""

    def __init__(self, known: Case, facts: DeviceFacts) -> None:
        super().__init__(facts, "fp32" if known.width == 4 else "bf16")
        self.seen: dict[Range, tuple[float, float]] = {}

    def _see(self, of: Range, value: float) -> None:
        least, most = self.seen.get(of, (value, value))
        self.seen[of] = min(least, value), max(most, value)

    def product_ns(self, rows: float, inner: float, columns: float, *, result_bytes: int | None = None) -> float:
        self._see(PRODUCTS, 2 * rows * inner * columns)
        return super().product_ns(rows, inner, columns, result_bytes=result_bytes)

    def grouped_product_ns(
        self, groups: int, rows: float, inner: float, columns: float, *, result_bytes: int | None = None
    ) -> float:
        self._see(GROUP_ROWS, min(rows, inner, columns))
        return super().grouped_product_ns(groups, rows, inner, columns, result_bytes=result_bytes)

    def attention_ns(self, flops: float, rows: float, *, backward: bool) -> float:
        self._see(ATTENTION_ROWS, rows)
        return super().attention_ns(flops, rows, backward=backward)


def with_range(profile: ModelProfile) -> ModelProfile:
    """The computed profile with what is extrapolated among its assumptions, and the error that this makes likely."""
    facts = [device_facts(kind) for kind in profile.device_kinds]
    said = [_taken_over(own) for own in facts if own.like is not None] + _outside(profile, facts[0])
    if not said:
        return profile
    error = max(EXTRAPOLATED_EXPECTED_ERROR, profile.source.expected_error)
    source = profile.source.model_copy(update={"expected_error": error})
    return profile.model_copy(update={"assumptions": (*profile.assumptions, *said), "source": source})


def _taken_over(facts: DeviceFacts) -> str:
    return f"kernels of {facts.kind} reach as much of its peaks as those of {facts.like}: nobody measured them"


def _outside(profile: ModelProfile, facts: DeviceFacts) -> list[str]:
    """A sentence for each kind of kernel that some micro-batch at some degrees has outside its range."""
    assert profile.shape is not None
    sizes = [one.micro_batch_size for one in profile.measurements]
    degrees = [{}, *(variant.degrees.model_dump() for variant in profile.variants or ())]
    seen: dict[Range, tuple[float, float]] = {}
    for size in (min(sizes), max(sizes)):
        for given in degrees:
            layout = Layout(framework=profile.framework or "torch", micro_batch_size=size, **given)
            for of, (least, most) in _seen(Case(profile.shape, layout, facts), facts).items():
                known = seen.get(of, (least, most))
                seen[of] = min(least, known[0]), max(most, known[1])
    return [sentence for of, (least, most) in seen.items() if (sentence := _said(of, least, most))]


def _seen(case: Case, facts: DeviceFacts) -> dict[Range, tuple[float, float]]:
    watched = case.kernels = _Watched(case, facts)
    costs_of(case)
    return watched.seen


def _said(of: Range, least: float, most: float) -> str | None:
    """Names the kernel farthest outside, the nearest that was measured, and the error where it is known."""
    if of.least <= least and most <= of.most:
        return None
    small = least < of.least
    beyond, nearest = (least, of.least) if small else (most, of.most)
    if of is PRODUCTS:
        known = "OpenXLA measured such on H100 and B200: they take half as long again" if small else "error unknown"
        return (
            f"matrix products of {beyond / _GIGA:,.2g} GFLOP are timed by the rule of those from "
            f"{nearest / _GIGA:,.1f} GFLOP {'on' if small else 'down'}; {known}"
        )
    what = "products of groups with" if of is GROUP_ROWS else "attention of"
    return f"{what} {beyond:,.0f} rows timed by the rule of {nearest:,.0f}, the nearest measured; error unknown"
