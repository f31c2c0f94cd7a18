"""Traces: what ranks measured, as documents and in Chrome's format. Loads no torch.

.. [1] Trace Event Format, Google: complete events ("ph": "X") in microseconds, one lane per "tid".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.schemas.trace import Trace

Row = tuple[str, str, int, int]
"""Name, lane, start and end (ns)."""

_COLOURS = {"F": "thread_state_running", "B": "rail_response", "I": "rail_animation", "W": "rail_idle", "R": "yellow"}


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
) -> dict[str, Any]:
    """A ``schemas.trace.RankTrace`` as JSON.

    ``events``: start and end of each instruction, in order; ``shift_ns`` is added to all. ``clock_error_ns``: how far
    they are off the common clock at most.
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
    }


def trace_rows(trace: Trace, step: int | None = None) -> list[Row]:
    """The events of one step (default: the last that was traced) for ``chrome_trace``, a lane per rank."""
    steps = {one.step for one in trace.ranks}
    chosen = max(steps, default=0) if step is None else step
    return [
        (event.instruction, f"rank {one.rank} · {one.device}", event.start_ns, event.end_ns)
        for one in trace.ranks
        if one.step == chosen
        for event in one.events
    ]


def chrome_trace(rows: Iterable[Row]) -> dict[str, Any]:
    """A document for chrome://tracing and Perfetto; lanes in the order in which they occur first."""
    lanes: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for name, lane, start_ns, end_ns in rows:
        number = lanes.setdefault(lane, len(lanes))
        kind = name.lstrip("0123456789").rstrip("0123456789")
        event = {
            "name": name,
            "cat": kind,
            "ph": "X",
            "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "pid": 0,
            "tid": number,
        }
        if kind in _COLOURS:
            event["cname"] = _COLOURS[kind]
        events.append(event)
    names = []
    for lane, number in lanes.items():
        names.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}})
        names.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": number, "args": {"sort_index": number}})
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}
