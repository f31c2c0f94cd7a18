"""Numbers as text, three digits and a suitable unit; and what a stage recomputes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.schemas.amounts import amount, three_digits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.schemas.api.jobs import Alternative, PlanComparison
    from penstock.schemas.api.sweep import SweepRow
    from penstock.schemas.plan import Stage

__all__ = [
    "alternative_words",
    "amount",
    "choice_words",
    "chosen_words",
    "duration",
    "number",
    "percent",
    "ranges",
    "recomputed",
]


def number(value: float | str, form: str) -> str:
    """Format a number such as a loss; a text stays: ``NaN``."""
    return value if isinstance(value, str) else format(value, form)


def duration(nanoseconds: float) -> str:
    """Format a duration: ``12.3 ms``."""
    size = abs(nanoseconds)
    if size < 1e3:
        return f"{nanoseconds:.0f} ns"
    for limit, unit, scale in ((1e6, "µs", 1e3), (1e9, "ms", 1e6)):
        if size < limit * 0.9995:
            return f"{three_digits(nanoseconds / scale)} {unit}"
    return f"{three_digits(nanoseconds / 1e9)} s"


def percent(share: float) -> str:
    """Format a share: ``4.2 %``."""
    return f"{100 * share:.1f} %" if abs(share) < 0.9995 else f"{100 * share:.0f} %"


def ranges(numbers: tuple[int, int]) -> str:
    """Format a range: ``3–7``, or ``3`` where both ends are equal."""
    first, last = numbers
    return str(first) if first == last else f"{first}–{last}"


def recomputed(stage: Stage) -> str:
    """Return what a stage recomputes: ``none``, ``full``, ``3 of 8 layers``, ``mlp and norm``."""
    if isinstance(stage.recompute, str):
        return stage.recompute
    if isinstance(stage.recompute, tuple):
        (first, last), held = stage.layers, stage.recompute
        return f"{sum(high - low + 1 for low, high in held)} of {last - first + 1} layers"
    return " and ".join(stage.recompute.modules)


def chosen_words(chosen: Mapping[str, str] | None) -> list[str]:
    """Format values of further axes: ``optimizer sgd``."""
    return [f"{name} {value}" for name, value in (chosen or {}).items()]


def alternative_words(row: Alternative) -> str:
    """Format a choice that was compared: ``TP 8, optimizer sharded``; ``all but V100``."""
    shared = "" if row.sharding in (None, "none") else f"{row.sharding.replace('_kept', '')} sharded"
    words = [
        row.degrees.initials,
        shared,
        *chosen_words(row.chosen),
        "" if row.excluded is None else f"all but {row.excluded}",
    ]
    return ", ".join(filter(None, words)) or "no GPUs share a layer"


def choice_words(row: PlanComparison | SweepRow) -> str:
    """Format what a plan chose: ``TP 8 × 4 stages, optimizer sharded``; a dash where there is no plan."""
    if row.stages is None:
        return "–"
    initials = [row.degrees.initials] if row.degrees is not None and row.degrees.initials else []
    shared = [] if row.sharding in (None, "none") else [f"{row.sharding.replace('_kept', '')} sharded"]
    stages = " × ".join([*initials, f"{row.stages} stage{'s' if row.stages > 1 else ''}"])
    return ", ".join([stages, *shared, *chosen_words(row.chosen)])
