"""``penstock tune``: AvgPipe's micro-batches and pipelines, every setting run on ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.input_files import prepare_output, print_json, read_plan, write_document
from penstock.cli.options import MEASUREMENT, OUTPUT, AsJson, Directory, Job
from penstock.cli.panels import MEASURE

if TYPE_CHECKING:
    from penstock.planning.tune import Setting, Tried
    from penstock.schemas.plan import PlanFile

WARMUP_STEPS = 1
"""Iterations that a setting runs before it is timed."""


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("tune", rich_help_panel=MEASURE)(tune)


def tune(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Plan file of planner avgpipe; - is standard input.")],
    job: Job,
    batches: Annotated[
        int, typer.Option(min=1, help="Iterations that each setting is timed for.", rich_help_panel=MEASUREMENT)
    ] = 3,
    max_pipelines: Annotated[
        int, typer.Option(min=1, help="Largest number of parallel pipelines to try.", rich_help_panel=MEASUREMENT)
    ] = 2,
    directory: Directory = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File that the plan with the fastest setting is written to.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run every setting of AvgPipe's micro-batches and pipelines that fits, and keep the fastest.

    Example: penstock tune plan.json --job mytrain:job --batches 3 -o tuned.json
    """
    prepare_output(output)
    file = read_plan(plan)
    from penstock.cli.show import Screen
    from penstock.planning.tune import fastest, settings, traverse

    screen = Screen.of(quiet=as_json)
    candidates = settings(file, max_pipelines)
    where = Path.cwd() if directory is None else Path(directory)
    screen.say(f"{len(candidates)} settings, {batches} iterations each")
    tried = []
    for one in traverse(candidates, lambda setting_file: _iteration_ns(setting_file, job, where, batches)):
        tried.append(one)
        screen.say(_line(one, candidates))
    best = fastest(tried).setting
    if as_json:
        print_json([_figures(one) for one in tried])
    screen.say(f"fastest: {best.num_micro_batches} micro-batches, {best.num_pipelines} pipelines")
    write_document(best.file, output)


def _figures(one: Tried) -> dict[str, Any]:
    setting = one.setting
    return {
        "num_micro_batches": setting.num_micro_batches,
        "num_pipelines": setting.num_pipelines,
        "measured_ns": one.measured_ns,
        "judged_ns": setting.judged_ns,
        "by_profile": setting.by_profile,
    }


def _iteration_ns(file: PlanFile, job: str, directory: Path, batches: int) -> int:
    from penstock.cli.measure.measured import median_time_ns
    from penstock.executor.run.local import run_locally
    from penstock.planning.programs.lower import programs

    steps = WARMUP_STEPS + batches
    median = median_time_ns(run_locally(programs(file), job, directory=directory, steps=steps, seed=0).step_times_ns)
    assert median is not None
    return median


def _line(one: Tried, candidates: list[Setting]) -> str:
    from penstock.schemas.amounts import duration

    setting = one.setting
    marks = ["chosen by profile"] if setting.by_profile else []
    if setting.judged_ns == min(other.judged_ns for other in candidates):
        marks.append("judged fastest")
    measured, judged = duration(one.measured_ns), duration(setting.judged_ns)
    degrees = f"M {setting.num_micro_batches:4d}  N {setting.num_pipelines:2d}"
    return f"{degrees}  {measured} per global batch, judged {judged}  {', '.join(marks)}".rstrip()
