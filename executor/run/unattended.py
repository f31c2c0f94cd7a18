"""Training that continues after a rank has died: all ranks are restarted from the newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.executor.checkpoints.checkpoint import Checkpoint, newest
from penstock.executor.run.local import RunReport, run_locally
from penstock.executor.run.rank_programs import Work
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument, NonfiniteLoss, RunFailed

Progress = Callable[[dict[str, Any]], None]


def run_unattended(
    work_after: Callable[[Checkpoint | None], Work],
    job: str,
    *,
    options: RunOptions,
    restarts: int = 0,
    on_progress: Progress | None = None,
    **more: Any,
) -> RunReport:
    """Run ``run_locally`` with the work after the checkpoint that ``options`` select.

    When ranks fail (RunFailed, except NonfiniteLoss), they are restarted up to ``restarts`` times, and ``on_progress``
    is called with ``restart {attempt, reason}``. The report has the losses of all steps since the start. Raises
    InvalidDocument for restarts without a checkpoint directory.
    """
    if restarts and options.checkpoint_directory is None:
        raise InvalidDocument("restarts continue from a checkpoint, but no checkpoint directory is given")
    notify = on_progress or (lambda event: None)
    losses: dict[int, float] = {}

    def listen(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            losses[event["step"]] = event["loss"]
        notify(event)

    for attempt in range(restarts + 1):
        checkpoint = newest(options.checkpoint_directory) if options.checkpoint_directory and options.resume else None
        try:
            report = run_locally(work_after(checkpoint), job, options=options, on_progress=listen, **more)
        except RunFailed as error:
            if attempt == restarts or isinstance(error, NonfiniteLoss):
                raise
            notify({"kind": "restart", "attempt": attempt + 1, "reason": str(error)})
            options = options.model_copy(update={"resume": "auto"})
        else:
            return _whole(report, losses)
    raise AssertionError("every attempt returns or raises")


def _whole(report: RunReport, losses: dict[int, float]) -> RunReport:
    """Return the report with the losses of earlier attempts."""
    if not losses:
        return report
    first = min(losses)
    return replace(report, first_step=first, losses=tuple(losses[step] for step in sorted(losses)))
