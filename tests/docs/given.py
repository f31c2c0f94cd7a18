"""The names that a page's Python takes for granted, by page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import penstock
from penstock.examples import catalogue
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.api.sweep import SweepRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest

Find = Callable[[str], Any]


def _agents(find: Find) -> dict[str, Any]:
    return {"client": find("client"), "plan": PlanFile.read("other-plan.json"), "RunOptions": RunOptions}


def _programs(find: Find) -> dict[str, Any]:
    more = {"update_rules": ["elastic_averaging"], "planner": "avgpipe"}
    return {"file": penstock.plan("profile.json", "cluster.yaml", global_batch_size=2, **more).file}


def _service(find: Find) -> dict[str, Any]:
    return {"request": PlanRequest.read("request.json").model_copy(update={"planner": "dp"})}


def _sweeps(find: Find) -> dict[str, Any]:
    request = _service(find)["request"]
    over = {"global_batch_sizes": [64]}
    return {"request": SweepRequest.parse({"request": request.model_dump(mode="json"), "over": over})}


def _other_trainers(find: Find) -> dict[str, Any]:
    profile, topology = catalogue.profile("gpt"), catalogue.cluster("1x2xV100")
    answer = penstock.plan(profile, topology, global_batch_size=16, planner="dapple", target=None)
    return {"request": answer.file.request, "answer": answer}


NAMES: dict[str, Callable[[Find], dict[str, Any]]] = {
    "docs/launching.md": _agents,
    "docs/service.md": _service,
    "docs/planning.md": _sweeps,
    "docs/running.md": _programs,
    "docs/trainers.md": _other_trainers,
}
