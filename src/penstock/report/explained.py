"""The causes of a plan's time: critical path, idle time and single changes as tables, and marks on the timeline."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.report.blocks import (
    NONE,
    Bar,
    Bars,
    Bullets,
    Cell,
    Column,
    Columns,
    Folded,
    Section,
    Table,
    Text,
    of_amount,
    of_duration,
    of_share,
)
from penstock.report.drawing.payload import Mark
from penstock.report.drawing.picture import Picture, stage_devices
from penstock.report.gists import alike_devices, some
from penstock.schemas.amounts import amount, duration, percent
from penstock.schemas.api.explanation import (
    DifferenceOut,
    Explanation,
    IdleOut,
    LayoutSide,
    Path,
    PathSegment,
    PathShare,
    SensitivityOut,
    WhatIf,
    WhyNot,
)
from penstock.schemas.plan import Plan

MAX_ROWS = 100
MAX_SHARES = 10
LEAST_EFFECT = 0.001
"""Relative change of the time below which a changed request counts as without effect."""
SPANS = {
    "step": "one step",
    "iteration": "one iteration",
    "cycle": "one critical cycle",
    "window": "the steady window",
}
"""The kinds of links of a critical path."""
PARTS = {
    "slower": "slower devices",
    "fill": "fill",
    "drain": "drain",
    "transfer": "transfers",
    "all_reduce": "all-reduces",
    "other_stages": "other stages",
    "order": "order",
    "memory": "memory",
}
"""The reasons for which devices wait, and the heading of each."""


def share_name(share: PathShare) -> str:
    """Return the name of a part of the critical path."""
    if share.what == "transfer":
        return f"transfers between stages {share.stage} and {share.stage + 1}"
    what = {"operation": "computing", "all-reduce": "all-reduces", "update": "updates"}[share.what]
    return f"{what} of stage {share.stage}"


def marks(explanation: Explanation, plan: Plan, picture: Picture) -> tuple[Mark, ...]:
    """Return the path on the lanes of the devices that compute, or of the sending stage's first device."""
    lanes = {lane.device: number for number, lane in enumerate(picture.lanes)}
    stages = stage_devices(plan)
    drawn = []
    for segment in explanation.path.segments:
        computes = bool(segment.devices)
        for device in segment.devices or stages[segment.stage][:1]:
            end = segment.start_ns + segment.length_ns
            drawn.append(Mark(lanes[device], 0 if computes else 1, segment.start_ns, end))
    return tuple(drawn)


def as_sentence(words: str) -> str:
    """Return words as a sentence: with a capital letter and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def in_words(explanation: Explanation) -> str:
    """Return what binds, and what would help."""
    helps = f" Of the changes that were tried, this helps most: {explanation.helps}." if explanation.helps else ""
    return f"{as_sentence(explanation.binds)}{helps}"


def explained(explanation: Explanation) -> Section:
    """Return the section on what the time is made of: the critical path, idle time and the effect of each change."""
    path = explanation.path
    batches = f", {path.global_batches} global batches" if path.global_batches > 1 else ""
    links = f"The chain that decides when {SPANS[path.span]} ends: {path.links} links that add up to "
    chain = (
        Text("Critical path", "h3"),
        Text(f"{links}{duration(path.length_ns)}{batches}."),
        shares_table(path),
    )
    changes = (
        Text(as_sentence(explanation.untried)) if explanation.untried else changes_table(explanation.sensitivities)
    )
    return Section(
        "explained",
        "What the time is made of",
        path_words(explanation),
        (
            Text(in_words(explanation)),
            Folded("In sentences", (Bullets(explanation.sentences),)),
            Columns((chain, (Text("Effect of single changes", "h3"), changes))),
            Text("Idle time by cause", "h3"),
            idle_table(explanation.idle),
            Folded("The critical path, operation by operation", (segments_table(path.segments),)),
        ),
    )


def largest_shares(path: Path) -> list[tuple[str, int, float]]:
    """Return name, length in ns and share of the largest parts of the critical path, and the sum of the others."""
    ranked = sorted(path.shares, key=lambda share: -share.length_ns)
    shown = [(share_name(each), each.length_ns, each.share) for each in ranked[:MAX_SHARES]]
    others = ranked[MAX_SHARES:]
    if others:
        whole = sum(each.length_ns for each in others), sum(each.share for each in others)
        shown.append((f"{len(others)} other part{'s' if len(others) > 1 else ''}", *whole))
    return shown


def path_words(explanation: Explanation) -> str:
    """Return the largest part of the critical path in words."""
    largest = max(explanation.path.shares, key=lambda share: share.length_ns, default=None)
    return "" if largest is None else f"{percent(largest.share)} of the critical path is {share_name(largest)}"


def shares_table(path: Path) -> Table:
    """Return a row for each of the largest parts of the critical path."""
    rows = ((name, of_duration(length_ns), of_share(share)) for name, length_ns, share in largest_shares(path))
    return Table.of((Column("part"), Column("time", True), Column("share", True)), rows)


def segments_table(segments: Sequence[PathSegment]) -> Table:
    """Return a row for each link of the critical path."""
    heads = Column("from", True), Column("for", True), Column("where"), Column("what"), Column("not earlier, because")
    rows = (
        (
            of_duration(each.start_ns),
            of_duration(each.length_ns),
            f"stage {each.stage}" + (f" ({some(each.devices)})" if each.devices else ""),
            each.text,
            each.because,
        )
        for each in segments
    )
    return Table.of(heads, rows, most=MAX_ROWS)


def idle_table(idle: Sequence[IdleOut]) -> Table:
    """Return a row for each group of devices with the same work; a cause that is nowhere has no column."""
    parts = [part for part in PARTS if any(getattr(each, f"{part}_ns") for each in idle)]
    heads = (Column("devices"), Column("computing", True), *(Column(PARTS[part], True) for part in parts))
    rows = (
        (Cell(alike_devices(each.devices, each.num_gpus)), *(_share(each, part) for part in ("busy", *parts)))
        for each in idle
    )
    return Table.of(heads, rows, "Shares of the whole time.", most=MAX_ROWS)


def _share(each: IdleOut, part: str) -> Cell:
    return of_share(getattr(each, f"{part}_ns") / max(1, each.whole_ns))


def changes_table(changes: Sequence[SensitivityOut]) -> Table:
    """Return a row for each single change of the plan's inputs, with the time of the same plan."""
    heads = Column("change"), Column("time", True), Column("of this plan's", True), Column("how")
    rows = ((each.sentence, of_duration(each.time_ns), of_share(each.ratio), each.how) for each in changes)
    return Table.of(heads, rows)


