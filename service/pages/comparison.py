"""Tables of many plans: a sweep's cases, or chosen jobs, with the front of the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.planning.sweep import Case, answered, with_front
from penstock.report.blocks import Bar, Bars
from penstock.schemas.amounts import duration, percent
from penstock.schemas.api.jobs import JobOut, ResultOut
from penstock.schemas.api.sweep import SweepRow
from penstock.schemas.api.words import choice_words
from penstock.schemas.plan import Plan
from penstock.service.db.tables import ACTIVE
from penstock.service.pages.sources import Sources

MAX_JOBS = 200
NEWEST = 50
MAX_WORDS = 120
MAX_BARS = 40


@dataclass(frozen=True)
class Row:
    """A row of the table: the model it is for, and its numbers.

    ``several``: there are other models in the table; ``error``: the stated error of the plan's time, a share of it.
    """

    model: str
    row: SweepRow
    several: bool = False
    error: float = 0.0

    @property
    def name(self) -> str:
        """The name of its point on the chart."""
        row, model = self.row, f"{self.model}, " if self.several else ""
        schedule = "" if row.schedule == "auto" else f" with {row.schedule}"
        return f"{model}{row.planner}{schedule} on {row.topology}, batch {row.global_batch_size}"

    @property
    def choice(self) -> str:
        """The degrees and stages."""
        return choice_words(self.row)

    @property
    def method_words(self) -> str:
        """The planner, schedule and update rule that the case had left open."""
        method = self.row.method
        parts = () if method is None else (method.planner, method.schedule, method.update_rule)
        return (
            ", ".join(part.replace("_", " ") for part in dict.fromkeys(parts) if part not in self._fixed_choices) or "–"
        )

    @property
    def _fixed_choices(self) -> tuple[str, ...]:
        return (self.row.planner, self.row.schedule, *self.row.update_rules[: len(self.row.update_rules) == 1])


def of_sweep(sources: Sources, sweep_id: str) -> dict[str, Any]:
    """Return a sweep as a table. Raises NotFound."""
    sweep = sources.sweep(sweep_id)
    model = sources.swept_model(sweep_id)
    return {
        "title": f"{model}: {sweep.cases} plans compared",
        "lead": "One request, asked once for each combination.",
        "steps": [("/", "Overview"), ("/sweeps", "Sweeps")],
        "sweep": sweep,
        "others": [],
        **_table([Row(model, row) for row in sweep.rows]),
    }


def chosen(sources: Sources, job_ids: Sequence[str], plans: Sequence[str]) -> dict[str, Any]:
    """Return jobs and plans as one table. Raises NotFound."""
    jobs = [sources.job(job_id) for job_id in dict.fromkeys(job_ids[:MAX_JOBS])]
    cases = [_of_job(sources, job) for job in jobs] + [_of_plan(sources, plan) for plan in dict.fromkeys(plans)]
    rows = with_front([case.row for case in cases])
    several = len({case.model for case in cases}) > 1
    return {
        "title": "Plans compared",
        "lead": "Jobs side by side; the address of this page names them, so it can be sent to others.",
        "steps": [("/", "Overview"), ("/jobs", "Jobs")],
        "sweep": None,
        "named": [*(("job", one.id) for one in jobs), *(("plan", one) for one in plans)],
        "others": list(_others(sources, {job.id for job in jobs})),
        **_table([Row(case.model, row, several, case.error) for case, row in zip(cases, rows, strict=True)]),
    }


def _others(sources: Sources, named: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the newest jobs with a plan that are not in the table, in words."""
    for job in sources.jobs(None, NEWEST, "succeeded"):
        if job.id not in named and job.incumbent_ns is not None and "plan_file" in job.links:
            summary = sources.summary(job.request_hash)
            time = duration(job.incumbent_ns)
            words = (
                f"{summary.model} on {summary.cluster}, batch {summary.global_batch_size}, {summary.planner}: {time}"
            )
            yield job.id, words if len(words) <= MAX_WORDS else f"{words[: MAX_WORDS - 1]}…"


def _table(rows: list[Row]) -> dict[str, Any]:
    ended = sum(one.row.state not in ACTIVE for one in rows)
    plain = [one.row for one in rows]
    return {
        "rows": rows,
        "ended": ended,
        "working": ended < len(rows),
        "bars": _bars(rows),
        "last": "compare",
        "shows": {
            "model": len({one.model for one in rows}) > 1,
            "topology": len({row.topology for row in plain}) > 1,
            "batch": len({row.global_batch_size for row in plain}) > 1,
            "schedule": len({row.schedule for row in plain}) > 1,
            "rules": len({row.update_rules for row in plain}) > 1,
            "tokens": len({row.sequence_length for row in plain}) > 1,
            "degrees": any(row.degrees is not None for row in plain),
            "cost": any(row.cost_per_sample is not None for row in plain),
        },
    }


def _bars(rows: Sequence[Row]) -> Bars:
    """Return the time of each plan as a bar from zero with its stated error, the quickest first."""
    timed = [one for one in rows if one.row.time_per_global_batch_ns]
    timed.sort(key=lambda one: one.row.time_per_global_batch_ns or 0)
    bars = (
        Bar(
            one.name,
            (("time", float(time_ns := one.row.time_per_global_batch_ns or 0)),),
            f"{duration(time_ns)}{f' ± {percent(one.error)}' if one.error else ''}",
            error=time_ns * one.error,
            address=f"/plans/{one.row.plan_hash}" if one.row.plan_hash else "",
        )
        for one in timed[:MAX_BARS]
    )
    more = f" The quickest {MAX_BARS} of {len(timed)}." if len(timed) > MAX_BARS else ""
    return Bars(tuple(bars), f"Time of one global batch.{more}")


def _of_job(sources: Sources, job: JobOut) -> Row:
    case = _case(sources, job.id)
    if job.result is not None:
        row = answered(case, job.result).model_copy(update={"state": job.state, "job_id": job.id})
    else:
        why = job.error.detail if job.error else ""
        row = case.row(state=job.state, job_id=job.id, why=why, time_per_global_batch_ns=job.incumbent_ns)
    plan = job.result.plan if job.result is not None else None
    return Row(sources.summary(job.request_hash).model, row, error=_error(plan))


def _of_plan(sources: Sources, address: str) -> Row:
    plan = sources.store.plan(address)
    result = ResultOut(
        status="feasible", why=(), plan_hash=address, plan=plan, certificates=plan.certificates, seconds=0
    )
    row = answered(_case(sources, address), result).model_copy(update={"seconds": None})
    return Row(sources.summary(plan.request_hash).model, row, error=_error(plan))


def _error(plan: Plan | None) -> float:
    """Return the stated error of a plan's time, as a share; 0 without a plan."""
    return 0.0 if plan is None or plan.prediction is None else plan.prediction.expected_error


def _case(sources: Sources, plan_or_job: str) -> Case:
    request = sources.request_of(plan_or_job)
    assert isinstance(request.topology, str)
    return Case(request.model_copy(update={"topology": sources.store.topology(request.topology)}))
