"""Tensor, context and expert parallelism in a trainer's file: refused, except where devices represent such groups.

Times, memory and transfers are those of one device each; a device of the topology may represent several GPUs (``gpus``)
with times and memory of its own, and then for exactly such a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.schemas.errors import Fault, UnsupportedRequest


def refuse_degrees(
    source: str,
    degrees: Mapping[str, int],
    experts: Mapping[str, int],
    gpus: int,
    place: Callable[[str], str],
) -> tuple[str, ...]:
    """What to say of ``degrees``, by the names that the file has for them; all but ``experts`` are GPUs of a group.

    ``gpus``: how many each device of the topology represents; ``place`` of a name in the file. Raises
    UnsupportedRequest for all other groups, and for experts that are spread over replicas.
    """
    beyond = {name: degree for name, degree in {**degrees, **experts}.items() if degree > 1}
    group = 1
    for degree in degrees.values():
        group *= degree
    spread = any(degree > 1 for degree in experts.values())
    if not spread and group == gpus:
        said = f"each device of the topology represents {group} GPUs (tensor × context parallel)"
        return () if group == 1 else (said,)
    if not beyond:
        return (f"each device of the topology represents {gpus} GPUs; the file has no groups of GPUs",)
    said = ", ".join(f"{name} {degree}" for name, degree in beyond.items())
    remedy = "a job without experts spread over GPUs"
    if not spread:
        remedy = (
            f"a topology whose devices represent {group} GPUs each (gpus: {group}, with the memory of all), and a "
            "profile that was measured on such groups"
        )
    raise UnsupportedRequest(
        f"{source} has {said}: parallelism within layers is not planned yet, and a time for single GPUs would be wrong",
        faults=tuple(Fault(place(name), f"{name} is {degree}", "degree") for name, degree in beyond.items()),
        remedy=remedy,
    )
