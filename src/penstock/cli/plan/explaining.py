"""``penstock explain`` in the terminal: sentences, the critical path, the bubble, what would help, another layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from penstock.cli.show import shown_devices
from penstock.report.device_names import times
from penstock.report.explained import PARTS, SPANS, as_sentence, share_name
from penstock.schemas.amounts import amount, duration, percent

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
    """The layout that options describe; None without ``--cuts``. Raises typer.BadParameter for what says nothing."""
    if cuts is None:
        if any(given is not None for given in (replicas, devices, schedule, micro_batches)):
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


def show_explanation(screen: Screen, found: wire.Explanation, *, whole: bool) -> None:
    """Print the explanation, or, where it is not asked for as a ``whole``, the comparisons and the what-ifs."""
    if found.layout is not None:
        _show_layout(screen, found.layout)
    if whole:
        _show_plan(screen, found)
    for other in found.why_not:
        _show_why_not(screen, other)
    if found.what_ifs:
        if whole:
            screen.say("what if")
        _show_what_ifs(screen, found.what_ifs)


def _show_plan(screen: Screen, found: wire.Explanation) -> None:
    """Print what is to be said of the plan itself, the sentences first."""
    for sentence in found.sentences:
        screen.say(sentence)
    screen.say()
    screen.say(f"{found.binds[:1].upper()}{found.binds[1:]}.")
    if found.helps:
        screen.say(f"Of the changes that were tried, this helps most: {found.helps}.")
    _show_path(screen, found.path)
    _show_idle(screen, found.idle)
    if found.sensitivities:
        screen.say("effect of single changes")
        screen.table(_sensitivities(found.sensitivities))
    if found.untried:
        screen.say(as_sentence(found.untried))


def _table(*heads: tuple[str, bool]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head, numeric in heads:
        whole = numeric or head == "how"
        table.add_column(head, justify="right" if numeric else "left", no_wrap=whole, overflow="fold")
    return table


def _show_path(screen: Screen, path: wire.Path) -> None:
    parts = [f"{share_name(share)} {percent(share.share)}" for share in path.shares[:5]]
    batches = f" ({path.global_batches} global batches)" if path.global_batches > 1 else ""
    screen.say(
        f"critical path of {SPANS[path.span]}{batches}: {path.links} links, {duration(path.length_ns)}: "
        + ", ".join(parts)
    )
    table = _table(("from", True), ("for", True), ("where", False), ("what", False), ("not earlier, because", False))
    half = MAX_SEGMENTS // 2
    shown = list(path.segments)
    cut = len(shown) > MAX_SEGMENTS
    for segment in [*shown[:half], None, *shown[-half:]] if cut else shown:
        if segment is None:
            table.add_row("…", "", f"{len(shown) - 2 * half} more", "", "")
            continue
        where = f"stage {segment.stage}" + (f" ({shown_devices(segment.devices)})" if segment.devices else "")
        table.add_row(duration(segment.start_ns), duration(segment.length_ns), where, segment.text, segment.because)
    screen.table(table)


def _show_idle(screen: Screen, idle: Sequence[wire.IdleOut]) -> None:
    """One row per device; a part that is nowhere has no column."""
    parts = [part for part in PARTS if any(getattr(each, f"{part}_ns") for each in idle)]
    table = _table(("devices", False), ("computing", True), *((PARTS[part], True) for part in parts))
    for each in idle[:MAX_IDLE]:
        shares = [percent(getattr(each, f"{part}_ns") / max(1, each.whole_ns)) for part in parts]
        several = each.num_gpus > len(each.devices)
        name = times(each.devices[0], each.num_gpus) if several else shown_devices(each.devices)
        table.add_row(name, percent(each.busy_ns / max(1, each.whole_ns)), *shares)
    if len(idle) > MAX_IDLE:
        table.add_row(f"… {len(idle) - MAX_IDLE} more")
    screen.say("how the devices spend their time; idle time by cause")
    screen.table(table)


def _sensitivities(found: Sequence[wire.SensitivityOut]) -> Table:
    table = _table(("change", False), ("time", True), ("of ours", True), ("how", False))
    for each in found:
        table.add_row(each.sentence, duration(each.time_ns), percent(each.ratio), each.how)
    return table


def _show_what_ifs(screen: Screen, rows: Sequence[wire.WhatIf]) -> None:
    """The table, and below it what has another plan than ours, or none."""
    table = _table(
        ("change", False), ("time", True), ("of ours", True), ("room left", True), ("bound", True), ("how", False)
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.sentence,
            duration(row.time_ns) if row.time_ns is not None else "–",
            percent(row.ratio) if row.ratio is not None else "–",
            amount(row.headroom_bytes) if row.headroom_bytes is not None else "–",
            duration(row.bound_ns),
            row.how if row.time_ns is not None else "–",
        )
    screen.table(table)
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
    table = _table(("", False), ("theirs", True), ("ours", True))
    theirs, ours = layout.theirs, layout.ours
    for name, show in (("time_ns", duration), ("bubble", percent), ("peak_memory_bytes", amount)):
        table.add_row(name.removesuffix("_ns").removesuffix("_bytes").replace("_", " "),
                      show(getattr(theirs, name)), show(getattr(ours, name)))  # fmt: skip
    table.add_row("memory left", amount(theirs.headroom_bytes), amount(ours.headroom_bytes))
    table.add_row("no order takes less than", duration(theirs.bound_ns), duration(ours.bound_ns))
    for each in layout.differences:
        table.add_row(f"on the path: {each.name}", duration(each.theirs_ns), duration(each.ours_ns))
    screen.table(table)
    screen.say(f"theirs  {theirs.stages}")
    screen.say(f"ours    {ours.stages}")


def _show_why_not(screen: Screen, other: wire.WhyNot) -> None:
    """Another choice: its time and ours by parts, and how wrong a number must be before it wins."""
    screen.say(f"why not {other.choice if other.asked == 'next' else other.asked}?")
    screen.say(f"{other.sentence[:1].upper()}{other.sentence[1:]}.")
    if other.time_ns is None:
        return
    table = _table(("", False), ("theirs", True), ("ours", True))
    table.add_row("time", duration(other.time_ns), duration(sum(each.ours_ns for each in other.differences)))
    for each in other.differences:
        table.add_row(each.name, duration(each.theirs_ns), duration(each.ours_ns))
    table.add_row("no plan at this choice takes less than", duration(other.bound_ns), "")
    screen.table(table)
    for turn in other.turns:
        screen.say(f"{turn.sentence[:1].upper()}{turn.sentence[1:]}.")
    screen.say(f"theirs  {other.shape}, the best that planner {other.planner} found")
    screen.say()
