"""``penstock plan`` and ``penstock compare``: one question from the command line, answered or tabulated."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import completion
from penstock.cli.documents import STANDARD, print_json, refuse_unwritable, write_document
from penstock.cli.kernels import tell_of_the_compiler
from penstock.cli.plan.asking import request_of
from penstock.cli.service.remote import Server, connect, refuse_here, solved_there

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.jobs import PlanComparison, ResultOut
    from penstock.schemas.plan import Plan, PlanFile
    from penstock.schemas.request import PlanRequest
    from penstock.solvers.model.result import Progress

EXIT_CODES = {"optimal": 0, "feasible": 2, "infeasible": 3, "none_found": 4, "time_limit": 4}

Profile = Annotated[str | None, typer.Option("--profile", "-p", help="A profile file, or - for standard input.")]
Topology = Annotated[str | None, typer.Option("--topology", "-t", help="A topology file, or - for standard input.")]
Model = Annotated[
    str | None, typer.Option(help="A shipped profile by name, instead of --profile.", autocompletion=completion.models)
]
Cluster = Annotated[
    str | None,
    typer.Option(
        help="A shipped topology, or NODESxDEVICESxKIND, instead of --topology.", autocompletion=completion.clusters
    ),
]
PipelineRun = Annotated[str | None, typer.Option("--pipeline-profile", help="A measured run, for avgpipe's tuning.")]
Request = Annotated[str | None, typer.Option("--request", help="A plan request; other options override its fields.")]
Batch = Annotated[int | None, typer.Option("--global-batch-size", "-b", help="Samples per step.")]
MicroBatch = Annotated[list[int] | None, typer.Option("--micro-batch-size", help="A candidate; may be repeated.")]
Recompute = Annotated[str | None, typer.Option(help="never, auto or always.")]
Codec = Annotated[
    str | None, typer.Option(help="auto: encode tensors on the way where it saves time; it changes numbers a little.")
]
Network = Annotated[str | None, typer.Option(help="shared (transfers compete) or private (as the papers do).")]
Optimizer = Annotated[str | None, typer.Option(help="sgd, momentum or adam.")]
TimeLimit = Annotated[float | None, typer.Option("--time-limit", help="Seconds.")]
Gap = Annotated[float | None, typer.Option(help="Good enough: a plan within this share of the bound.")]
MaxPlans = Annotated[int | None, typer.Option(help="Plans that each planner may have judged; needs no clock.")]
Rules = Annotated[
    list[str] | None, typer.Option("--update-rule", help="An update rule that plans may have, or all; may be repeated.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", help="FIRST-LAST=DEVICE[,DEVICE…]: no other device may hold these layers; may be repeated."),
]
Target = Annotated[
    str | None, typer.Option(help="Stay within what this trainer can express: megatron, torchtitan or deepspeed.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of every random choice.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="option=value of the planner; may be repeated.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes for a large request; by default as many as processors. The plan is the same."),
]
Planners = Annotated[
    list[str] | None, typer.Option(help="Only this one; may be repeated.", autocompletion=completion.planners)
]
Schedules = Annotated[
    list[str] | None, typer.Option(help="Only this one; may be repeated.", autocompletion=completion.schedules)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("plan")(plan)
    app.command("compare")(compare)


def plan(
    context: typer.Context,
    profile: Profile = None,
    topology: Topology = None,
    global_batch_size: Batch = None,
    model: Model = None,
    cluster: Cluster = None,
    request: Request = None,
    planner: Annotated[
        str | None, typer.Option(help="auto, dapple, dp, gpipe, …", autocompletion=completion.planners)
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="auto, or a schedule's name.", autocompletion=completion.schedules)
    ] = None,
    micro_batch_size: MicroBatch = None,
    recompute: Recompute = None,
    codec: Codec = None,
    network: Network = None,
    optimizer: Optimizer = None,
    time_limit: TimeLimit = None,
    gap: Gap = None,
    max_plans: MaxPlans = None,
    update_rule: Rules = None,
    pin: Pins = None,
    pipeline_profile: PipelineRun = None,
    target: Target = None,
    seed: Seed = None,
    set_option: Settings = None,
    workers: Workers = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Where the plan goes; - is standard output.")
    ] = None,
    as_json: AsJson = False,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="0 also for a plan that is not proven optimal.")
    ] = False,
    server: Server = None,
) -> None:
    """Find the best way to train a model on a cluster.

    Exits with 0 when the plan is proven optimal, 2 when it is not, 3 when it is proven that there is none, 4 when none
    was found or time ran out first.
    Ctrl-C ends the search, and writes the best plan so far.
    """
    asked = request_of(context.params)
    refuse_unwritable(output)
    from penstock.cli.show import Screen, show_answer, show_result

    screen = Screen.of(quiet=as_json or output == STANDARD)
    if server is None:
        result, file = _solved_here(asked, screen, workers, output)
    else:
        refuse_here(workers=workers)
        result, file = _solved_by(server, asked, screen)
    if file is not None:
        write_document(file, output)
    if as_json and output != STANDARD:
        print_json(result)
    (show_result if server is None else show_answer)(screen, asked if file is None else file.request, result)
    if file is not None and output not in (None, STANDARD):
        screen.say(f"written to {output}")
    code = EXIT_CODES[result.status]
    raise typer.Exit(0 if exit_zero and code == 2 else code)


def _solved_here(
    asked: PlanRequest, screen: Screen, workers: int | None, output: str | None
) -> tuple[ResultOut, PlanFile | None]:
    """Interrupted, the best plan so far is written."""
    one_thread()
    tell_of_the_compiler()
    from penstock.planning import api
    from penstock.schemas.plan import PlanFile

    reporter = Reporter(screen)
    try:
        result = api.solve(asked, reporter.incumbent, reporter.progress, workers)
    except KeyboardInterrupt:
        if reporter.best is not None and output is not None:
            write_document(PlanFile(plan=reporter.best, request=asked), output)
            screen.done()
            screen.say(f"the best plan so far, by {reporter.best.planner}, is written to {output}")
        raise
    return result, None if result.plan is None else PlanFile(plan=result.plan, request=asked)


def _solved_by(server: str, asked: PlanRequest, screen: Screen) -> tuple[ResultOut, PlanFile | None]:
    """Raises Conflict for a job that somebody has cancelled."""
    from penstock.schemas.errors import Conflict

    with connect(server) as client:
        job = solved_there(client, asked, screen)
        if job.result is None:
            raise Conflict(f"job {job.id} was {job.state}", remedy=f"penstock jobs retry {job.id} --server {server}")
        return job.result, None if job.result.plan is None else client.plans.file(job.id)


def compare(
    context: typer.Context,
    profile: Profile = None,
    topology: Topology = None,
    global_batch_size: Batch = None,
    model: Model = None,
    cluster: Cluster = None,
    request: Request = None,
    planner: Planners = None,
    schedule: Schedules = None,
    micro_batch_size: MicroBatch = None,
    recompute: Recompute = None,
    codec: Codec = None,
    network: Network = None,
    optimizer: Optimizer = None,
    time_limit: TimeLimit = None,
    gap: Gap = None,
    max_plans: MaxPlans = None,
    update_rule: Rules = None,
    pin: Pins = None,
    pipeline_profile: PipelineRun = None,
    target: Target = None,
    seed: Seed = None,
    set_option: Settings = None,
    workers: Workers = None,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Ask every planner the same question, and show their answers side by side.

    Planners whose update rule changes the mathematics of training take part once it is allowed: --update-rule all.
    """
    asked = request_of({**context.params, "planner": None, "schedule": None})
    from penstock.cli.show import Screen, show_comparison

    screen = Screen.of(quiet=as_json)
    rows, started = [], time.monotonic()
    for row in _rows(asked, planner or (), schedule or (), workers, server):
        rows.append(row)
        screen.progress(f"{time.monotonic() - started:.1f} s: {_row_line(row, rows)}")
    screen.done()
    if as_json:
        print(json.dumps([row.model_dump(mode="json") for row in rows], indent=1))
    show_comparison(screen, rows)


