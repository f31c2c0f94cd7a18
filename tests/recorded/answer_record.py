"""A request's answer as it is recorded: what a reader would look at in full, and a digest of the rest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from request_list import request_of

from penstock.questions.solve import solve
from penstock.schemas.errors import PenstockError
from penstock.schemas.plan import Plan

Record = dict[str, Any]


def answer_of(name: str, workers: int) -> Record:
    """Return the normalised answer to a recorded request: a result, or its refusal."""
    request = request_of(name)
    try:
        result = solve(request, workers=workers)
    except PenstockError as error:
        return {"request_hash": request.content_hash(), "error": refusal(error)}
    answer = result.model_dump(mode="json", exclude={"plan", "plan_hash", "seconds"})
    plan = None if result.plan is None else plan_record(result.plan)
    return {"request_hash": request.content_hash(), **answer, "plan": plan}


def refusal(error: PenstockError) -> Record:
    """Return an error with its words and codes."""
    faults = [{"pointer": fault.pointer, "detail": fault.detail, "code": fault.code} for fault in error.faults]
    codes = {"code": error.code, "status": error.status, "exit_code": error.exit_code}
    return {**codes, "detail": error.detail, "remedy": error.remedy, "errors": faults}


def plan_record(plan: Plan) -> Record:
    """Return a plan without versions and request; operations and the devices' numbers are in the digest alone.

    Its certificates are the result's certificates.
    """
    document = plan.model_dump(mode="json", exclude={"certificates", "request_hash", "versions", "schema_version"})
    schedule, prediction = document["schedule"], document["prediction"]
    digested = {"rows": schedule.pop("rows"), "pattern": schedule.pop("pattern"), "devices": prediction.pop("devices")}
    return {**document, "digest": digest(digested)}


def digest(value: Any) -> str:
    """Return the start of the SHA-256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
