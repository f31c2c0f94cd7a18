"""A profile and the traces to fold into it; the profile and the topology after, and how well they explain the runs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from penstock.schemas.document import Document, Part
from penstock.schemas.profile import ModelProfile
from penstock.schemas.quantities import ContentHash, Count, Flag, Nanoseconds, Number
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace


class CalibrationRequest(Document):
    """A profile to calibrate, with traces that hold their plans."""

    kind: ClassVar[str] = "calibration request"

    profile: ModelProfile
    traces: tuple[Trace, ...] = Field(min_length=1, max_length=64)
    links: Flag = Field(default=True, description="whether the links are fitted, too")
    any_factor: Flag = Field(default=False, description="accept costs that change by more than a factor of 3")


class CalibratedRun(Part):
    """A plan that was run: measured (median) and predicted time per global batch, before and after."""

    plan_hash: ContentHash
    measured_ns: Nanoseconds
    before_ns: Nanoseconds
    after_ns: Nanoseconds
    note: str | None = Field(default=None, description="why the measured time differs, where ranks recorded it")


class CalibrationOut(Part):
    """The profile and the topology after a calibration, and the errors that remain."""

    profile: ModelProfile
    topology: ClusterTopology
    runs: tuple[CalibratedRun, ...]
    unaccounted: Number = Field(description="factor over all computation, beyond the instructions' times")
    issue_ns: Number = Field(description="issuing messages and freeing memory, per operation")
    num_messages: Count = Field(description="that links were fitted to")
    expected_error: Number
