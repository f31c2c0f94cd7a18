"""The HTML report: one file with its own styles, script and data, which works without a network.

The script of ``assets`` draws timeline and memory on canvases; everything they show is also in tables. What the plan is
and how good it is fills one screen, with the timeline below; everything else is opened on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from penstock.calibration.comparing import compared
from penstock.planning.bound_sentences import bound_sentence, widest
from penstock.planning.sentences import pace, replicas, subtitle
from penstock.report.cluster_map import cluster_map, traffic_table
from penstock.report.device_names import alike, idle_sentence, times, together
from penstock.report.drawing.assets import script, style
from penstock.report.drawing.figure import embedded_figure
from penstock.report.drawing.payload import Mark, payload
from penstock.report.drawing.picture import NAMES, Picture, Piece, picture_of_timeline, picture_of_trace, rows_in_words
from penstock.report.explained import explained, in_words, marks
from penstock.report.gists import cluster_words, devices_words, some, stages_words
from penstock.report.memory import fullest, peaks
from penstock.report.parts import part
from penstock.report.tables import table
from penstock.report.traffic import Flow, traffic
from penstock.schemas.amounts import amount, duration, percent, ranges
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.api.words import recomputed
from penstock.schemas.plan import Certificate, Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.timeline import Timeline

MAX_TABLE_ROWS = 400
SMALL_STAGES = 8
SMALL_DEVICES = 64
"""The largest numbers of stages and devices whose parts of the page are open at first."""
_THEMES = (("", "As the system"), ("light", "Light"), ("dark", "Dark"))


def html_report(
    file: PlanFile,
    plan: Plan,
    problem: Problem,
    timeline: Timeline,
    *,
    allocation: Allocation | None = None,
    trace: Trace | None = None,
    faults: Sequence[str] = (),
    explanation: Explanation | None = None,
    idle: Mapping[tuple[int, ...], Sequence[Piece]] | None = None,
) -> str:
    """Return the page. ``plan`` is the judged plan of ``file``, ``allocation`` its own; a ``trace`` adds measurements.

    With its ``explanation`` the critical path is marked on the timeline and listed in tables below; with ``idle`` the
    timeline shows why devices wait.
    """
    profile, topology = file.request.profile, file.request.topology
    assert isinstance(profile, ModelProfile)
    assert isinstance(topology, ClusterTopology)
    picture = replace(picture_of_timeline(problem, timeline, allocation, idle), together=together(plan))
    time_ns = timeline.time_per_global_batch_ns
    flows = traffic(problem, allocation, time_ns, plan.update_rule) if allocation is not None else ()
    title = f"{profile.name} on {topology.name}"
    bound = widest(plan.certificates)
    said = [] if explanation is None else [f"{in_words(explanation)}"]
    said += [sentence for sentence in (idle_sentence(plan, topology),) if sentence is not None]
    said += [] if bound is None else [bound_sentence(bound, time_ns)]
    sections = [
        f"<header><h1>{escape(title)}</h1>{_themes()}</header>",
        f'<p class="faint">{escape(subtitle(plan, topology))}</p>',
        "".join(f'<p class="fault">{escape(fault)}</p>' for fault in faults),
        _figures(plan, trace),
        f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in said)}</ul>" if said else "",
        _timeline(
            picture,
            marks(explanation, plan, picture) if explanation else (),
            picture_of_trace(trace, plan) if trace is not None else None,
            rows_in_words(picture),
        ),
        *([explained(explanation)] if explanation is not None else []),
        _stages(plan, profile),
        _cluster(plan, topology, flows, [device.name for device in problem.devices]),
        part("memory", "Memory", fullest(picture), peaks(picture)),
        _devices(plan),
        _certificates(plan),
        _operations(picture),
        _search(*file.why) if file.why else "",
        _origin(plan, profile),
    ]
    return _page(title, "\n".join(sections))


def _cluster(plan: Plan, topology: ClusterTopology, flows: Sequence[Flow], names: Sequence[str]) -> str:
    small = topology.num_devices <= SMALL_DEVICES
    key = "Numbers and colours are stages; pale squares are idle."
    key += " The thicker a line, the more data it carries." if small else ""
    drawn = f"<figure>{cluster_map(plan, topology, flows)}<figcaption>{key}</figcaption></figure>"
    drawn += traffic_table(plan, flows, names)
    return part("cluster", "Cluster", cluster_words(plan, topology), drawn, opened=small)


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>\n{script()}</script>\n</body>\n</html>\n"
    )


def _themes() -> str:
    buttons = "".join(f'<button type="button" data-theme-choice="{name}">{words}</button>' for name, words in _THEMES)
    return f'<div class="themes" role="group" aria-label="Colours">{buttons}</div>'


def _figures(plan: Plan, trace: Trace | None) -> str:
    p = plan.prediction
    assert p is not None
    entries = [
        ("time per global batch", duration(p.time_per_global_batch_ns)),
        (f"stated error ({p.basis} costs)", f"± {percent(p.expected_error)}"),
        ("samples per second", f"{plan.global_batch_size / p.time_per_global_batch_ns * 1e9:,.1f}"),
        ("not computing (bubble)", percent(p.bubble)),
        ("peak memory", amount(p.peak_memory_bytes)),
    ]
    note = ""
    best = widest(plan.certificates)
    if best is not None:
        entries.append(("proven lower bound", duration(best.bound_ns)))
        entries.append(("gap to the bound", percent(best.gap)))
    entries += pace(p)
    if p.cost_per_sample is not None:
        entries.append(("cost per sample", f"{p.cost_per_sample:.3g}"))
    if trace is not None and trace.measured_times_per_global_batch_ns:
        times = sorted(trace.measured_times_per_global_batch_ns)
        median = times[len(times) // 2]
        ranks = [rank.hardware for rank in trace.ranks if rank.hardware is not None]
        comparison = compared(p.time_per_global_batch_ns, median, ranks)
        entries += comparison.figures()
        note = "" if comparison.note is None else f'\n<p class="hint">{escape(comparison.note)}</p>'
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in entries)
    return f'<dl class="figures">{cells}</dl>{note}'


def _timeline(picture: Picture, path: Sequence[Mark], measured: Picture | None, rows: str | None) -> str:
    """Return the heading, the figure, and the explanation of its marks."""
    title = "Timeline" if measured is None else "Predicted and measured timeline"
    notes = []
    if measured is not None:
        notes.append("Predicted blocks are above the measured ones of the same device; a block shows how they differ.")
    if rows is not None:
        notes.append(rows)
    if path:
        notes.append("The critical path is marked in red.")
    if picture.window is not None:
        notes.append(f"The blue line above is the {picture.window}; all shares and times are measured there.")
    data = payload(picture, title, path, measured=measured)
    hint = f'<p class="hint">{escape(" ".join(notes))}</p>' if notes else ""
    return f"<h2>{title}</h2>\n{hint}{embedded_figure('timeline-data', data)}"


def _stages(plan: Plan, profile: ModelProfile) -> str:
    rows = []
    number = 0
    for p, pipeline in enumerate(plan.pipelines):
        for stage in pipeline.stages:
            first, last = stage.layers
            rows.append(
                [
                    f"{number}" if len(plan.pipelines) == 1 else f"{number} (pipeline {p})",
                    ranges(stage.layers),
                    profile.layers[first].name
                    if first == last
                    else f"{profile.layers[first].name} … {profile.layers[last].name}",
                    amount(profile.held_bytes(first, last)),
                    some(stage.devices),
                    str(replicas(plan, stage)),
                    stage.dispatch.replace("_", " ") if replicas(plan, stage) > 1 else "–",
                    recomputed(stage),
                    str(plan.schedule.warmup[number]) if number < len(plan.schedule.warmup) else "–",
                ]
            )
            number += 1
    heads = ["stage", "layers", "names", "parameters", "devices", "replicas", "dispatch", "recompute", "K (warm-up)"]
    shown = table(heads, rows[:MAX_TABLE_ROWS], numeric=(3, 5, 8)) + _cut(len(rows))
    return part("stages", "Stages", stages_words(plan), shown, opened=len(rows) <= SMALL_STAGES)


def _devices(plan: Plan) -> str:
    assert plan.prediction is not None
    total = plan.prediction.time_per_global_batch_ns
    parts = (
        "parameters", "gradients", "optimizer", "versions", "activations", "buffers", "workspace", "context",
    )  # fmt: skip
    folded = alike(plan.prediction.devices)
    rows = [
        [
            times(use.device, count * together(plan)),
            percent(use.busy_ns / total),
            percent(use.communication_ns / total),
            percent(use.idle_ns / total),
            amount(use.peak_memory_bytes),
            amount(use.memory_bytes),
            *(amount(getattr(use.memory, f"{part}_bytes")) for part in parts),
        ]
        for use, count in folded[:MAX_TABLE_ROWS]
    ]
    heads = ["device", "computing", "communicating", "idle", "peak memory", "has", *parts]
    shown = table(heads, rows, numeric=range(1, len(heads))) + _cut(len(folded))
    return part("devices", "Devices", devices_words(plan), shown)


def _certificates(plan: Plan) -> str:
    if not plan.certificates:
        return part("bounds", "Bounds", "This plan has no bound.", "")
    rows = [[c.model, *_numbers(c), c.method] for c in plan.certificates]
    number = len(plan.certificates)
    shown = table(["covers", "bound", "gap", "tolerance", "method"], rows, numeric=(1, 2, 3))
    note = "No plan that a bound covers takes less time than the bound; the gap says by how much this plan is above it."
    body = f"<p>{note}</p>{shown}"
    return part("bounds", "Bounds", f"{number} proven bound{'s' if number > 1 else ''}", body)


def _numbers(c: Certificate) -> tuple[str, str, str]:
    return duration(c.bound_ns), percent(c.gap), duration(c.tolerance_ns)


def _operations(picture: Picture) -> str:
    """Return the timeline as a table: of devices that do the same, the first one."""
    rows: list[list[str]] = []
    total = 0
    lanes = {lane.strip: lane for lane in reversed(picture.lanes)}
    counted = Counter(lane.strip for lane in picture.lanes)
    for strip in sorted(lanes):
        blocks = picture.strips[strip].compute
        total += len(blocks)
        device = times(lanes[strip].device, counted[strip] * picture.together)
        for i in range(min(len(blocks), MAX_TABLE_ROWS - len(rows))):
            letter = blocks.letters[blocks.kind[i]]
            number = str(blocks.number[i]) if blocks.number[i] >= 0 else "–"
            spans = [duration(float(value[i])) for value in (blocks.start_ns, blocks.end_ns)]
            rows.append([device, NAMES[letter], str(blocks.stage[i]), number, *spans])
    heads = ["device", "operation", "stage", "micro-batch", "start", "end"]
    shown = table(heads, rows, numeric=(2, 3, 4, 5))
    return part("operations", "Operations", "the timeline as a table", shown + _cut(total))


def _cut(count: int) -> str:
    return f'<p class="hint">{MAX_TABLE_ROWS} of {count:,} rows are shown.</p>' if count > MAX_TABLE_ROWS else ""


def _search(first: str, *others: str) -> str:
    listed = "".join(f"<li>{escape(clause)}</li>" for clause in others)
    return part("search", "How it was found", first, f"<ul>{listed}</ul>")


def _origin(plan: Plan, profile: ModelProfile) -> str:
    entries = [*plan.assumptions, *(a for a in profile.assumptions if a not in plan.assumptions)]
    source = f"Costs: {profile.source.method}. {profile.source.description}"
    listed = f"<ul>{''.join(f'<li>{escape(entry)}</li>' for entry in entries)}</ul>" if entries else ""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(plan.versions.items()))
    origin = f"<p>Request <code>{plan.request_hash}</code>, seed {plan.seed}. {escape(versions)}</p>"
    number = len(entries)
    gist = f"{profile.source.method} costs, {number} assumption{'' if number == 1 else 's'}"
    return part("origin", "Assumptions and origin", gist, f"<p>{escape(source)}</p>{listed}{origin}")
