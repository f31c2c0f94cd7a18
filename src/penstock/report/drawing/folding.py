"""Pictures of many devices for files without interactive folding: devices with the same order share a lane."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from penstock.report.device_names import times
from penstock.report.drawing.picture import Lane, Picture

MOST_LANES = 128
"""The largest number of devices that are drawn one by one."""


class Folded(NamedTuple):
    """A picture, and the number of its lane for each lane of the original picture."""

    picture: Picture
    lane_of: tuple[int, ...]


def folded(picture: Picture) -> Folded:
    """Return the picture; above ``MOST_LANES`` lanes, one lane per order, with the memory of its fullest device.

    A lane that represents several devices says how many these are.
    """
    if len(picture.lanes) <= MOST_LANES:
        lanes = tuple(_shared([lane], picture.together) for lane in picture.lanes)
        return Folded(replace(picture, lanes=lanes), tuple(range(len(lanes))))
    alike: dict[int, list[Lane]] = {}
    for lane in picture.lanes:
        alike.setdefault(lane.strip, []).append(lane)
    number_of = {strip: number for number, strip in enumerate(alike)}
    lanes = tuple(_shared(lanes, picture.together) for lanes in alike.values())
    return Folded(replace(picture, lanes=lanes), tuple(number_of[lane.strip] for lane in picture.lanes))


def _shared(lanes: list[Lane], together: int) -> Lane:
    fullest = max(lanes, key=lambda lane: int(lane.memory_bytes.max(initial=0)))
    return replace(fullest, device=times(lanes[0].device, len(lanes) * together))
