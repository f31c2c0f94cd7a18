"""The report of rank 0 about a launch, from its events and from the final events of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.executor.launched.rank_places import Presence
from penstock.executor.run.local import other_training
from penstock.schemas.errors import RunFailed
from penstock.schemas.quantities import spell
from penstock.schemas.ranks.bundle import JobBundle, LaunchReport
from penstock.schemas.trace import first_difference, summed

Event = Mapping[str, Any]


def launch_report(
    bundle: JobBundle,
    launcher: str,
    model: str,
    places: Sequence[Presence],
    events: Sequence[Event],
    done: Sequence[Event | None],
) -> LaunchReport:
    """Build the report. ``places``, ``done``: one entry for each rank; ``events``: rank 0's events, in their order."""
    steps, resumed, saved, evaluated = (
        [event for event in events if event["kind"] == kind] for kind in ("step", "resumed", "checkpoint", "evaluation")
    )
    first_step = resumed[-1]["step"] if resumed else 0
    times_ns = [event["time_ns"] // bundle.batches_per_step for event in steps]
    times_ns = times_ns[1:] if len(times_ns) > 1 else times_ns
    return LaunchReport.parse(
        {
            "plan_hash": bundle.plan_hash,
            "launcher": launcher,
            "model": model,
            "state": "left" if done[0] is None else "succeeded",
            "first_step": first_step,
            "steps_done": first_step + len(steps),
            "losses": [spell(event["loss"]) for event in steps],
            "step_times_ns": times_ns,
            "predicted_time_per_global_batch_ns": bundle.predicted_time_per_global_batch_ns,
            "measured_time_per_global_batch_ns": sorted(times_ns)[len(times_ns) // 2] if times_ns else None,
            "gradient_check": None if done[0] is None else done[0]["gradient_check"],
            "collectives": summed(one["collectives"] for one in done if one is not None),
            "collectives_differ": first_difference(one["collectives_differ"] for one in done if one is not None),
            "evaluations": [{"step": event["step"], "loss": spell(event["loss"])} for event in evaluated],
            "checkpoint_step": saved[-1]["step"] if saved else None,
            "ranks": [
                {
                    "rank": part.rank,
                    "node": place.node,
                    "local_rank": place.local_rank,
                    "device": part.device,
                    "peak_memory_bytes": None if event is None else event["peak_memory_bytes"],
                    "hardware": None if event is None else event["hardware"],
                }
                for part, place, event in zip(bundle.ranks, places, done, strict=True)
            ],
        }
    )


def check_failure(done: Sequence[Event | None]) -> RunFailed | None:
    """Return the failure of a checked run that trained or communicated differently than predicted, or None."""
    first = done[0] or dict.fromkeys(("gradient_check", "loss_check", "gradient_tolerance"))
    differs = first_difference(one["collectives_differ"] for one in done if one is not None)
    return other_training(first["gradient_check"], first["loss_check"], first["gradient_tolerance"], differs)
