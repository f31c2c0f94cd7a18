"""A judged plan with the programs of its ranks, as the service stores it for a run; nothing heavy is loaded before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.plan import PlanFile
from penstock.schemas.program import Texts


@dataclass(frozen=True)
class Lowered:
    """A judged plan and its programs: ``devices[r]`` is the plan's name for rank r's device.

    ``programs[r]``: rank r's, one per length of a segment; ``segments``: their numbers in the order of the training,
    none where one program trains each step.
    """

    file: PlanFile
    plan_hash: str
    devices: tuple[str, ...]
    programs: tuple[tuple[Mapping[str, Any], ...], ...]
    segments: tuple[int, ...] = ()


def lower(file: PlanFile, options: RunOptions | None = None, steps: int = 1) -> Lowered:
    """Return the plan with its prediction, and its programs for a run of ``steps``.

    Raises InvalidPlan when it cannot be run.

    Programs of periodic plans train from one halt of the run to the next; there is one per distinct length.
    """
    from penstock.planning.judge import simulated
    from penstock.planning.programs.segment_programs import work_after

    judged = file
    if file.plan.prediction is None:
        judged = PlanFile(plan=simulated(file).plan, request=file.request)
    work = work_after(judged, None, steps, options or RunOptions())
    texts = Texts()
    return Lowered(
        file=judged,
        plan_hash=judged.plan.content_hash(),
        devices=tuple(program.device for program in work.programs[0]),
        programs=tuple(tuple(part.to_json(texts) for part in parts) for parts in zip(*work.programs, strict=True)),
        segments=work.segments or (),
    )
