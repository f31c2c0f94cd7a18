"""A plan's pipelines, stages and devices in words: the same wording for every headline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence

from penstock.solvers.model.allocation import Stage

MOST_LISTED = 4
"""The largest number of stages whose devices are listed; longer rows of numbers are no words."""


def shape(pipelines: Sequence[Sequence[Collection[Hashable]]], cell: int = 1, degrees: str = "") -> str:
    """Return ``4 stages on 8 devices``, ``data parallelism over 8 devices`` or ``2 pipelines side by side on …``.

    ``pipelines``: the devices of each stage of each pipeline, under any names. Where a replica of a stage is a cell of
    several devices, with ``degrees`` such as TP 4 in words: ``4 stages × 2 replicas × TP 4 on 32 devices``.
    """
    devices = {device for stages in pipelines for stage in stages for device in stage}
    where = "one device" if len(devices) == 1 else f"{len(devices):,} devices"
    replicas = {len(stage) // cell for stages in pipelines for stage in stages}
    in_turn = f", {len(pipelines[0]):,} parts of the model in turn" if are_in_turn(pipelines) else ""
    if cell > 1 and len(pipelines) == len(replicas) == 1:
        counts = ((1 if in_turn else len(pipelines[0]), "stages"), (min(replicas), "replicas"))
        every = " × ".join([*(f"{number:,} {what}" for number, what in counts if number > 1), degrees])
        return f"{every} on {where}{in_turn}"
    if cell > 1:
        where = f"{len(devices) // cell:,} cells of {degrees} ({where})"
    if in_turn:
        return f"{where if len(devices) == 1 else f'data parallelism over {where}'}{in_turn}"
    if is_data_parallel(pipelines):
        if len(devices) == 1:
            return where
        if len(pipelines) == 1:
            return f"data parallelism over {where}"
        arrangement = (
            "each a pipeline of its own" if len(pipelines) * cell == len(devices) else f"in {len(pipelines):,} groups"
        )
        return f"data parallelism over {where}, {arrangement}"
    counts_of_stages = sorted({len(stages) for stages in pipelines})
    low, high = counts_of_stages[0], counts_of_stages[-1]
    stages = f"{low}{f' to {high}' if high > low else ''} stage{'s' if high > 1 else ''}"
    if len(pipelines) == 1:
        return f"{stages} on {where}"
    together = f"over the same {where.removeprefix('one ')}" if _overlap(pipelines) else f"side by side on {where}"
    return f"{len(pipelines)} pipelines {together}, {'of' if high > low else 'each of'} {stages}"


def are_in_turn(pipelines: Sequence[Sequence[Collection[Hashable]]]) -> bool:
    """Return whether the stages of one pipeline are on the same devices, which is data parallelism by parts."""
    return len(pipelines) == 1 < len(pipelines[0]) and len(set(map(frozenset, pipelines[0]))) == 1


def is_data_parallel(pipelines: Sequence[Sequence[Collection[Hashable]]]) -> bool:
    """Return whether every device holds the whole model: pipelines of one stage, none of which shares a device."""
    return all(len(stages) == 1 for stages in pipelines) and not _overlap(pipelines)


def in_words(numbers: Sequence[int]) -> str:
    """Return ``8 each``, of at most ``MOST_LISTED`` numbers ``9:7``, and of more ``2 to 5``."""
    low, high = min(numbers), max(numbers)
    if low == high:
        return f"{low:,} each" if len(numbers) > 1 else f"{low:,}"
    return ":".join(map(str, numbers)) if len(numbers) <= MOST_LISTED else f"{low:,} to {high:,}"


def micro_batches(number: int, rows: int) -> str:
    """Return ``8 micro-batches of at most 4 samples``; for a single one, its exact size."""
    samples = f"{rows:,} sample{'' if rows == 1 else 's'}"
    return f"one micro-batch of {samples}" if number == 1 else f"{number:,} micro-batches of at most {samples}"


def recomputing(stages: Sequence[Stage]) -> tuple[str, ...]:
    """Return how many stages recompute, and the modules if not whole layers: ``3 of them recomputing``, ``2 … norm``.

    For one stage alone no number is given.
    """
    counts = Counter(" and ".join(stage.modules) for stage in stages if stage.recomputes)
    what = {each: "recomputing" + (each and f" {each}") for each in counts}
    return tuple(what[each] if len(stages) == 1 else f"{counts[each]} of them {what[each]}" for each in counts)


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
    every = [device for stages in pipelines for device in {device for stage in stages for device in stage}]
    return len(every) > len(set(every))