def what_ifs_table(rows: Sequence[WhatIf]) -> Table:
    """Return a row for each changed request, with the best that was found for it."""
    heads = (
        Column("change"),
        Column("time", True),
        Column("of this plan's", True),
        Column("room left", True),
        Column("bound", True),
        Column("how"),
        Column("plan", brief=False),
    )
    caption = (
        "Times are of one global batch; room left is the least of a device, and no plan takes less than the bound."
    )
    return Table.of(heads, (_what_if(row) for row in rows), caption)


def what_ifs_bars(rows: Sequence[WhatIf]) -> Bars:
    """Return the times of the changed requests as bars, the quickest first, with this plan's time as a line.

    Changes that have no effect are counted in the caption, and have no bar.
    """
    timed = [row for row in rows if row.time_ns is not None and row.ratio is not None]
    moved = [row for row in timed if abs((row.ratio or 1.0) - 1.0) >= LEAST_EFFECT]
    moved.sort(key=lambda row: row.time_ns or 0)
    still = len(timed) - len(moved)
    bars = []
    for row in moved:
        time_ns, share = row.time_ns or 0, percent(row.ratio or 0)
        bars.append(Bar(row.sentence, (("time", float(time_ns)),), f"{duration(time_ns)} ({share})"))
    caption = f"Time of one global batch after each change.{f' {still} changes make no difference.' if still else ''}"
    now = next((row.time_ns / row.ratio for row in timed if row.time_ns and row.ratio), None)
    return Bars(tuple(bars), caption, now, "" if now is None else f"this plan: {duration(now)}")


def why_not_bars(other: WhyNot) -> Bars:
    """Return the time of the plan and of another choice as stacked bars of what the time is made of."""
    sides = {"this plan": [(each.name, each.ours_ns) for each in other.differences]}
    sides[other.choice] = [(each.name, each.theirs_ns) for each in other.differences]
    bars = (
        Bar(name, tuple((part, float(ns)) for part, ns in parts), duration(sum(ns for _part, ns in parts)))
        for name, parts in sides.items()
    )
    bound_ns = other.bound_ns
    return Bars(tuple(bars), "", bound_ns, f"no plan at this choice takes less: {duration(bound_ns)}")


def _what_if(row: WhatIf) -> tuple[Cell | str, ...]:
    return (
        row.sentence,
        of_duration(row.time_ns),
        of_share(row.ratio),
        of_amount(row.headroom_bytes),
        of_duration(row.bound_ns),
        NONE if row.time_ns is None else row.how,
        f"{row.shape}{' ' if row.shape and row.why else ''}{row.why}",
    )


def why_not_table(other: WhyNot) -> Table:
    """Return the time of another choice and of the plan, and both by parts."""
    rows = [("time", other.time_ns or 0, sum(each.ours_ns for each in other.differences))]
    rows += [(each.name, each.theirs_ns, each.ours_ns) for each in other.differences]
    bound = ("no plan at this choice takes less than", of_duration(other.bound_ns), "")
    caption = f"Means over the GPU groups in use. Theirs is the best that planner {other.planner} found: {other.shape}."
    return Table.of(_SIDES, [*(_side_by_side(*row) for row in rows), bound], caption)


def layout_table(theirs: LayoutSide, ours: LayoutSide, differences: Sequence[DifferenceOut]) -> Table:
    """Return the figures of a layout and of the plan side by side."""
    rows: list[tuple[Cell | str, ...]] = [
        _side_by_side("time", theirs.time_ns, ours.time_ns),
        ("bubble", percent(theirs.bubble), percent(ours.bubble)),
        ("peak memory", amount(theirs.peak_memory_bytes), amount(ours.peak_memory_bytes)),
        ("memory left", amount(theirs.headroom_bytes), amount(ours.headroom_bytes)),
        _side_by_side("no order takes less than", theirs.bound_ns, ours.bound_ns),
        *(_side_by_side(f"on the path: {each.name}", each.theirs_ns, each.ours_ns) for each in differences),
    ]
    return Table.of(_SIDES, rows)


_SIDES = (Column(""), Column("theirs", True), Column("ours", True))


def _side_by_side(name: str, theirs_ns: int, ours_ns: int) -> tuple[Cell | str, ...]:
    return name, *(of_duration(each) for each in (theirs_ns, ours_ns))
