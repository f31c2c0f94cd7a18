"""The map of a large cluster: racks side by side where their titles have room, numbers on plates of their stage."""

from __future__ import annotations

import re

import pytest

from penstock.report.rack_map import WIDTH, rack_map
from penstock.schemas.topology import ClusterTopology


def _cluster(pods: int, nodes: int, name: str = "pod{p}-node{n:02}") -> ClusterTopology:
    """Return pods of nodes with eight devices; each pod hangs on a separate switch."""
    names = [[name.format(p=p, n=n) for n in range(nodes)] for p in range(pods)]
    device = {"kind": "H100", "memory_bytes": 80 << 30}
    fabric = {"bandwidth_bytes_per_s": 10**10}
    return ClusterTopology.parse(
        {
            "name": "pods",
            "nodes": [
                {"name": each, "devices": [{"id": f"{each}/{d}", **device} for d in range(8)], "fabric": fabric}
                for pod in names
                for each in pod
            ],
            "switches": [*(f"leaf{p}" for p in range(pods)), "spine"],
            "links": [
                {"a": a, "b": b, "bandwidth_bytes_per_s": 10**10}
                for p, pod in enumerate(names)
                for a, b in [(f"leaf{p}", "spine"), *((each, f"leaf{p}") for each in pod)]
            ],
        }
    )


def _boxes(drawn: str) -> list[tuple[float, float, float, float]]:
    rectangles = re.findall(r'<rect class="node" x="([^"]*)" y="([^"]*)" width="([^"]*)" height="([^"]*)"', drawn)
    return [(float(x), float(y), float(width), float(height)) for x, y, width, height in rectangles]


def _stages_of(topology: ClusterTopology, devices_per_stage: int) -> dict[str, list[int]]:
    names = [device.id for node in topology.nodes for device in node.devices]
    return {name: [number // devices_per_stage] for number, name in enumerate(names[:-5])}


def test_racks_stand_side_by_side_and_overlap_nowhere() -> None:
    topology = _cluster(25, 50)
    drawn = rack_map(topology, _stages_of(topology, 80), 8)
    boxes = _boxes(drawn)
    assert len(boxes) == 25
    assert len({y for _, y, _, _ in boxes}) == 9, "three abreast"
    for number, (x, y, width, height) in enumerate(boxes):
        assert 0 <= x <= WIDTH - width + 1e-6
        for u, v, wide, high in boxes[number + 1 :]:
            assert x + width <= u + 1e-6 or u + wide <= x + 1e-6 or y + height <= v or v + high <= y
    last = re.findall(r'viewBox="-2 -2 \d+ (\d+)"', drawn)
    assert int(last[0]) <= 900, "a screen's height for 10,000 devices"
    for path in re.findall(r'<path class="device [^"]*" data-devices="\d+" d="([^"]*)"', drawn):
        for left, top, wide, high in re.findall(r"M([\d.]+) ([\d.]+)h(\d+)v(\d+)h", path):
            inside = [
                x <= float(left) and float(left) + int(wide) <= x + width
                for x, y, width, height in boxes
                if y <= float(top) and float(top) + int(high) <= y + height
            ]
            assert any(inside)


@pytest.mark.tier("nightly")
def test_long_titles_keep_racks_apart() -> None:
    topology = _cluster(4, 32, "datacentre-west-row-{p}-gpu-node-number-{n:02}")
    boxes = _boxes(rack_map(topology, _stages_of(topology, 80), 8))
    assert [x for x, _, _, _ in boxes] == [0] * 4


def test_idle_devices_are_named_however_they_are_spread() -> None:
    topology = _cluster(4, 32)
    drawn = rack_map(topology, _stages_of(topology, 80), 8)
    idle = ", ".join(f"pod3-node31/{d}" for d in range(3, 8))
    assert f"<title>not used: {idle} (5 devices)</title>" in drawn
    assert "<title>stage 0: pod0-node00 … pod0-node09 (80 devices)</title>" in drawn
    assert "<title>stage 1: pod0-node10 … pod0-node19 (80 devices)</title>" in drawn


@pytest.mark.parametrize(("pods", "plates"), [(4, True), (25, False)], ids=["squares", "bars"])
def test_a_number_among_squares_has_a_plate_of_its_colour(pods: int, plates: bool) -> None:
    topology = _cluster(pods, 50 if pods > 4 else 32)
    drawn = rack_map(topology, _stages_of(topology, 80), 8)
    numbers = re.findall(r'(?:<rect class="s(\d)"[^>]*/>)?<text class="on h(\d)"', drawn)
    assert len(numbers) >= 12
    assert all(plate == (colour if plates else "") for plate, colour in numbers)
