"""``penstock explain`` in the terminal: sentences, the critical path, the bubble, what would help, another layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.show import rich_table
from penstock.report.explained import (
    SPANS,
    as_sentence,
    changes_table,
    idle_table,
    in_words,
    layout_table,
    segments_table,
    share_name,
    what_ifs_table,
    why_not_table,
)
from penstock.schemas.amounts import duration, percent

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api import explanation as wire

USUAL = "default"
"""The name of the usual table of what-ifs, and of the usual comparison, here and in the service."""
MAX_SEGMENTS = 16
MAX_IDLE = 16


def layout_of(
    cuts: str | None, replicas: str | None, devices: str | None, schedule: str | None, micro_batches: int | None
) -> dict[str, Any] | None:
    """Return the layout that options describe; None without ``--cuts``.

    Raises typer.BadParameter for options that need ``--cuts``, and for values that are no numbers.
    """
    if cuts is None:
        if any(option is not None for option in (replicas, devices, schedule, micro_batches)):
            raise typer.BadParameter("a layout needs its cuts", param_hint="--cuts")
        return None
    if micro_batches is not None and micro_batches < 1:
        raise typer.BadParameter(f"{micro_batches} is not a number of micro-batches", param_hint="--micro-batches")
    return {
        "cuts": _parts(cuts),
        "replicas": [_number(text) for text in _parts(replicas or "")],
        "devices": [_parts(stage) for stage in devices.split(";")] if devices else [],
        "schedule": schedule,
        "num_micro_batches": micro_batches,
    }


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise typer.BadParameter(f"{text!r} is not a number of devices", param_hint="--replicas")
    return int(text)


def show_explanation(screen: Screen, explanation: wire.Explanation, *, whole: bool) -> None:
    """Print the ``whole`` explanation, or only its comparisons and what-ifs."""
    if explanation.layout is not None:
        _show_layout(screen, explanation.layout)
    if whole:
        _show_plan(screen, explanation)
    for other in explanation.why_not:
        _show_why_not(screen, other)
    if explanation.what_ifs:
        if whole:
            screen.say("what if")
        _show_what_ifs(screen, explanation.what_ifs)


def _show_plan(screen: Screen, explanation: wire.Explanation) -> None:
    """Print the explanation of the plan itself, the sentences first."""
    for sentence in explanation.sentences:
        screen.say(sentence)
    screen.say()
    screen.say(in_words(explanation))
    _show_path(screen, explanation.path)
    screen.say("how the devices spend their time; idle time by cause")
    screen.table(rich_table(idle_table(explanation.idle), MAX_IDLE))
    if explanation.sensitivities:
        screen.say("effect of single changes")
        screen.table(rich_table(changes_table(explanation.sensitivities)))
    if explanation.untried:
        screen.say(as_sentence(explanation.untried))


def _show_path(screen: Screen, path: wire.Path) -> None:
    parts = [f"{share_name(share)} {percent(share.share)}" for share in path.shares[:5]]
    batches = f" ({path.global_batches} global batches)" if path.global_batches > 1 else ""
    screen.say(
        f"critical path of {SPANS[path.span]}{batches}: {path.links} links, {duration(path.length_ns)}: "
        + ", ".join(parts)
    )
    screen.table(rich_table(segments_table(path.segments), MAX_SEGMENTS))


def _show_what_ifs(screen: Screen, rows: Sequence[wire.WhatIf]) -> None:
    """Print the table, and below it each change that leads to another plan, or to no plan."""
    screen.table(rich_table(what_ifs_table(rows)))
    ours = rows[0].shape
    for row in rows[1:]:
        if row.time_ns is None:
            screen.say(f"{row.sentence}: {row.why}")
        elif row.shape != ours:
            screen.say(f"{row.sentence}: {row.shape}")


def _show_layout(screen: Screen, layout: wire.LayoutComparison) -> None:
    screen.say(f"{layout.sentence[:1].upper()}{layout.sentence[1:]}.")
    if layout.theirs is None:
        return
    theirs, ours = layout.theirs, layout.ours
    screen.table(rich_table(layout_table(theirs, ours, layout.differences)))
    screen.say(f"theirs  {theirs.stages}")
    screen.say(f"ours    {ours.stages}")


def _show_why_not(screen: Screen, other: wire.WhyNot) -> None:
    """Print another choice: its time and ours by parts, and how wrong a number must be before it wins."""
    screen.say(f"why not {other.choice if other.question == 'next' else other.question}?")
    screen.say(f"{other.sentence[:1].upper()}{other.sentence[1:]}.")
    if other.time_ns is None:
        return
    screen.table(rich_table(why_not_table(other)))
    for turn in other.turns:
        screen.say(f"{turn.sentence[:1].upper()}{turn.sentence[1:]}.")
    screen.say(f"theirs  {other.shape}, the best that planner {other.planner} found")
    screen.say()
