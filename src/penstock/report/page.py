"""The HTML report: one file with its own styles, script and data, which works without a network.

The script of ``assets`` draws timeline and memory on canvases; everything they show is also in tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from penstock.report.bounds import widest
from penstock.report.cluster_map import cluster_map, traffic_table
from penstock.report.drawing.assets import script, style
from penstock.report.drawing.figure import embedded_figure
from penstock.report.drawing.payload import Mark, payload
from penstock.report.drawing.picture import NAMES, Picture, Piece, picture_of_timeline, picture_of_trace
from penstock.report.explained import explained, marks
from penstock.report.memory import peaks
from penstock.report.sentences import pace, replicas, subtitle
from penstock.report.tables import table
from penstock.report.traffic import traffic
from penstock.report.words import amount, duration, percent, ranges, recomputed
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.coverage import NOT_STATED
from penstock.schemas.plan import Certificate, Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.timeline import Timeline

MAX_TABLE_ROWS = 400
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
    picture = picture_of_timeline(problem, timeline, allocation, idle)
    time_ns = timeline.time_per_global_batch_ns
    flows = traffic(problem, allocation, time_ns, plan.update_rule) if allocation is not None else ()
    title = f"{profile.name} on {topology.name}"
    sections = [
        f"<header><h1>{escape(title)}</h1>{_themes()}</header>",
        f'<p class="faint">{escape(subtitle(plan, topology))}</p>',
        "".join(f'<p class="fault">{escape(fault)}</p>' for fault in faults),
        _figures(plan, trace),
        _timeline(
            picture,
            marks(explanation, plan, picture) if explanation else (),
            picture_of_trace(trace, plan) if trace is not None else None,
        ),
        f"<h2>Memory of all devices</h2>{peaks(picture)}",
    ]
    if explanation is not None:
        sections.append(explained(explanation))
    sections += [
        _stages(plan, profile),
        _devices(plan),
        _certificates(plan),
        f"<h2>Cluster</h2><figure>{cluster_map(plan, topology, flows)}<figcaption>Numbers and colours are stages; the "
        "thicker a line, the more data it carries.</figcaption></figure>",
        traffic_table(flows, [device.name for device in problem.devices]),
        _assumptions(plan, profile),
        _operations(picture),
        _origin(plan),
    ]
    return _page(title, "\n".join(sections))


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
    best = widest(plan.certificates)
    if best is not None:
        entries.append(("lower bound on all plans of this request", duration(best.bound_ns)))
        entries.append(("gap to that bound", percent(best.gap)))
    entries += pace(p)
    if p.cost_per_sample is not None:
        entries.append(("cost per sample", f"{p.cost_per_sample:.3g}"))
    if trace is not None and trace.measured_times_per_global_batch_ns:
        times = sorted(trace.measured_times_per_global_batch_ns)
        median = times[len(times) // 2]
        entries.append(("measured (median)", duration(median)))
        entries.append(("prediction against it", f"{100 * (p.time_per_global_batch_ns / median - 1):+.1f} %"))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in entries)
    return f'<dl class="figures">{cells}</dl>'


def _timeline(picture: Picture, path: Sequence[Mark], measured: Picture | None) -> str:
    """Return the heading, the figure, and the explanation of its marks."""
    title = "Timeline" if measured is None else "Predicted and measured timeline"
    notes = []
    if measured is not None:
        notes.append("Predicted blocks are above the measured ones of the same device; a block shows how they differ.")
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
                    ", ".join(stage.devices),
                    str(replicas(plan, stage)),
                    stage.dispatch.replace("_", " ") if replicas(plan, stage) > 1 else "–",
                    recomputed(stage),
                    str(plan.schedule.warmup[number]) if number < len(plan.schedule.warmup) else "–",
                ]
            )
            number += 1
    heads = ["stage", "layers", "names", "parameters", "devices", "replicas", "dispatch", "recompute", "K (warm-up)"]
    return "<h2>Stages</h2>" + table(heads, rows, numeric=(3, 5, 8))


def _devices(plan: Plan) -> str:
    assert plan.prediction is not None
    total = plan.prediction.time_per_global_batch_ns
    parts = (
        "parameters", "gradients", "optimizer", "versions", "activations", "buffers", "workspace", "context",
    )  # fmt: skip
    rows = [
        [
            use.device,
            percent(use.busy_ns / total),
            percent(use.communication_ns / total),
            percent(use.idle_ns / total),
            amount(use.peak_memory_bytes),
            amount(use.memory_bytes),
            *(amount(getattr(use.memory, f"{part}_bytes")) for part in parts),
        ]
        for use in plan.prediction.devices[:MAX_TABLE_ROWS]
    ]
    heads = ["device", "computing", "communicating", "idle", "peak memory", "has", *parts]
    return "<h2>Devices</h2>" + table(heads, rows, numeric=range(1, len(heads))) + _cut(len(plan.prediction.devices))


def _certificates(plan: Plan) -> str:
    if not plan.certificates:
        return "<h2>Certificates</h2><p>This plan has no bound.</p>"
    rows = [[c.model if c.covers is not None else NOT_STATED, *_numbers(c), c.method] for c in plan.certificates]
    return (
        "<h2>Certificates</h2><p>No plan that the bound covers takes less time than the bound; the gap says by how "
        "much this plan is above it.</p>"
        + table(["covers", "bound", "gap", "tolerance", "method"], rows, numeric=(1, 2, 3))
    )


def _numbers(c: Certificate) -> tuple[str, str, str]:
    return duration(c.bound_ns), percent(c.gap), duration(c.tolerance_ns)


def _assumptions(plan: Plan, profile: ModelProfile) -> str:
    entries = [*plan.assumptions, *(a for a in profile.assumptions if a not in plan.assumptions)]
    source = f"Costs: {profile.source.method}. {profile.source.description}"
    listed = "".join(f"<li>{escape(entry)}</li>" for entry in entries)
    return f"<h2>Assumptions</h2><p>{escape(source)}</p>" + (f"<ul>{listed}</ul>" if listed else "")


def _operations(picture: Picture) -> str:
    rows: list[list[str]] = []
    total = 0
    for lane in picture.lanes:
        blocks = picture.strips[lane.strip].compute
        total += len(blocks)
        for i in range(min(len(blocks), MAX_TABLE_ROWS - len(rows))):
            letter = blocks.letters[blocks.kind[i]]
            number = str(blocks.number[i]) if blocks.number[i] >= 0 else "–"
            times = [duration(float(value[i])) for value in (blocks.start_ns, blocks.end_ns)]
            rows.append([lane.device, NAMES[letter], str(blocks.stage[i]), number, *times])
    heads = ["device", "operation", "stage", "micro-batch", "start", "end"]
    shown = table(heads, rows, numeric=(2, 3, 4, 5))
    return f"<h2>Operations</h2><details><summary>The timeline as a table</summary>{shown}{_cut(total)}</details>"


def _cut(count: int) -> str:
    return f'<p class="hint">{MAX_TABLE_ROWS} of {count:,} rows are shown.</p>' if count > MAX_TABLE_ROWS else ""


def _origin(plan: Plan) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(plan.versions.items()))
    return f"<h2>Origin</h2><p>Request <code>{plan.request_hash}</code>, seed {plan.seed}. {escape(versions)}</p>"
