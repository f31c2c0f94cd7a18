"""What a plan's page of the service adds to its view: how to take the plan, and how to get the same again."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from penstock.manifests import TARGETS
from penstock.report.baselines import baselines
from penstock.planning.explain import Judged
from penstock.planning.plan_schedules import schedule_csv
from penstock.report.device_names import num_used
from penstock.report.drawing.picture import Picture
from penstock.report.traffic import traffic
from penstock.report.view import view_of
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.service.pages.commands import command, python, uses


def view(file: PlanFile, found: Judged, explained: Explanation, drawn: Picture) -> dict[str, Any]:
    """What the page of a judged plan shows in addition to its timeline."""
    plan, allocation = found.judgement.plan, found.judgement.allocation
    assert plan.prediction is not None
    assert allocation is not None
    return {
        "view": view_of(
            file,
            plan,
            drawn,
            flows=traffic(found.problem, allocation, plan.prediction.time_per_global_batch_ns, plan.update_rule),
            names=[device.name for device in found.problem.devices],
            explanation=explained,
            faults=found.judgement.faults,
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
    """Return what is said of a plan that another version of Penstock made; None of one that this version made."""
    made, here = plan.versions.get("penstock"), version("penstock")
    if made is None or made == here:
        return None
    return (
        f"Penstock {made} made this plan, and this is {here}. All figures below are those of {here}; where they differ "
        "from what the plan states, it is said above. Plan again with changes asks this version."
    )


def _has_csv(file: PlanFile) -> bool:
    """Whether PyTorch's form of a schedule has words for this one."""
    try:
        schedule_csv(file)
    except (UnsupportedRequest, InvalidPlan):
        return False
    return True


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
