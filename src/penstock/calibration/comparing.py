"""The words of a comparison: predicted time against measured time, and why the two may not be comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.facts.device_table import is_other_hardware
from penstock.schemas.amounts import duration
from penstock.schemas.trace import Hardware

FAR = 2.0
"""Factor between two times from which on they are compared by a factor, not in percent."""


class Comparison(NamedTuple):
    """A comparison in words.

    ``factor``: ``3.7× the predicted 2.22 s``, of times that are far apart. ``percent``: ``-5.0 %``, of others. Both are
    None on other hardware than the plan's. ``note``: why measured times differ, one sentence.
    """

    measured_ns: float
    predicted_ns: float
    factor: str | None
    percent: str | None
    note: str | None

    def lines(self, how: str = "") -> list[str]:
        """Return the lines that a command prints; ``how``: how the measured time came about."""
        measured = f"measured   {duration(self.measured_ns)} per global batch{how}"
        lines = [measured, f"predicted  {duration(self.predicted_ns)}"]
        if self.factor is not None:
            lines = [f"{measured}, {self.factor}"]
        elif self.percent is not None:
            lines[1] += f", {self.percent} against it"
        return lines if self.note is None else [*lines, f"note       {self.note}"]

    def figures(self) -> list[tuple[str, str]]:
        """Return the figures that a page shows."""
        measured = duration(self.measured_ns)
        if self.factor is not None:
            return [("measured (median)", f"{measured}, {self.factor}")]
        figures = [("measured (median)", measured)]
        return figures if self.percent is None else [*figures, ("prediction against it", self.percent)]


def compared(predicted_ns: float, measured_ns: float, ranks: Sequence[Hardware]) -> Comparison:
    """Compare a predicted time with a measured one. ``ranks``: what ranks ran on; empty where nothing recorded it."""
    factor = percent = None
    if is_comparable(ranks):
        times = measured_ns / max(1, predicted_ns)
        if 1 / FAR <= times <= FAR:
            percent = f"{100 * (1 / times - 1):+.1f} %"
        else:
            factor = f"{times:.2g}× the predicted {duration(predicted_ns)}"
    return Comparison(measured_ns, predicted_ns, factor, percent, measured_note(ranks))


def is_comparable(ranks: Sequence[Hardware]) -> bool:
    """Return whether no rank ran on hardware that is certainly another than the plan's."""
    return not any(map(_is_other, ranks))


def measured_note(ranks: Sequence[Hardware]) -> str | None:
    """Return why measured times differ from predicted ones: other hardware, or a machine that was too busy."""
    other = next(filter(_is_other, ranks), None)
    if other is not None:
        return (
            f"ranks computed on {hardware_name(other)}, and the plan is for {other.planned_kind}: the two times cannot "
            "be compared"
        )
    causes = []
    crowded = max(ranks, key=lambda one: one.ranks / one.cores, default=None)
    if crowded is not None and crowded.ranks > crowded.cores:
        share = crowded.cpu_ns / max(1, crowded.wall_ns)
        causes.append(f"{crowded.ranks} ranks shared {_cores(crowded.cores)}, a rank had {share:.0%} of one")
    loaded = max(ranks, key=lambda one: _load(one) / one.machine_cores, default=None)
    if loaded is not None and _load(loaded) > loaded.machine_cores:
        causes.append(f"the load was {_load(loaded):.1f} on {_cores(loaded.machine_cores)}")
    return f"measured on a busy machine: {'; '.join(causes)}" if causes else None


def hardware_name(one: Hardware) -> str:
    """Return the kind and the maker's name of a device: ``cpu (Intel Xeon)``."""
    return one.kind if one.model == one.kind else f"{one.kind} ({one.model})"


def _is_other(one: Hardware) -> bool:
    return one.planned_kind is not None and is_other_hardware(one.planned_kind, one.kind)


def _load(one: Hardware) -> float:
    return max(one.load_at_start, one.load_at_end)


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"
