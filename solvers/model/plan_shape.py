"""A plan's pipelines, stages and devices in words: the same wording for every headline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence

from penstock.solvers.model.allocation import Stage


def shape(pipelines: Sequence[Sequence[Collection[Hashable]]]) -> str:
    """Return ``4 stages on 8 devices``, ``data parallelism over 8 devices`` or ``2 pipelines side by side on …``.

    ``pipelines``: the devices of each stage of each pipeline, under any names.
    """
    devices = {device for stages in pipelines for held in stages for device in held}
    where = "one device" if len(devices) == 1 else f"{len(devices):,} devices"
    if is_data_parallel(pipelines):
        if len(devices) == 1:
            return where
        if len(pipelines) == 1:
            return f"data parallelism over {where}"
        own = "each a pipeline of its own" if len(pipelines) == len(devices) else f"in {len(pipelines)} groups"
        return f"data parallelism over {where}, {own}"
    counts = sorted({len(stages) for stages in pipelines})
    stages = f"{counts[0]}{f' to {counts[-1]}' if len(counts) > 1 else ''} stage{'s' if counts[-1] > 1 else ''}"
    if len(pipelines) == 1:
        return f"{stages} on {where}"
    together = f"over the same {where.removeprefix('one ')}" if _overlap(pipelines) else f"side by side on {where}"
    return f"{len(pipelines)} pipelines {together}, {'of' if len(counts) > 1 else 'each of'} {stages}"


def is_data_parallel(pipelines: Sequence[Sequence[Collection[Hashable]]]) -> bool:
    """Return whether every device holds the whole model: pipelines of one stage, none of which shares a device."""
    return all(len(stages) == 1 for stages in pipelines) and not _overlap(pipelines)


def micro_batches(number: int, rows: int) -> str:
    """Return ``8 micro-batches of at most 4 samples``; for a single one, its exact size."""
    samples = f"{rows:,} sample{'' if rows == 1 else 's'}"
    return f"one micro-batch of {samples}" if number == 1 else f"{number:,} micro-batches of at most {samples}"


def recomputing(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return how many stages recompute, and what if not whole layers: ``3 of them recomputing``, ``2 … norm``."""
    found = Counter(" and ".join(stage.modules) for stage in stages if stage.recomputes)
    return tuple(f"{number} of them recomputing{what and ' '}{what}" for what, number in found.items())


def layers(first: int, last: int, names: Sequence[str] | None = None) -> str:
    """Return ``layers 3–5 (a … c)`` or ``layer 3 (a)``; without ``names``, only the numbers."""
    if first == last:
        return f"layer {first}" + ("" if names is None else f" ({names[first]})")
    return f"layers {first}–{last}" + ("" if names is None else f" ({names[first]} … {names[last]})")


def layers_need(first: int, last: int, names: Sequence[str] | None = None) -> str:
    """Return ``layers 3–5 (a … c) need`` or ``layer 3 (a) needs``."""
    return f"{layers(first, last, names)} {'needs' if first == last else 'need'}"


def _overlap(pipelines: Sequence[Sequence[Collection[Hashable]]]) -> bool:
    """Return whether a device belongs to several pipelines."""
    every = [device for stages in pipelines for device in {device for held in stages for device in held}]
    return len(every) > len(set(every))
