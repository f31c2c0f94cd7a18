"""Options of training apart from the plan: precision, checkpoints, evaluation, metrics. The same on every rank."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from penstock.schemas.document import Part, faults_of
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.options.running import about
from penstock.schemas.quantities import Count, Flag, Name, PositiveCount

MAX_SEGMENT = 1000
"""Global batches that one program of a periodic plan trains at most before it is flushed."""


class RunOptions(Part):
    """Options that ``penstock run`` takes as flags, and a run of the service as ``options``.

    All ranks see each path; on several hosts it lies in a file system that they share.
    """

    precision: Literal["fp32", "tf32", "bf16", "fp16"] = Field(default="fp32", description=about("precision"))
    clip_norm: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description=about("clip_norm")
    )
    checkpoint_directory: Name | None = Field(default=None, description=about("checkpoint"))
    checkpoint_every: Count = Field(default=0, description=about("checkpoint_every"))
    keep_checkpoints: PositiveCount = Field(default=2, description=about("keep_checkpoints"))
    resume: Flag | Literal["auto"] = Field(default=False, description=about("resume"))
    evaluate_every: Count = Field(default=0, description=about("evaluate_every"))
    metrics_path: Name | None = Field(default=None, description=about("metrics"))
    tensorboard_directory: Name | None = Field(default=None, description=about("tensorboard"))
    staleness: Annotated[int, Field(strict=True, ge=0, le=1)] = Field(default=0, description=about("staleness"))
    allow_nonfinite_loss: Flag = Field(default=False, description=about("allow_nonfinite_loss"))
    advance_forward: Flag = Field(default=False, description=about("advance_forward"))

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
