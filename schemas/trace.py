"""What ranks measured, in the shape of the judge's timeline; and what a run reports of each step."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from penstock.schemas.document import Document, Part
from penstock.schemas.plan import PlanFile
from penstock.schemas.quantities import Bytes, ContentHash, Count, Name, Nanoseconds, Number, PositiveCount


class TraceEvent(Part):
    """One instruction of one rank; times count from the start of the step, in the common clock."""

    instruction: str = Field(description="as in the program: '2F0', '3RECV_B1'")
    start_ns: Nanoseconds
    end_ns: Nanoseconds


class RankTrace(Part):
    """One rank's step."""

    rank: Count
    device: Name
    step: Count
    events: tuple[TraceEvent, ...]
    peak_memory_bytes: Bytes | None = None
    batches: PositiveCount = Field(default=1, description="global batches that the events train, the first is `step`")
    clock_error_ns: Nanoseconds = Field(
        default=0, description="largest error of its times relative to the common clock"
    )


class Trace(Document):
    """The same step on all ranks."""

    kind: ClassVar[str] = "trace"

    plan_hash: ContentHash
    predicted_time_per_global_batch_ns: Nanoseconds
    measured_times_per_global_batch_ns: tuple[Nanoseconds, ...] = Field(description="one per step, warm-up left out")
    losses: tuple[Number, ...] = ()
    ranks: tuple[RankTrace, ...]
    plan_file: PlanFile | None = Field(
        default=None,
        description="the plan that was run: with it a trace can be drawn and used for calibration by itself",
    )
