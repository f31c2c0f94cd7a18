"""Traces, the measurements of ranks, as documents. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def rank_trace(
    *,
    rank: int,
    device: str,
    step: int,
    instructions: Sequence[object],
    events: Sequence[int],
    shift_ns: int,
    peak_memory_bytes: int | None = None,
    batches: int = 1,
    clock_error_ns: int = 0,
    hardware: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build a ``schemas.trace.RankTrace`` as JSON.

    ``events``: start and end of each instruction, in order; ``shift_ns`` is added to all. ``clock_error_ns``: their
    largest error against the common clock.
    """
    return {
        "rank": rank,
        "device": device,
        "step": step,
        "events": [
            {
                "instruction": str(instruction).partition("@")[0],
                "start_ns": max(0, events[2 * i] + shift_ns),
                "end_ns": max(0, events[2 * i + 1] + shift_ns),
            }
            for i, instruction in enumerate(instructions)
        ],
        "peak_memory_bytes": peak_memory_bytes,
        "batches": batches,
        "clock_error_ns": clock_error_ns,
        "hardware": hardware,
    }
