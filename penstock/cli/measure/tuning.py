"""``penstock tune``: AvgPipe's micro-batches and pipelines, every setting run on ranks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documents import print_json, read_plan, refuse_unwritable, write_document

if TYPE_CHECKING:
    from penstock.planning.tune import Setting, Tried
    from penstock.schemas.plan import PlanFile

WARMUP_STEPS = 1
"""Iterations that a setting runs before it is timed."""


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("tune")(tune)


def tune(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan of planner avgpipe, or - for standard input.")],
    model: Annotated[str, typer.Option(help="The job, as module:attribute (examples.gpt:job).")],
    batches: Annotated[int, typer.Option(min=1, help="Iterations that each setting is timed for.")] = 3,
    max_pipelines: Annotated[int, typer.Option(min=1, help="Most parallel pipelines.")] = 2,
    directory: Annotated[str | None, typer.Option(help="Where the training project lies.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write the plan with the fastest setting here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every setting and its times as JSON.")] = False,
) -> None:
    """Run every number of micro-batches and of pipelines that fits, beside what the judge and the profile say."""
    refuse_unwritable(output)
    file = read_plan(plan)
    from penstock.cli.show import Screen
    from penstock.planning.tune import fastest, settings, traverse

    screen = Screen.of(quiet=as_json)
    found = settings(file, max_pipelines)
    where = Path.cwd() if directory is None else Path(directory)
    screen.say(f"{len(found)} settings, {batches} iterations each")
    tried = []
    for one in traverse(found, lambda own: _iteration_ns(own, model, where, batches)):
        tried.append(one)
        screen.say(_line(one, found))
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


def _iteration_ns(file: PlanFile, model: str, directory: Path, batches: int) -> int:
    from penstock.cli.measure.measured import median_time_ns
    from penstock.executor.run.local import run_locally
    from penstock.planning import api

    steps = WARMUP_STEPS + batches
    median = median_time_ns(
        run_locally(api.programs(file), model, directory=directory, steps=steps, seed=0).step_times_ns
    )
    assert median is not None
    return median


def _line(one: Tried, found: list[Setting]) -> str:
    from penstock.report.words import duration

    setting = one.setting
    marks = ["chosen by profile"] if setting.by_profile else []
    if setting.judged_ns == min(other.judged_ns for other in found):
        marks.append("judged fastest")
    measured, judged = duration(one.measured_ns), duration(setting.judged_ns)
    degrees = f"M {setting.num_micro_batches:4d}  N {setting.num_pipelines:2d}"
    return f"{degrees}  {measured} per global batch, judged {judged}  {', '.join(marks)}".rstrip()
