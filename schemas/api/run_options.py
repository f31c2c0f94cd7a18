"""Options of training apart from the plan: precision, checkpoints, evaluation, metrics. The same on every rank."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from penstock.schemas.document import Part, faults_of
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.quantities import Count, Flag, Name, PositiveCount

MAX_SEGMENT = 1000
"""Global batches that one program of a periodic plan trains at most before it is flushed."""


class RunOptions(Part):
    """Options that ``penstock run`` takes as flags, and a run of the service as ``options``.

    All ranks see each path; on several hosts it lies in a file system that they share.
    """

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = Field(
        default="fp32",
        description="of the computation; parameters stay as the job makes them; tf32: fp32 whose products GPUs compute "
        "from factors with 10 bits of mantissa; fp16 scales the loss",
    )
    clip_norm: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="the largest norm of the gradient of all parameters together"
    )
    checkpoint_directory: Name | None = Field(default=None, description="where step-<n> directories are written")
    checkpoint_every: Count = Field(default=0, description="steps between checkpoints; 0: only one at the end")
    keep_checkpoints: PositiveCount = Field(
        default=2, description="older complete ones are removed, but for the last finite one"
    )
    resume: Flag | Literal["auto"] = Field(
        default=False,
        description="resume from the newest checkpoint; auto: start from step 0 where there is none",
    )
    evaluate_every: Count = Field(default=0, description="steps between evaluations; 0: none; there is one at the end")
    metrics_path: Name | None = Field(default=None, description="rank 0 appends one JSON line per step to this file")
    tensorboard_directory: Name | None = Field(default=None, description="rank 0 writes event files here")
    staleness: Annotated[int, Field(strict=True, ge=0, le=1)] = Field(
        default=0, description="elastic averaging: how many iterations old the reference model may be"
    )
    allow_nonfinite_loss: Flag = Field(
        default=False,
        description="train on after a loss, or a parameter, that is not finite; otherwise the run fails there",
    )
    advance_forward: Flag = Field(default=False, description="search how far forwards run ahead while training")

    @model_validator(mode="after")
    def _needs_a_directory(self) -> Self:
        if self.checkpoint_directory is None and (self.checkpoint_every or self.resume):
            wanted = "checkpoint_every" if self.checkpoint_every else "resume"
            raise ValueError(f"{wanted} needs a checkpoint_directory")
        return self

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Validate plain data. Raises InvalidDocument with one fault per mistake."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            faults = tuple(faults_of(error.errors(), data))
            raise InvalidDocument("the options of the run are not valid", faults=faults) from None

    @property
    def needs_norm(self) -> bool:
        """Whether programs have to be lowered with NORM: for clipping, and for the overflow flag of fp16."""
        return self.clip_norm is not None or self.precision == "fp16"

    def segments(self, first_step: int, steps: int) -> list[int]:
        """Return how many global batches are trained between two halts, from ``first_step`` up to ``steps``.

        A halt is a checkpoint, an evaluation or the end: a program of a periodic plan is flushed there.
        """
        lengths, at = [], first_step
        while at < steps:
            ends = [steps, at + MAX_SEGMENT]
            ends += [(at // every + 1) * every for every in (self.checkpoint_every, self.evaluate_every) if every]
            lengths.append(min(ends) - at)
            at = min(ends)
        return lengths
