"""Tensor, context and expert parallelism in a trainer's file.

Where each device of the topology is a GPU, they are degrees of the layout. A device may also represent several GPUs
(``gpus``) with their common times and memory. Then a group of exactly that number is one device, and others are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.schemas.errors import Fault, UnsupportedRequest
from penstock.solvers.model.degrees import Degrees


class Stated(NamedTuple):
    """Degrees of a file, remarks on them, and the file's name and number of each degree above 1, by place."""

    degrees: Degrees
    remarks: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()


def degrees_in(
    source: str,
    groups: Mapping[str, int],
    experts: Mapping[str, int],
    gpus: int,
    place: Callable[[str], str],
) -> Stated:
    """Return the degrees, by the names that the file has for them, in the order of ``Degrees``.

    ``gpus`` is the number of GPUs that each device of the topology represents; ``place`` returns the place of a name in
    the file. Raises UnsupportedRequest where devices represent other groups than the file has.
    """
    if gpus != 1:
        return Stated(Degrees(), _refused(source, groups, experts, gpus, place))
    both = {**groups, **experts}
    degrees = Degrees(*both.values())
    named = tuple((f"{name} {degree}", place(name)) for name, degree in both.items() if degree > 1)
    return Stated(degrees, (), named)


def _refused(
    source: str, groups: Mapping[str, int], experts: Mapping[str, int], gpus: int, place: Callable[[str], str]
) -> tuple[str, ...]:
    """Return remarks on groups that devices represent. Raises UnsupportedRequest for others, and for spread experts."""
    tensor = next(iter(groups.values()), 1)
    spread = {name: degree for name, degree in experts.items() if degree not in (1, tensor)}
    spread |= {name: degree for name, degree in list(experts.items())[:1] if degree > 1}
    beyond = {name: degree for name, degree in groups.items() if degree > 1} | spread
    group = 1
    for degree in groups.values():
        group *= degree
    if not spread and group == gpus:
        return (f"each device of the topology represents {group} GPUs (tensor × context parallel)",)
    if not beyond:
        return (f"each device of the topology represents {gpus} GPUs; the file has no groups of GPUs",)
    stated = ", ".join(f"{name} {degree}" for name, degree in beyond.items())
    represented = f"devices of the topology represent {gpus} GPUs each" if gpus else "devices represent several GPUs"
    raise UnsupportedRequest(
        f"{source} has {stated}, but {represented}, not the file's groups",
        faults=tuple(Fault(place(name), f"{name} is {degree}", "degree") for name, degree in beyond.items()),
        remedy="a topology with a device for each GPU, or one whose devices represent the file's groups",
    )
