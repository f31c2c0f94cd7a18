"""The actions of forms and buttons, and the values that pages of plans and what-ifs show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal
from urllib.parse import parse_qs

from fastapi import Request

from penstock.planning.inputs import with_open_degrees, with_quick_planner
from penstock.report.drawing.figure import fetched_figure
from penstock.schemas.amounts import exact
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.api.sweep import SweepRequest
from penstock.schemas.document import OTHER_VERSION
from penstock.schemas.errors import Conflict, InvalidDocument, NotFound, PenstockError
from penstock.schemas.options.planning import PLAN_OPTIONS
from penstock.schemas.plan import PlanFile
from penstock.service.pages import form as forms
from penstock.service.pages import timelines
from penstock.service.pages.form import Faults, Values
from penstock.service.pages.sources import Sources
from penstock.service.problems import TooLarge

JobVerb = Literal["cancel", "finish", "retry"]
MAX_FIELDS = 500
MAX_SHOWN_AGAIN = 100_000
"""Characters of a refused plan file that are sent back to be edited."""
LABELS = {
    **{name: option.label for name, option in PLAN_OPTIONS.items()},
    "profile_text": "Profile of your own",
    "topology_text": "Topology of your own",
    "model": "Model",
    "cluster": "Cluster",
}
CHANGES = ("bandwidth=2", "bandwidth=0.5", "memory=2", "devices=+8", "global-batch=2", "recompute=here")


@dataclass(frozen=True)
class Outcome:
    """The address that a form leads to, or the values with which it is shown again."""

    goes_to: str | None = None
    shown: dict[str, Any] = field(default_factory=dict)


async def posted(request: Request) -> Values:
    """Read the fields of a form. Raises TooLarge."""
    limit = request.app.state.service.settings.max_body_bytes
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise TooLarge(f"the form is larger than {exact(limit)}", remedy="POST the documents to /v1/profiles first")
    try:
        return parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise TooLarge(f"the form has more than {MAX_FIELDS} fields") from None


def form(sources: Sources, query: Values) -> dict[str, Any]:
    """Return the form as it is opened. Raises NotFound for an unknown id."""
    return _shown(sources, forms.first_values(sources, query), Faults())


def submit(sources: Sources, values: Values) -> Outcome:
    """Submit a plan request: go on to a stored plan, otherwise to the job, or return the faults of the form."""
    try:
        job = sources.submit(with_open_degrees(forms.request_of(sources, values)))
    except PenstockError as error:
        return _again(sources, values, error)
    return Outcome(f"/plans/{job.result.plan_hash}" if job.result and job.result.plan_hash else f"/jobs/{job.id}")


def submit_sweep(sources: Sources, values: Values) -> Outcome:
    """Submit every combination: go on to the table, or return the faults of the form."""
    try:
        request = with_open_degrees(forms.request_of(sources, values))
        over = forms.axes_of(sources, values, request)
        sweep = sources.submit_sweep(
            SweepRequest(request=request if over.planners else with_quick_planner(request), over=over)
        )
    except PenstockError as error:
        return _again(sources, values, error)
    return Outcome(f"/sweeps/{sweep.id}")


def open_plan(sources: Sources, values: Values) -> Outcome:
    """Store a plan file and go on to its page, or return its faults."""
    text = values.get("plan_text", [""])[0]
    try:
        if not text.strip():
            raise InvalidDocument("no plan was given", remedy="choose a plan file, or paste its text")
        return Outcome(f"/plans/{sources.keep(PlanFile.parse_json(text, origin='this file'))}")
    except PenstockError as error:
        made_by = _other_version(text)
        remedy = error.remedy or (OTHER_VERSION if made_by else "choose the whole file that `penstock plan -o` wrote")
        shown = text if len(text) <= MAX_SHOWN_AGAIN else ""
        return Outcome(shown={"error": error, "made_by": made_by, "remedy": remedy, "text": shown})


def _other_version(text: str) -> str | None:
    """Return the version of Penstock that a refused plan file names; None for no version, or this one."""
    try:
        written_by = json.loads(text)["plan"]["versions"]["penstock"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return str(written_by) if written_by != version("penstock") else None


def on_job(sources: Sources, job_id: str, verb: JobVerb) -> None:
    """Cancel, finish or retry. Raises NotFound and Conflict."""
    if verb == "retry":
        sources.retry(job_id)
    else:
        sources.stop(job_id, verb)


def plan(sources: Sources, plan_or_job: str) -> dict[str, Any] | None:
    """Return the values of a plan's page; None for a job without a plan. Raises NotFound and InvalidPlan."""
    from penstock.report.view import compared_degrees, search  # the judge comes with it

    try:
        address = sources.plan_hash(plan_or_job)
    except Conflict:
        return None
    shown = timelines.plan_view(sources, address)
    answer = sources.answer_with(plan_or_job, address, shown["request_hash"])
    further = [search(answer.why)] if answer and answer.why else []
    further += [compared_degrees(answer.alternatives)] if answer and answer.alternatives else []
    return {
        **shown,
        "view": shown["view"].having(*further),
        "id": address,
        "timeline": fetched_figure(f"/plans/{address}/timeline"),
    }


