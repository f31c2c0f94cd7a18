"""``penstock plan`` and ``penstock compare``: one question from the command line, answered or tabulated."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.asking import request_of
from penstock.cli.documents import STANDARD, print_json, refuse_unwritable, write_document

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.plan import Plan
    from penstock.solvers.result import Progress

EXIT_CODES = {"optimal": 0, "feasible": 2, "infeasible": 3, "time_limit": 4}

Profile = Annotated[str | None, typer.Option("--profile", "-p", help="A profile file, or - for standard input.")]
Topology = Annotated[str | None, typer.Option("--topology", "-t", help="A topology file, or - for standard input.")]
Model = Annotated[str | None, typer.Option(help="A shipped profile by name, instead of --profile.")]
Cluster = Annotated[str | None, typer.Option(help="A shipped topology, or NODESxDEVICESxKIND, instead of --topology.")]
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
Seed = Annotated[int | None, typer.Option(help="Seed of every random choice.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="option=value of the planner; may be repeated.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes for a large request; by default as many as processors. The plan is the same."),
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
    planner: Annotated[str | None, typer.Option(help="auto, dapple, dp, gpipe, …")] = None,
    schedule: Annotated[str | None, typer.Option(help="auto, or a schedule's name.")] = None,
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
) -> None:
    """Find the best way to train a model on a cluster.

    Exits with 0 when the plan is proven optimal, 2 when it is not, 3 when there is none, 4 when time ran out first.
    """
    asked = request_of(context.params)
    one_thread()
    from penstock import api
    from penstock.cli.show import Screen, show_result
    from penstock.schemas.plan import PlanFile

    refuse_unwritable(output)
    screen = Screen.of(quiet=as_json or output == STANDARD)
    reporter = Reporter(screen)
    result = api.solve(asked, reporter.incumbent, reporter.progress, workers)
    if result.plan is not None:
        write_document(PlanFile(plan=result.plan, request=asked), output)
    if as_json and output != STANDARD:
        print_json(result)
    show_result(screen, asked, result)
    if result.plan is not None and output not in (None, STANDARD):
        screen.say(f"written to {output}")
    code = EXIT_CODES[result.status]
    raise typer.Exit(0 if exit_zero and code == 2 else code)


def compare(
    context: typer.Context,
    profile: Profile = None,
    topology: Topology = None,
    global_batch_size: Batch = None,
    model: Model = None,
    cluster: Cluster = None,
    request: Request = None,
    planner: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    schedule: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
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
    seed: Seed = None,
    set_option: Settings = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Ask every planner the same question, and show their answers side by side.

    Planners whose update rule changes the mathematics of training take part once it is allowed: --update-rule all.
    """
    asked = request_of({**context.params, "planner": None, "schedule": None})
    one_thread()
    from penstock import api
    from penstock.cli.show import Screen, show_comparison

    screen = Screen.of(quiet=as_json)
    rows = []
    for row in api.compare(asked, tuple(planner or ()), tuple(schedule or ()), workers):
        rows.append(row)
        screen.progress(f"{row.planner} with {row.schedule}: {row.status}" if row.schedule else f"not {row.planner}")
    screen.done()
    if as_json:
        print(json.dumps([row.model_dump(mode="json") for row in rows], indent=1))
    show_comparison(screen, rows)


def one_thread() -> None:
    """Keep numpy from starting threads, which integers have no use for: a process with one thread may fork."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


class Reporter:
    """A line of progress: the best plan's time and whose it is, the bound, the gap, who is at work."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._started = time.monotonic()
        self._planner = ""

    def incumbent(self, plan: Plan) -> None:
        """A better plan was found."""
        self._planner = plan.planner

    def progress(self, progress: Progress) -> None:
        """Something is new."""
        from penstock.report.words import duration, percent

        best = "no plan yet"
        if progress.value_ns is not None:
            best = f"{duration(progress.value_ns)} by {self._planner}"
        bound = f"bound {duration(progress.bound.bound_ns)}"
        gap = "" if progress.gap is None else f", gap {percent(progress.gap)}"
        working = f"; {', '.join(progress.working)}" if progress.working else ""
        self._screen.progress(f"{time.monotonic() - self._started:.1f} s: {best}, {bound}{gap}{working}")
