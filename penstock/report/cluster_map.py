"""The cluster as a drawing: nodes as boxes, devices as squares coloured by the stage they hold."""

from __future__ import annotations

from html import escape

from penstock.schemas.plan import Plan
from penstock.schemas.topology import ClusterTopology

STAGE_COLOURS = ("#0072b2", "#b35900", "#00795a", "#a8487e", "#1f6f9e", "#6b5b00", "#4d4d4d", "#8c2d04")
"""Dark enough for white letters; neighbours differ for every common kind of colour blindness."""
_SIDE, _GAP, _HEAD, _WIDTH = 44, 6, 22, 1000
MAX_DRAWN_DEVICES = 1024


def cluster_map(plan: Plan, topology: ClusterTopology) -> str:
    """An SVG element; a sentence instead where the cluster is too large to draw."""
    nodes = topology.expanded().nodes
    count = sum(len(node.devices) for node in nodes)
    if count > MAX_DRAWN_DEVICES:
        return f"<p>{count} devices in {len(nodes)} nodes: too many to draw; the table of stages names them.</p>"
    held: dict[str, list[int]] = {}
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    for number, stage in enumerate(stages):
        for name in stage.devices:
            held.setdefault(name, []).append(number)
    parts, x, y, row_height = [], 0, 0, 0
    for node in nodes:
        across = min(len(node.devices), 8)
        width = max(across * (_SIDE + _GAP) + _GAP, 9 * min(len(node.name), 24) + 2 * _GAP)
        height = _HEAD + -(-len(node.devices) // across) * (_SIDE + _GAP) + _GAP
        if x and x + width > _WIDTH:
            x, y, row_height = 0, y + row_height + _GAP, 0
        parts.append(_node(x, y, width, height, node.name))
        for i, device in enumerate(node.devices):
            left, top = x + _GAP + i % across * (_SIDE + _GAP), y + _HEAD + i // across * (_SIDE + _GAP)
            parts.append(_device(left, top, device.id, device.kind, held.get(device.id, [])))
        x, row_height = x + width + _GAP, max(row_height, height)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {y + row_height + 2}" role="img" aria-label="cluster map" width="100%" '
        f'style="max-width:{_WIDTH}px">{"".join(parts)}</svg>'
    )


def _node(x: int, y: int, width: int, height: int, name: str) -> str:
    shown = name if len(name) <= 24 else name[:23] + "…"
    return (
        f'<rect class="node" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
        f'<text x="{x + _GAP}" y="{y + 15}">{escape(shown)}</text>'
    )


def _device(x: int, y: int, name: str, kind: str, stages: list[int]) -> str:
    label = ",".join(str(stage) for stage in stages) if len(stages) < 4 else f"{stages[0]}…{stages[-1]}"
    fill = f' style="fill:{STAGE_COLOURS[stages[0] % len(STAGE_COLOURS)]}"' if stages else ""
    what = f"stage {label}" if stages else "not used"
    return (
        f"<g><title>{escape(name)} ({escape(kind)}): {what}</title>"
        f'<rect class="device{"" if stages else " unused"}" x="{x}" y="{y}" width="{_SIDE}" height="{_SIDE}" rx="4"'
        f"{fill}/>"
        f'<text class="on" x="{x + _SIDE // 2}" y="{y + _SIDE // 2 + 4}" text-anchor="middle"'
        f' style="fill:{"#fff" if stages else "inherit"}">{label or "–"}</text></g>'
    )
