"""``penstock run``: train with a plan on this machine, and compare what was measured with what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documents import read_plan, refuse_unwritable, write_document

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.executor.launch import RunReport
    from penstock.schemas.plan import Plan, PlanFile
    from penstock.schemas.profile import ModelProfile


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("run")(run)


def run(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, or - for standard input.")],
    model: Annotated[str, typer.Option(help="The job, as module:attribute (examples.gpt:job).")],
    steps: Annotated[int, typer.Option(min=1, help="Global batches to train.")] = 5,
    check: Annotated[bool, typer.Option("--check", help="Compare loss and gradients with a single process.")] = False,
    trace: Annotated[str | None, typer.Option(help="Write what the ranks measured.")] = None,
    chrome_trace: Annotated[str | None, typer.Option("--chrome-trace", help="Both, for Perfetto.")] = None,
    directory: Annotated[str | None, typer.Option(help="Where the training project lies.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of parameters and data.")] = 0,
) -> None:
    """Train with a plan: one process per device, on this machine."""
    for target in (trace, chrome_trace):
        refuse_unwritable(target)
    file = read_plan(plan)
    from penstock import api
    from penstock.cli.show import Screen
    from penstock.executor.launch import run_locally
    from penstock.schemas.errors import RunFailed
    from penstock.schemas.profile import ModelProfile

    programs = api.programs(file)
    profile = file.request.profile
    assert isinstance(profile, ModelProfile)
    screen = Screen.of()
    screen.say(f"starting {len(programs)} ranks on this machine: {', '.join(p.device for p in programs)}")
    report = run_locally(
        programs,
        model,
        directory=Path.cwd() if directory is None else Path(directory),
        steps=steps,
        seed=seed,
        check=check,
        trace_steps=1,
        layers=[layer.name for layer in profile.layers],
        boundaries=_boundaries(profile),
        on_progress=lambda event: _progress(screen, event, steps),
    )
    screen.done()
    _write_traces(file, report, trace, chrome_trace)
    for line in measured_lines(file.plan, report.step_times_ns, report.losses, report.gradient_check):
        screen.say(line)
    if report.check_passed is False:
        raise RunFailed(
            f"the run does not train what one process trains: gradients {report.gradient_check:.3g} apart, loss "
            f"{report.loss_check:.3g}, where {report.gradient_tolerance:.3g} would be rounding"
        )


def _boundaries(profile: ModelProfile) -> list[list[list[Any]]] | None:
    """What crosses each cut, for the ranks to compare; a model may run in another precision than one not measured."""
    if profile.source.method != "measured":
        return None
    return [[[t.name, t.bytes_per_sample, t.gradient_bytes_per_sample] for t in cut] for cut in profile.boundaries]


def measured_lines(
    plan: Plan, step_times_ns: Sequence[int], losses: Sequence[float], gradient_check: float | None
) -> list[str]:
    """Losses, the measured time against the predicted one, and the comparison with a single process."""
    from penstock.report.words import duration

    lines = []
    if losses:
        lines.append(f"loss       {losses[0]:.6f} in the first step, {losses[-1]:.6f} in the last of {len(losses)}")
    median = median_time_ns(step_times_ns)
    if median is not None:
        lines.append(f"measured   {duration(median)} per global batch (median of {len(step_times_ns)})")
        if plan.prediction is not None:
            predicted = plan.prediction.time_per_global_batch_ns
            lines.append(f"predicted  {duration(predicted)}, {100 * (predicted / median - 1):+.1f} % against it")
    if gradient_check is not None:
        lines.append(f"gradients  {gradient_check:.3g} apart from a single process, relative to the largest")
    return lines


def median_time_ns(step_times_ns: Sequence[int]) -> int | None:
    """The median step; None for no step."""
    times = sorted(step_times_ns)
    return times[len(times) // 2] if times else None


def _write_traces(file: PlanFile, report: RunReport, trace: str | None, chrome_trace: str | None) -> None:
    """What the ranks measured, as a document, and beside the prediction for Perfetto."""
    if trace is None and chrome_trace is None:
        return
    from penstock.explaining import write_comparison
    from penstock.schemas.trace import Trace

    plan = file.plan
    document = Trace.parse(
        {
            "plan_hash": plan.content_hash(),
            "predicted_time_per_global_batch_ns": plan.prediction.time_per_global_batch_ns if plan.prediction else 0,
            "measured_times_per_global_batch_ns": report.step_times_ns,
            "losses": report.losses,
            "ranks": report.rank_traces,
            "plan_file": file,
        }
    )
    write_document(document, trace)
    if chrome_trace is not None:
        write_comparison(file, document, Path(chrome_trace))


def _progress(screen: Screen, event: dict[str, Any], steps: int) -> None:
    if event.get("kind") == "step":
        screen.progress(f"step {int(event['step']) + 1} of {steps}, loss {event.get('loss')}")
