"""``penstock plan`` and ``penstock compare``: one request, solved by one planner or by all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.groups import grouped
from penstock.cli.input_files import STANDARD, prepare_output, print_json, write_document
from penstock.cli.kernels import compilation_shown, one_thread
from penstock.cli.options import (
    MODEL,
    OUTPUT,
    AsJson,
    Choice,
    Degrees,
    Limits,
    Output,
    Planner,
    Planners,
    Question,
    Request,
    Schedule,
    Schedules,
    Training,
    option_values,
)
from penstock.cli.panels import PLAN
from penstock.cli.plan.request_options import other_kernels_of, request_of
from penstock.cli.questions import ask
from penstock.cli.service.remote import Server, connect, refuse_here, solved_there

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.jobs import PlanComparison, ResultOut
    from penstock.schemas.plan import Plan, PlanFile
    from penstock.schemas.request import PlanRequest
    from penstock.solvers.model.result import Progress

EXIT_CODES = {"optimal": 0, "feasible": 0, "infeasible": 3, "none_found": 4, "time_limit": 4}
NOT_PROVEN = 2
"""The exit code of a plan that is not proven optimal, under ``--require-optimal``."""
NOT_DRAWN = "the timeline is left out, as its kernels are still to be compiled: penstock simulate draws it"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("plan", rich_help_panel=PLAN)(grouped(plan))
    app.command("compare", rich_help_panel=PLAN)(grouped(compare))


def plan(
    *,
    question: Question,
    request: Request = None,
    planner: Planner = None,
    schedule: Schedule = None,
    choice: Choice,
    training: Training,
    degrees: Degrees,
    limits: Limits,
    output: Output = None,
    as_json: AsJson = False,
    require_optimal: Annotated[
        bool,
        typer.Option(
            "--require-optimal", help="Exit with 2 when the plan is not proven optimal.", rich_help_panel=OUTPUT
        ),
    ] = False,
    as_table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="Also list the degrees that were compared: times, memory, bounds, why not.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Also show every stage, every bound, the timeline, and what was tried.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    server: Server = None,
) -> None:
    """Find the fastest plan for a model on a cluster, and prove how good it is.

    Exits with 0 for any plan, 3 when it is proven that no plan exists, 4 when
    none was found or the time limit came first. Ctrl-C ends the search; with -o
    the best plan so far is written.

    Example: penstock plan --example gpt2-small --cluster 2x4xV100 -b 64 -o plan.json
    """
    options = option_values(
        question, training, degrees, limits, choice, request=request, planner=planner, schedule=schedule
    )
    from penstock.planning.inputs import with_choices

    plan_request = with_choices(request_of(options))
    prepare_output(output)
    from penstock.cli.show import Screen, show_alternatives, show_answer, show_result, show_short

    screen = Screen.of(quiet=as_json or output == STANDARD)
    if server is None:
        result, file = _solved_here(plan_request, screen, choice.workers, output)
    else:
        refuse_here(workers=choice.workers)
        result, file = _solved_by(server, plan_request, screen)
    if file is not None:
        write_document(file, output)
    if as_json and output != STANDARD:
        print_json(result)
    drawn = server is None and (plan_request.termination.time_limit_ns is None or result.plan is None or _may_judge())
    answered = plan_request if file is None else file.request
    path = None if output == STANDARD else output
    if verbose:
        (show_result if drawn else show_answer)(screen, answered, result)
    else:
        show_short(screen, answered, result, path, simulate=drawn)
    if as_table:
        show_alternatives(screen, result)
    if verbose and not drawn and server is None:
        screen.say(NOT_DRAWN)
    if (line := other_kernels_of(plan_request)) is not None:
        screen.say(line)
    if verbose and file is not None and path is not None:
        screen.say(f"written to {path}")
    not_proven = require_optimal and result.status == "feasible"
    raise typer.Exit(NOT_PROVEN if not_proven else EXIT_CODES[result.status])


def _solved_here(
    request: PlanRequest, screen: Screen, workers: int | None, output: str | None
) -> tuple[ResultOut, PlanFile | None]:
    """Solve a request on this machine; after an interrupt, write the best plan so far."""
    one_thread()
    from penstock.questions.solve import solve
    from penstock.schemas.plan import PlanFile

    reporter = Reporter(screen)
    try:
        with compilation_shown(screen):
            result = solve(request, reporter.incumbent, reporter.progress, workers)
    except KeyboardInterrupt:
        screen.done()
        if reporter.best is not None and output is not None:
            write_document(PlanFile(plan=reporter.best, request=request), output)
            screen.say(f"the best plan so far, by {reporter.best.planner}, is written to {output}")
        elif reporter.best is not None:
            screen.say(f"the best plan so far, by {reporter.best.planner}, is lost: -o FILE would have kept it")
        raise
    file = None if result.plan is None else PlanFile(plan=result.plan, request=request, why=result.why)
    return result, file


def _may_judge() -> bool:
    """Return whether the timeline can be drawn at once; waiting for the compiler would exceed the time limit."""
    from penstock.solvers.judge.simulate import is_compiled

    return is_compiled()


def _solved_by(server: str, request: PlanRequest, screen: Screen) -> tuple[ResultOut, PlanFile | None]:
    """Solve a request on a service. Raises Conflict for a job that was cancelled."""
    from penstock.schemas.errors import Conflict

    with connect(server) as client:
        job = solved_there(client, request, screen)
        if job.result is None:
            raise Conflict(f"job {job.id} was {job.state}", remedy=f"penstock jobs retry {job.id} --server {server}")
        if job.result.plan is None:
            return job.result, None
        return job.result, client.plans.file(job.id).model_copy(update={"why": job.result.why})


def compare(
    *,
    question: Question,
    request: Request = None,
    planner: Planners = None,
    schedule: Schedules = None,
    choice: Choice,
    training: Training,
    degrees: Degrees,
    limits: Limits,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LAYOUT",
            help="Layout of yours to list too, such as tensor=8,pipeline=4,micro-batch=1. Repeatable.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Solve one request with every planner, and list their answers side by side.

    Planners whose update rule changes the mathematics of training take part
    with --update-rule all.

    Example: penstock compare --example gpt2-small --cluster 2x4xV100 -b 64
    """
    from penstock.cli.show import Screen, show_comparison
    from penstock.planning.inputs import with_choices
    from penstock.schemas.api.jobs import CompareRequest

    options = option_values(question, training, degrees, limits, choice, request=request)
    plan_request = with_choices(request_of(options))

    screen = Screen.of(quiet=as_json)
    rows: list[PlanComparison] = []

    def show(row: PlanComparison) -> None:
        rows.append(row)
        screen.progress(_row_line(row, rows))

    wanted = CompareRequest(
        request=plan_request,
        planners=tuple(planner or ()),
        schedules=tuple(schedule or ()),
        layouts=tuple(layout or ()),
    )
    with compilation_shown(screen):
        ask("compare", wanted, server, show, workers=choice.workers)
    screen.done()
    if as_json:
        print(json.dumps([row.model_dump(mode="json") for row in rows], indent=1))
    show_comparison(screen, rows)


def _row_line(row: PlanComparison, rows: Sequence[PlanComparison]) -> str:
    """Return a line with the latest answer, and with the best plan so far, its bound and gap."""
    from penstock.schemas.amounts import duration, percent

    latest = f"{row.planner} with {row.schedule}: {row.status}" if row.schedule else f"not {row.planner}"
    best = min((each for each in rows if each.iteration_ns is not None), key=_time, default=None)
    if best is None or best.iteration_ns is None:
        return latest
    bound = "" if best.bound_ns is None else f", bound {duration(best.bound_ns)}"
    gap = "" if best.gap is None else f", gap {percent(best.gap)}"
    return f"{latest}; best {duration(best.iteration_ns)} by {best.planner}{bound}{gap}"


def _time(row: PlanComparison) -> int:
    return row.iteration_ns or 0


class Reporter:
    """Lines of progress: the best plan's time and planner, the bound, the gap, and the planners at work."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.best: Plan | None = None

    def incumbent(self, plan: Plan) -> None:
        """Record a better plan."""
        self.best = plan

    def progress(self, progress: Progress) -> None:
        """Show the progress of the search."""
        self._screen.progress(progress.in_words("" if self.best is None else self.best.planner))
