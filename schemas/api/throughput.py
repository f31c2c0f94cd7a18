"""Calibration of a kind of device by the pace of one run: the profile after, and its effect on other plans."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from penstock.schemas.document import Document, Part
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.quantities import ContentHash, Flag, Name, Nanoseconds, Number


class ThroughputRequest(Document):
    """A plan that was run, as planned or judged by hand, and how fast it was: one of the two figures."""

    kind: ClassVar[str] = "throughput request"

    plan_file: PlanFile
    tokens_per_s_per_gpu: Number | None = Field(default=None, gt=0, description="of the GPUs that the plan uses")
    step_ns: Nanoseconds | None = Field(default=None, gt=0, description="of one global batch")
    profile: ModelProfile | None = Field(default=None, description="what is calibrated, if not the plan's own profile")
    show: tuple[PlanFile, ...] = Field(default=(), max_length=64, description="plans to predict before and after")
    any_factor: Flag = Field(default=False, description="accept computation that changes by more than a factor of 3")

    @model_validator(mode="after")
    def _one_figure(self) -> Self:
        if (self.tokens_per_s_per_gpu is None) == (self.step_ns is None):
            raise ValueError("give tokens_per_s_per_gpu or step_ns, and only one of them")
        return self


class PredictedPlan(Part):
    """A plan's predicted time per global batch, before and after; its pace where the length of a sample is known."""

    plan_hash: ContentHash
    model: Name
    before_ns: Nanoseconds
    after_ns: Nanoseconds
    tokens_per_s_per_gpu_before: Number | None = None
    tokens_per_s_per_gpu_after: Number | None = None


class ThroughputOut(Part):
    """``factor``: of all computation on devices of the kind; ``least_ns``: the plan's time if that took none."""

    profile: ModelProfile
    device_kind: Name
    factor: Number
    measured_ns: Nanoseconds
    least_ns: Nanoseconds
    run: PredictedPlan
    shown: tuple[PredictedPlan, ...] = ()
