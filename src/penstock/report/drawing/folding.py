"""Pictures of many devices for files that nobody can fold rows in: devices with the same order share a lane."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from penstock.report.drawing.picture import Lane, Picture

MOST_LANES = 128
"""Devices that are drawn one by one."""


class Folded(NamedTuple):
    """A picture, and for each lane of the one that it was made from the number of its own lane."""

    picture: Picture
    lane_of: tuple[int, ...]


def folded(picture: Picture) -> Folded:
    """The picture as it is, or above ``MOST_LANES`` devices one lane for each order, with the fullest memory of it."""
    if len(picture.lanes) <= MOST_LANES:
        return Folded(picture, tuple(range(len(picture.lanes))))
    alike: dict[int, list[Lane]] = {}
    for lane in picture.lanes:
        alike.setdefault(lane.strip, []).append(lane)
    number_of = {strip: number for number, strip in enumerate(alike)}
    lanes = tuple(_shared(lanes) for lanes in alike.values())
    return Folded(replace(picture, lanes=lanes), tuple(number_of[lane.strip] for lane in picture.lanes))


def _shared(lanes: list[Lane]) -> Lane:
    if len(lanes) == 1:
        return lanes[0]
    fullest = max(lanes, key=lambda lane: int(lane.memory_bytes.max(initial=0)))
    return replace(fullest, device=f"{lanes[0].device} ×{len(lanes)}")
