"""Make the programs of a plan's ranks for all segments, or all values of δ, of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.executor.run.rank_programs import Work
from penstock.planning.programs.lower import ladder, programs

if TYPE_CHECKING:
    from penstock.executor.checkpoints.checkpoint import Checkpoint
    from penstock.schemas.api.run_options import RunOptions
    from penstock.schemas.plan import PlanFile
    from penstock.solvers.lowering.transports import TransportChoice


def work_after(
    file: PlanFile,
    checkpoint: Checkpoint | None,
    steps: int,
    options: RunOptions,
    *,
    transport: TransportChoice = "auto",
) -> Work:
    """Return the remaining work after ``checkpoint`` (None: from the start) up to ``steps`` steps.

    A periodic plan gets one program for each length of segment that occurs. ``transport``: what the ranks must be able
    to send over. Raises UnsupportedRequest for options, or a transport, not supported by the plan, InvalidPlan when
    it does not verify.
    """
    plan = file.plan
    lanes = len(plan.pipelines) if plan.update_rule == "elastic_averaging" else 1
    first_step = checkpoint.next_step(lanes) if checkpoint is not None else 0
    norm = options.needs_norm
    if plan.update_rule in ("synchronous", "elastic_averaging"):
        if options.advance_forward:
            rungs = ladder(file, norm=norm, transport=transport, staleness=options.staleness)
        else:
            rungs = [programs(file, norm=norm, transport=transport, staleness=options.staleness)]
        return Work(tuple(map(tuple, rungs)), None, first_step)
    lengths = options.segments(first_step, steps)
    distinct = sorted(set(lengths))
    lowered = [tuple(programs(file, batches=length, norm=norm, transport=transport)) for length in distinct]
    return Work(tuple(lowered), tuple(map(distinct.index, lengths)), first_step)
