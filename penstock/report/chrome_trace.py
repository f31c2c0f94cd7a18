"""A picture as Chrome trace events, for chrome://tracing and Perfetto: a process per device, two threads each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.report.picture import NAMES, Blocks, Picture


def write_chrome_trace(picture: Picture, path: Path) -> None:
    """Write the events; times are microseconds with three decimals, as the format wants them."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in chrome_events(picture)))
        file.write("\n]}\n")


def chrome_events(picture: Picture) -> Iterator[dict[str, Any]]:
    """Metadata, complete events of computation (thread 0) and communication (thread 1), and memory counters."""
    for process, lane in enumerate(picture.lanes):
        yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": lane.device}}
        yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
        strip = picture.strips[lane.strip]
        for thread, (name, blocks) in enumerate((("compute", strip.compute), ("communication", strip.communication))):
            yield {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
            yield from _complete(blocks, process, thread)
        for time_ns, size in zip(lane.times_ns.tolist(), lane.memory_bytes.tolist(), strict=True):
            yield {"name": "memory", "ph": "C", "pid": process, "ts": time_ns / 1000, "args": {"bytes": size}}


def _complete(blocks: Blocks, process: int, thread: int) -> Iterator[dict[str, Any]]:
    for i in range(len(blocks)):
        letter = blocks.letters[blocks.kind[i]]
        start, length = int(blocks.start_ns[i]), int(blocks.end_ns[i] - blocks.start_ns[i])
        number = int(blocks.number[i])
        yield {
            "name": f"{letter}{number}" if number >= 0 else letter,
            "cat": NAMES[letter],
            "ph": "X",
            "pid": process,
            "tid": thread,
            "ts": start / 1000,
            "dur": length / 1000,
            "args": {"stage": int(blocks.stage[i])},
        }
