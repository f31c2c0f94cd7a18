"""Kernels of a profile that are smaller than any kernel to which the rules of `primitives` were fitted.

They are timed by the same rule, extrapolated. The profile says so, and by how much the rule is off where such a kernel
was measured.
"""

from __future__ import annotations

from penstock.facts.device_table import EXTRAPOLATED_EXPECTED_ERROR, DeviceFacts, Level, device_facts
from penstock.schemas.profile import ModelProfile
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of
from penstock.shapes.kernels import Kernels
from penstock.shapes.layout import Layout
from penstock.shapes.primitives import LEAST_ATTENTION_ROWS, LEAST_FLOPS, LEAST_GROUP_ROWS

_SENTENCES = {
    LEAST_FLOPS: "matrix products of {:.2g} FLOP are timed by the rule of those from {:.2g} on; where OpenXLA measured "
    "such, on H100 and B200, they take half as long again",
    LEAST_GROUP_ROWS: "products of groups of {:,.0f} rows are timed by the rule of groups from {:,.0f} on; by how much "
    "they miss it is unknown",
    LEAST_ATTENTION_ROWS: "attention of {:,.0f} rows is timed by the rule of attention from {:,.0f} on; by how much it "
    "misses it is unknown",
}


_NEGLIGIBLE = 0.05
"""The share of the time of products and attention below which small kernels, such as routers, are not named."""


class _Watched(Kernels):
    """Kernels that record the ones smaller than any measured kernel: the least of each kind, and their time."""

    def __init__(self, facts: DeviceFacts) -> None:
        super().__init__(facts, "bf16")
        self._total_ns = 0.0
        self._below: dict[float, tuple[float, float]] = {}

    def small(self) -> dict[float, float]:
        """Return the least size of each kind of kernel, by the least measured size, where such kernels take time."""
        return {
            measured: least
            for measured, (least, kernels_ns) in self._below.items()
            if kernels_ns > _NEGLIGIBLE * self._total_ns
        }

    def _seen(self, measured: float, value: float, own_ns: float) -> float:
        self._total_ns += own_ns
        if value < measured:
            least, before_ns = self._below.get(measured, (value, 0.0))
            self._below[measured] = min(value, least), before_ns + own_ns
        return own_ns

    def product_ns(self, rows: float, inner: float, columns: float, *, result_bytes: int | None = None) -> float:
        own_ns = super().product_ns(rows, inner, columns, result_bytes=result_bytes)
        return self._seen(LEAST_FLOPS, 2 * rows * inner * columns, own_ns)

    def grouped_product_ns(
        self, groups: int, rows: float, inner: float, columns: float, *, result_bytes: int | None = None
    ) -> float:
        own_ns = super().grouped_product_ns(groups, rows, inner, columns, result_bytes=result_bytes)
        return self._seen(LEAST_GROUP_ROWS, min(rows, inner, columns), own_ns)

    def attention_ns(self, flops: float, rows: float, *, backward: bool, latent: bool = False) -> float:
        return self._seen(
            LEAST_ATTENTION_ROWS, rows, super().attention_ns(flops, rows, backward=backward, latent=latent)
        )


def with_range(profile: ModelProfile, level: Level | None = None) -> ModelProfile:
    """Return the computed profile with its extrapolations among its assumptions, and a larger error where they count.

    Plans on a kind that is like another one have a larger error. A profile has it if all its kinds are like others.
    """
    facts = [device_facts(kind, level, profile.framework or "torch") for kind in profile.device_kinds]
    likenesses = [
        f"kernels of {device.kind} reach as much of its peaks as those of {device.like} do: its own are not measured"
        for device in facts
        if device.like is not None
    ]
    small = [_SENTENCES[measured].format(least, measured) for measured, least in _least(profile, facts[0]).items()]
    source = profile.source
    if small or all(device.like is not None for device in facts):
        error = max(EXTRAPOLATED_EXPECTED_ERROR, source.expected_error)
        source = source.model_copy(update={"expected_error": error})
    return profile.model_copy(update={"assumptions": (*profile.assumptions, *likenesses, *small), "source": source})


def _least(profile: ModelProfile, facts: DeviceFacts) -> dict[float, float]:
    """Return the least size of each kind of kernel that is smaller than any measured kernel, over all degrees."""
    assert profile.shape is not None
    size = min(one.micro_batch_size for one in profile.measurements)
    smallest: dict[float, float] = {}
    for degrees in ({}, *(variant.degrees.model_dump() for variant in profile.variants or ())):
        layout = Layout(framework=profile.framework or "torch", micro_batch_size=size, **degrees)
        case = Case(profile.shape, layout, facts)
        case.kernels = watched = _Watched(facts)
        costs_of(case)
        for measured, least in watched.small().items():
            smallest[measured] = min(least, smallest.get(measured, least))
    return smallest
