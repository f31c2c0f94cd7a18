"""A check that a job is the one of its plan, and has the parts that a run's options need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.executor.node.check_model import refuse_larger_batch, refuse_other_layers
from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.run.job import ANY_BATCH, Job
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import ModelMismatch, UnsupportedRequest
from penstock.schemas.program import Program


def checked_chain(job: Job, program: Program, layers: Sequence[str] | None) -> Chain:
    """Return the job's chain. Raises ModelMismatch with the first layer that differs from the plan's ``layers``."""
    chain = Chain(job)
    if layers is not None:
        refuse_other_layers(job.name, chain.names, layers)
    refuse_larger_batch(job.name, job.batch_size, program.global_batch_size)
    return chain


def untrained_samples(job: Job, program: Program) -> str | None:
    """Return a warning if the plan's global batch is smaller than the job's: its other samples are never trained."""
    planned, has = program.global_batch_size, job.batch_size
    if planned == has or has >= ANY_BATCH:
        return None
    return (
        f"the plan's global batch has {planned} samples, but a batch of job {job.name!r} has {has}: of each batch "
        "the last "
        f"{has - planned} are never trained; plan with --global-batch-size {has}, or change the job's batch_size"
    )


def refuse_missing_parts(job: Job, options: RunOptions) -> None:
    """Raise UnsupportedRequest when the options need parts that the job does not have."""
    if options.evaluate_every and not (hasattr(job, "evaluation") and hasattr(job, "num_evaluation_batches")):
        raise UnsupportedRequest(
            f"job {job.name!r} cannot be evaluated: it has no evaluation(number, rows) or no num_evaluation_batches",
            remedy="add both to the job, or leave out --evaluate-every",
        )


def refuse_other_boundaries(
    chain: Chain,
    shapes: Sequence[dict[str, TensorShape]],
    planned: Sequence[Sequence[Sequence[Any]]] | None,
    *,
    lowered: bool = False,
) -> None:
    """Raise ModelMismatch with the first cut where other tensors cross than in the plan's profile.

    ``lowered``: the run's precision may be below the profile's, so tensors may be smaller than planned, never larger.
    """
    for i, (has, wanted) in enumerate(zip(shapes, planned or (), strict=False)):
        tensors = [
            [chain.tensor_name(i, k), shape.bytes_per_sample, shape.bytes_per_sample if shape.needs_grad else 0]
            for k, shape in enumerate(has.values())
        ]
        for mine, other in zip(tensors, map(list, wanted), strict=False):
            smaller = lowered and mine[0] == other[0] and mine[1] <= other[1] and bool(mine[2]) == bool(other[2])
            if mine != other and not smaller:
                raise ModelMismatch(
                    f"after layer {chain.names[i]!r}: tensor {mine[0]!r} has {mine[1]} bytes per sample "
                    f"(gradient {mine[2]}), but in the plan {other[0]!r} has {other[1]} (gradient {other[2]})",
                    remedy="profile this model and plan with that profile",
                )
        if len(tensors) != len(wanted):
            raise ModelMismatch(
                f"after layer {chain.names[i]!r}: {len(tensors)} tensors cross the cut, but {len(wanted)} in the plan",
                remedy="profile this model and plan with that profile",
            )
