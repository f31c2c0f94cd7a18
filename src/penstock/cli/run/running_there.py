"""``penstock run --server``: training on the agents of a service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cli.service.remote import connect, is_file, plan_there

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.jobs import RunOut
    from penstock.schemas.api.run_options import RunOptions
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.trace import Trace


def run_there(
    server: str,
    screen: Screen,
    plan: str,
    model: str,
    options: RunOptions,
    *,
    restarts: int,
    traced: bool,
    **more: Any,
) -> tuple[PlanFile, RunOut, Trace | None]:
    """Train on the agents whose devices the plan names; ``more``: steps, seed, check and trace_steps.

    Raises the error that ended the run, and RunFailed for a run that was cancelled.
    """
    from penstock.schemas.errors import RunFailed

    with connect(server) as client:
        file = plan_there(client, plan)
        source = file if is_file(plan) else file.plan.content_hash()
        progress = RunProgress(screen)
        run = client.runs.create(source, model, options=options, max_restarts=restarts, on_change=progress, **more)
        screen.done()
        if run.state != "succeeded":
            raise RunFailed(f"run {run.id} was {run.state}")
        return file, run, client.runs.trace(run.id) if traced else None


class RunProgress:
    """The display of a run: its state on a line that stays, its steps on a line that is replaced."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._state = ""

    def __call__(self, run: RunOut) -> None:
        """Show a change of the run."""
        from penstock.schemas.amounts import number

        if run.state != self._state:
            self._state = run.state
            self._screen.done()
            self._screen.say(f"run {run.id} on {', '.join(run.agents) or 'no agent yet'}: {run.state}")
        loss = next((each for each in reversed(run.losses) if each is not None), None)
        if run.steps_done and loss is not None:
            self._screen.progress(f"step {run.steps_done} of {run.steps}, loss {number(loss, '.6g')}")
