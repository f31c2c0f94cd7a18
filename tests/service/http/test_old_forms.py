"""Every old form of a request still answers as the new one does, until the version in which it goes."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import httpx
import pytest
from packaging.version import Version

from penstock.service.http.compat import OLD_FORMS, OldForm
from penstock.service.http.routes.agents import SYNC_EXAMPLE
from penstock.service.http.samples import tiny_request


def _filled(path: str, ids: dict[str, str]) -> str:
    for name, value in ids.items():
        path = path.replace("{" + name + "}", value)
    return path


def _said(answer: httpx.Response) -> Any:
    """Status and body, without what is of each request alone."""
    if answer.headers.get("content-type") != "application/problem+json":
        return answer.status_code, answer.content
    return answer.status_code, {**answer.json(), "instance": None, "request_id": None}


@pytest.mark.cases(18)
@pytest.mark.parametrize("form", OLD_FORMS, ids=lambda form: f"{form.method} {form.path}")
def test_an_old_form_answers_as_the_new_one(http: httpx.Client, planned: Any, form: OldForm):
    nothing = "sweeps" in form.path or "runs" in form.path or form.method == "DELETE"
    ids = {"id": "none" if nothing else planned.id, "hash": planned.result.plan_hash, "rank": "0"}
    given: dict[str, Any] = {"json": SYNC_EXAMPLE} if "agents" in form.path else {}
    if form.path.endswith("export"):
        given = {"params": {"to": "csv"}}
    if form.path.endswith("events"):
        given = {"params": {"poll": "1"}}
    old = _filled(form.path, ids | {"id:job": ids["id"], "hash:job": planned.id})
    new = _filled(form.new_path, ids)
    assert "{" not in old + new
    answers = [http.request(form.method, path, **given) for path in (old, new)]
    assert _said(answers[0]) == _said(answers[1])
    assert answers[0].status_code in (200, 202, 404, 409), answers[0].text
    assert "there is nothing at" not in answers[0].text


def test_a_job_is_deleted_in_the_old_form(http: httpx.Client):
    job = http.post(
        "/v1/plans", json=tiny_request() | {"planner": "gpipe", "seed": 77}, headers={"Prefer": "wait=60"}
    ).json()
    assert http.delete(f"/v1/plans/{job['id']}").status_code == 204
    assert http.get(f"/v1/jobs/{job['id']}").status_code == 404


def test_old_forms_go_in_time_and_are_not_documented(http: httpx.Client):
    """Remove the forms of a version from `OLD_FORMS` when it is released."""
    assert all(Version(form.goes_in) > Version(version("penstock")) for form in OLD_FORMS)
    paths = http.get("/openapi.json").json()["paths"]
    assert "get" not in paths["/v1/plans"]
    assert not any(f"/{verb}" in path for path in paths for verb in ("cancel", "finish", "retry", "sync", "explain"))
