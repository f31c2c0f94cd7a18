"""``penstock run``: train with a plan on this machine, and compare what was measured with what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documents import read_plan, write_document

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.plan import Plan


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("run")(run)


def run(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, or - for standard input.")],
    model: Annotated[str, typer.Option(help="The job, as module:attribute (examples.gpt:job).")],
    steps: Annotated[int, typer.Option(min=1, help="Global batches to train.")] = 5,
    check: Annotated[bool, typer.Option("--check", help="Compare loss and gradients with a single process.")] = False,
    trace: Annotated[str | None, typer.Option(help="Write what the ranks measured.")] = None,
    chrome_trace: Annotated[str | None, typer.Option("--chrome-trace", help="The same for Perfetto.")] = None,
    directory: Annotated[str | None, typer.Option(help="Where the training project lies.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of parameters and data.")] = 0,
) -> None:
    """Train with a plan: one process per device, on this machine."""
    file = read_plan(plan)
    from penstock import api
    from penstock.cli.show import Screen
    from penstock.executor.launch import run_locally

    programs = api.programs(file)
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
        on_progress=lambda event: _progress(screen, event, steps),
    )
    screen.done()
    _write_traces(file, report, trace, chrome_trace)
    for line in measured_lines(file.plan, report.step_times_ns, report.losses, report.gradient_check):
        screen.say(line)


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
        lines.append(f"measured   {duration(median)} per global batch (median, the first step left out)")
        if plan.prediction is not None:
            predicted = plan.prediction.time_per_global_batch_ns
            lines.append(f"predicted  {duration(predicted)}, {100 * (predicted / median - 1):+.1f} % against it")
    if gradient_check is not None:
        lines.append(f"gradients  {gradient_check:.3g} apart from a single process, relative to the largest")
    return lines


def median_time_ns(step_times_ns: Sequence[int]) -> int | None:
    """The median step, without the first, which pays for the start; None for no step."""
    times = sorted(step_times_ns[1:] or step_times_ns)
    return times[len(times) // 2] if times else None


def _progress(screen: Screen, event: dict[str, Any], steps: int) -> None:
    if event.get("kind") == "step":
        screen.progress(f"step {int(event['step']) + 1} of {steps}, loss {event.get('loss')}")