def plan_timeline(sources: Sources, plan_or_job: str, part: timelines.Part | None) -> bytes:
    """Return a plan's timeline as JSON. Raises NotFound, Conflict and InvalidPlan."""
    return timelines.as_json(timelines.of_plan(sources, sources.plan_hash(plan_or_job), part))


def run_timeline(sources: Sources, run_id: str, part: timelines.Part | None) -> bytes:
    """Return a run's timelines as JSON. Raises NotFound."""
    return timelines.as_json(timelines.of_run(sources, run_id, part))


def whole_request(sources: Sources, plan_or_job: str) -> bytes:
    """Return a request with its documents inline. Raises NotFound."""
    return sources.store.resolve(sources.request_of(plan_or_job)).canonical_json()


def what_if(sources: Sources, plan_or_job: str, changes: Sequence[str], choices: Sequence[str]) -> dict[str, Any]:
    """Return the results of changed requests and other degrees; the usual ones where the form names none.

    Raises NotFound and Conflict; what cannot be tried is said on the page.
    """
    from penstock.report.explained import what_ifs_bars, what_ifs_table, why_not_bars, why_not_table

    address = sources.plan_hash(plan_or_job)
    file = sources.store.plan_file(address)
    tried = [text for change in changes for text in change.split()]
    others = [text for choice in choices for text in choice.split()]
    usual = not tried and not others
    explained: Explanation | None = None
    error: PenstockError | None = None
    try:
        explained = sources.explanation(file, *((["all"], ["default"]) if usual else (tried, others)))
    except NotFound:
        raise
    except PenstockError as problem:
        error = problem
    what_ifs, why_not = (explained.what_ifs, explained.why_not) if explained else ((), ())
    return {
        "id": address,
        "model": sources.summary(file.plan.request_hash).model,
        "cluster": sources.summary(file.plan.request_hash).cluster,
        "tried": " ".join(tried),
        "others": " ".join(others),
        "explanation": explained,
        "error": error,
        "changes": CHANGES,
        "what_ifs": (what_ifs_bars(what_ifs), what_ifs_table(what_ifs)) if what_ifs else (),
        "why_not": [(other, why_not_bars(other), why_not_table(other)) for other in why_not],
    }


def as_file(name: str) -> dict[str, str]:
    """Return the headers of a file to be stored; its own styles and scripts may run, and nothing else."""
    return {
        "Content-Disposition": f'inline; filename="{name}"',
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "img-src data:; frame-ancestors 'none'; sandbox allow-scripts",
        "X-Content-Type-Options": "nosniff",
    }


def _again(sources: Sources, values: Values, error: PenstockError) -> Outcome:
    planner = values.get("planner", [""])[0]
    return Outcome(shown=_shown(sources, values, Faults.of(error, planner)))


def _shown(sources: Sources, values: Values, faults: Faults) -> dict[str, Any]:
    offered = forms.choices()
    model, again = values.get("model", [""])[0], values.get("from", [""])[0]
    models: Iterable[tuple[str, str]] = [(name, name) for name in offered["models"]]
    if model.startswith("sha256:"):
        models = [(model, "as before"), *models]
    return {
        **offered,
        "values": values,
        "faults": faults,
        "labels": LABELS,
        "model_choices": models,
        "schedule_choices": [(name, name) for name in offered["schedules"]],
        "option_choices": lambda choices: [(str(choice), str(choice)) for choice in choices],
        "groups": forms.groups(values, faults),
        "opened": {name.split(".")[1] for name in (*values, *faults.fields) if _is_given_option(name, values, faults)},
        "again": again,
        "again_at": f"/plans/{again}" if again.startswith("sha256:") else f"/jobs/{again}",
        "compares": any(any(values.get(name, ())) or faults.fields.get(name) for name in forms.COMPARED),
    }


def _is_given_option(name: str, values: Values, faults: Faults) -> bool:
    return name.startswith("option.") and (name in faults.fields or any(values.get(name, ())))
