"""The parts that the service's page of a plan adds to its view: commands that use the plan, or make it again."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from penstock.manifests import TARGETS
from penstock.planning.explain import Judged
from penstock.planning.plan_schedules import schedule_csv
from penstock.report.baselines import baselines
from penstock.report.device_names import num_used
from penstock.report.drawing.picture import Picture
from penstock.report.traffic import traffic
from penstock.report.view import view_of
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.service.pages.commands import command, python, uses


def view(file: PlanFile, judged: Judged, explained: Explanation, drawn: Picture) -> dict[str, Any]:
    """Return the values of a judged plan's page besides its timeline."""
    plan, allocation = judged.judgement.plan, judged.judgement.allocation
    assert plan.prediction is not None
    assert allocation is not None
    return {
        "view": view_of(
            file,
            plan,
            drawn,
            flows=traffic(judged.problem, allocation, plan.prediction.time_per_global_batch_ns, plan.update_rule),
            names=[device.name for device in judged.problem.devices],
            explanation=explained,
            faults=judged.judgement.faults,
            others=baselines(file.request),
        ),
        "address": file.plan.content_hash(),
        "request_hash": plan.request_hash,
        "other_version": other_version(plan),
        "has_csv": _has_csv(file),
        "uses": uses(num_used(plan)),
        "targets": _listed([name for name in TARGETS if name not in ("sbatch", "jobset")]),
        "command": command(file.request),
        "python": python(file.request),
    }


def other_version(plan: Plan) -> str | None:
    """Return the notice about a plan of another version of Penstock; None for a plan of this version."""
    written_by, here = plan.versions.get("penstock"), version("penstock")
    if written_by is None or written_by == here:
        return None
    return (
        f"Penstock {written_by} made this plan, and this is {here}. All figures below are those of {here}; where they "
        "differ from what the plan states, it is said above. Plan again with changes asks this version."
    )


def _has_csv(file: PlanFile) -> bool:
    """Return whether PyTorch's CSV can express the schedule."""
    try:
        schedule_csv(file)
    except (UnsupportedRequest, InvalidPlan):
        return False
    return True


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
