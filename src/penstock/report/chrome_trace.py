"""Pictures as Chrome trace events, for chrome://tracing and Perfetto.

A prediction alone is a process per device with two threads each. With a measurement it is one of two processes,
"predicted" and "measured", whose threads are the same lanes; arrows follow each message from its sender.

.. [1] Trace Event Format, Google: complete ("X"), counter ("C"), flow ("s", "f") and metadata ("M") events.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from penstock.report.drawing.folding import folded
from penstock.report.drawing.picture import NAMES, TIED, Blocks, Picture, last_traces, picture_of_trace
from penstock.schemas.plan import Plan
from penstock.schemas.trace import RankTrace, Trace

PREDICTED, MEASURED = 0, 1
_THREADS = ("compute", "communication")
_MESSAGE = re.compile(r"(\d+)SEND_([FB])(\d+)")
_COMPUTATION = re.compile(r"(\d+)([FBI])(\d+)")


def write_chrome_trace(picture: Picture, path: Path) -> None:
    """Write a prediction; times are microseconds with three decimals, as the format requires."""
    write_events(chrome_events(picture), path)


def write_events(events: Iterable[dict[str, Any]], path: Path) -> None:
    """Write the document that holds the events."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        file.write("\n]}\n")


def compared_events(predicted: Picture, trace: Trace, plan: Plan) -> Iterator[dict[str, Any]]:
    """Return prediction and measurement as two processes, with a pair of threads per stage's device or rank."""
    measured = picture_of_trace(trace, plan)
    for process, name, picture in ((PREDICTED, "predicted", predicted), (MEASURED, "measured", measured)):
        yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
        for number, lane in enumerate(picture.lanes):
            strip = picture.strips[lane.strip]
            who = f"{lane.device} [{', '.join(map(str, lane.stages))}]"
            for k, blocks in enumerate((strip.compute, strip.communication)):
                thread = 2 * number + k
                name = f"{who} {_THREADS[k]}"
                yield {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
                yield {
                    "name": "thread_sort_index",
                    "ph": "M",
                    "pid": process,
                    "tid": thread,
                    "args": {"sort_index": thread},
                }
                yield from _complete(blocks, process, thread)
    yield from _flows(last_traces(trace))


def _flows(ranks: list[RankTrace]) -> Iterator[dict[str, Any]]:
    """Return an arrow from each send to the computation that receives it."""
    readers: dict[tuple[int, str, int], list[tuple[int, int]]] = defaultdict(list)
    for number, rank in enumerate(ranks):
        for event in rank.events:
            if (match := _COMPUTATION.fullmatch(event.instruction)) is not None:
                kind = "F" if match[2] == "F" else "B"
                readers[int(match[1]), kind, int(match[3])].append((number, event.start_ns))
    ids = count()
    for number, rank in enumerate(ranks):
        for event in rank.events:
            if (match := _MESSAGE.fullmatch(event.instruction)) is None:
                continue
            other = int(match[1]) + (1 if match[2] == "F" else -1)
            for reader, start_ns in readers[other, match[2], int(match[3])]:
                if reader != number:
                    ends = ("s", 2 * number + 1, event.start_ns), ("f", 2 * reader, max(start_ns, event.start_ns))
                    yield from _arrow(f"{match[2]}{match[3]}", next(ids), ends)


def _arrow(name: str, number: int, ends: Iterable[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    for phase, thread, time_ns in ends:
        yield {
            "name": name,
            "cat": "message",
            "ph": phase,
            "id": number,
            "pid": MEASURED,
            "tid": thread,
            "ts": time_ns / 1000,
            **({"bp": "e"} if phase == "f" else {}),
        }


def chrome_events(picture: Picture) -> Iterator[dict[str, Any]]:
    """Return metadata, complete events of computation (thread 0) and communication (thread 1), and memory counters.

    Where there are many devices, those with the same order share a process.
    """
    picture = folded(picture).picture
    for process, lane in enumerate(picture.lanes):
        yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": lane.device}}
        yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
        strip = picture.strips[lane.strip]
        for thread, (name, blocks) in enumerate(zip(_THREADS, (strip.compute, strip.communication), strict=True)):
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
            "name": f"{letter}{number}" if number >= 0 else "tied sum" if number == TIED else letter,
            "cat": NAMES[letter],
            "ph": "X",
            "pid": process,
            "tid": thread,
            "ts": start / 1000,
            "dur": length / 1000,
            "args": {"stage": int(blocks.stage[i])},
        }
