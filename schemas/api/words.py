"""Rows of answers in words: what a plan chose, and what its stages recompute."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.schemas.api.jobs import Alternative, PlanComparison
    from penstock.schemas.api.sweep import SweepRow
    from penstock.schemas.plan import Stage

FITS_DEGREES = {
    "TP": "tensor",
    "CP": "context",
    "EP": "expert",
    "PP": "pipeline",
    "VP": "virtual_stages",
    "DP": "data",
    "batch": "micro_batch_size",
}
"""The fields of a row of ``fits``, by the usual abbreviations."""


def recomputed(stage: Stage) -> str:
    """Return what a stage recomputes: ``none``, ``full``, ``3 of 8 layers``, ``mlp and norm``."""
    if isinstance(stage.recompute, str):
        return stage.recompute
    if isinstance(stage.recompute, tuple):
        (first, last), segments = stage.layers, stage.recompute
        return f"{sum(high - low + 1 for low, high in segments)} of {last - first + 1} layers"
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