def _rows(
    asked: PlanRequest, planners: Sequence[str], schedules: Sequence[str], workers: int | None, server: str | None
) -> Iterator[PlanComparison]:
    if server is None:
        one_thread()
        tell_of_the_compiler()
        from penstock.planning import api

        yield from api.compare(asked, tuple(planners), tuple(schedules), workers)
        return
    refuse_here(workers=workers)
    with connect(server) as client:
        yield from client.plans.compare(asked, planners, schedules)


def _row_line(row: PlanComparison, rows: Sequence[PlanComparison]) -> str:
    """Who has just answered, and the best so far with its bound and gap."""
    from penstock.report.words import duration, percent

    said = f"{row.planner} with {row.schedule}: {row.status}" if row.schedule else f"not {row.planner}"
    best = min((each for each in rows if each.iteration_ns is not None), key=_time, default=None)
    if best is None or best.iteration_ns is None:
        return said
    bound = "" if best.bound_ns is None else f", bound {duration(best.bound_ns)}"
    gap = "" if best.gap is None else f", gap {percent(best.gap)}"
    return f"{said}; best {duration(best.iteration_ns)} by {best.planner}{bound}{gap}"


def _time(row: PlanComparison) -> int:
    return row.iteration_ns or 0


def one_thread() -> None:
    """Keep numpy from starting threads, which integers have no use for: a process with one thread may fork."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


class Reporter:
    """A line of progress: the best plan's time and whose it is, the bound, the gap, who is at work."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._started = time.monotonic()
        self.best: Plan | None = None

    def incumbent(self, plan: Plan) -> None:
        """A better plan was found."""
        self.best = plan

    def progress(self, progress: Progress) -> None:
        """Something is new."""
        from penstock.report.words import duration, percent

        best = "no plan yet"
        if progress.value_ns is not None and self.best is not None:
            best = f"{duration(progress.value_ns)} by {self.best.planner}"
        bound = f"bound {duration(progress.bound.bound_ns)}"
        gap = "" if progress.gap is None else f", gap {percent(progress.gap)}"
        working = f"; {', '.join(progress.working)}" if progress.working else ""
        self._screen.progress(f"{time.monotonic() - self._started:.1f} s: {best}, {bound}{gap}{working}")
