"""Check of codecs for ``verify``: both ends agree, something is encoded, and the conversion speed is known."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem


def check_codecs(problem: Problem, allocation: Allocation, update_rule: str) -> Iterator[str]:
    """Yield the faults of an allocation's codecs, as sentences."""
    for s, stage in enumerate(allocation.stages):
        before, other = allocation.previous(s), allocation.next(s)
        if stage.coded[0] != (before is not None and allocation.stages[before].coded[1]):
            yield f"Stage {s} and the one before it do not agree whether their edge has a codec."
        if not stage.coded[1]:
            continue
        if other is None or problem.encodable[stage.last][0] == 0:
            yield f"The edge after stage {s} has a codec, but nothing crosses it that can be encoded."
        holders = stage.devices if other is None else (*stage.devices, *allocation.stages[other].devices)
        unknown = sorted({problem.devices[d].kind for d in holders} - problem.codec_speeds.keys())
        if unknown:
            yield f"The edge after stage {s} has a codec; how fast {unknown[0]!r} converts is not in the profile."
    if update_rule == "elastic_averaging" and any(stage.coded[1] for stage in allocation.stages):
        yield "Codecs are not judged where pipelines average."
