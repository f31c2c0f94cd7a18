"""The page's section on what determines the plan's time, and the critical path as marks on the timeline."""

from __future__ import annotations

from html import escape

from penstock.report.drawing.payload import Mark
from penstock.report.drawing.picture import Picture, stage_devices
from penstock.report.gists import alike_devices, some
from penstock.report.parts import part
from penstock.report.tables import table
from penstock.schemas.amounts import duration, percent
from penstock.schemas.api.explanation import Explanation, Path, PathShare
from penstock.schemas.plan import Plan

MAX_ROWS = 60
MAX_SHARES = 10
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


def marks(found: Explanation, plan: Plan, picture: Picture) -> tuple[Mark, ...]:
    """Return the path on the lanes of the devices that compute, or of the sending stage's first device."""
    lanes = {lane.device: number for number, lane in enumerate(picture.lanes)}
    stages = stage_devices(plan)
    made = []
    for segment in found.path.segments:
        computes = bool(segment.devices)
        for device in segment.devices or stages[segment.stage][:1]:
            end = segment.start_ns + segment.length_ns
            made.append(Mark(lanes[device], 0 if computes else 1, segment.start_ns, end))
    return tuple(made)


def as_sentence(words: str) -> str:
    """Return words as a sentence: with a capital letter and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def in_words(found: Explanation) -> str:
    """Return what binds, and what would help."""
    helps = f" Of the changes that were tried, this helps most: {found.helps}." if found.helps else ""
    return f"{found.binds[:1].upper()}{found.binds[1:]}.{helps}"


def explained(found: Explanation) -> str:
    """Return the part on what the time is made of: the critical path, the bubble and the effect of each change."""
    body = f"<p>{escape(in_words(found))}</p>{_path(found.path)}{_idle(found)}{_sensitivities(found)}"
    return part("explained", "What the time is made of", path_words(found), body)


def largest_shares(path: Path) -> list[tuple[str, int, float]]:
    """Return name, length in ns and share of the largest parts of the critical path, and the sum of the others."""
    ranked = sorted(path.shares, key=lambda share: -share.length_ns)
    shown = [(share_name(each), each.length_ns, each.share) for each in ranked[:MAX_SHARES]]
    others = ranked[MAX_SHARES:]
    if others:
        whole = sum(each.length_ns for each in others), sum(each.share for each in others)
        shown.append((f"{len(others)} other part{'s' if len(others) > 1 else ''}", *whole))
    return shown


def path_words(found: Explanation) -> str:
    """Return the largest part of the critical path in words."""
    largest = max(found.path.shares, key=lambda share: share.length_ns, default=None)
    return "" if largest is None else f"{percent(largest.share)} of the critical path is {share_name(largest)}"


def _path(path: Path) -> str:
    batches = f", {path.global_batches} global batches" if path.global_batches > 1 else ""
    shares = [[name, duration(length_ns), percent(share)] for name, length_ns, share in largest_shares(path)]
    rows = [
        [
            duration(s.start_ns),
            duration(s.length_ns),
            f"stage {s.stage}" + (f" ({some(s.devices)})" if s.devices else ""),
            s.text,
            s.because,
        ]
        for s in path.segments[:MAX_ROWS]
    ]
    more = (
        f'<p class="hint">{MAX_ROWS} of {len(path.segments)} parts are shown.</p>'
        if len(path.segments) > MAX_ROWS
        else ""
    )
    heads = ["from", "for", "where", "what", "not earlier, because"]
    return (
        f"<h3>Critical path</h3><p>The chain that decides when {SPANS[path.span]} ends: {path.links} links that add up "
        f"to {duration(path.length_ns)}{batches}.</p>"
        + table(["part", "time", "share"], shares, numeric=(1, 2))
        + f"<details><summary>Link by link</summary>{table(heads, rows, numeric=(0, 1))}{more}</details>"
    )


def _idle(found: Explanation) -> str:
    parts = [part for part in PARTS if any(getattr(each, f"{part}_ns") for each in found.idle)]
    rows = [
        [
            alike_devices(each.devices, each.num_gpus),
            percent(each.busy_ns / max(1, each.whole_ns)),
            *(percent(getattr(each, f"{part}_ns") / max(1, each.whole_ns)) for part in parts),
        ]
        for each in found.idle[:MAX_ROWS]
    ]
    heads = ["devices", "computing", *(PARTS[part] for part in parts)]
    return "<h3>Bubble</h3><p>Idle time by cause.</p>" + table(heads, rows, numeric=range(1, len(heads)))


def _sensitivities(found: Explanation) -> str:
    if found.untried:
        return f"<h3>Effect of single changes</h3><p>{escape(as_sentence(found.untried))}</p>"
    rows = [[each.sentence, duration(each.time_ns), percent(each.ratio), each.how] for each in found.sensitivities]
    return "<h3>Effect of single changes</h3>" + table(
        ["change", "time", "of this plan's", "how"], rows, numeric=(1, 2)
    )
