"""Explanation of a plan: why it takes its time, what binds it, what would help, and how another layout compares."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.schemas.document import Part
from penstock.schemas.plan import PlanQuestion
from penstock.schemas.quantities import ContentHash, Count, Flag, Name, Nanoseconds, Number, PositiveCount

What = Literal["operation", "transfer", "all-reduce", "update"]


class PathShare(Part):
    """The share of the critical path that all links of one sort take."""

    what: What
    stage: Count = Field(description="of a transfer the stage before the cut")
    length_ns: Nanoseconds
    share: Number


class PathSegment(Part):
    """Neighbouring links of the critical path on one device, or one transfer, all-reduce or update."""

    what: What
    stage: Count
    devices: tuple[Name, ...] = Field(description="devices that compute; none for transfers and all-reduces")
    text: str = Field(description="the operations, as schedules write them, or what is sent")
    links: PositiveCount
    start_ns: Nanoseconds
    length_ns: Nanoseconds
    because: str = Field(description="why it did not begin earlier")


class Path(Part):
    """The chain that decides when the plan ends; its segments' lengths add up to ``length_ns``."""

    span: Literal["step", "iteration", "cycle", "window"] = Field(
        description="one flushed step, one iteration of pipelines that average, the critical cycle of a periodic plan, "
        "or its steady window where it has no cycle"
    )
    global_batches: PositiveCount = Field(description="number of them")
    length_ns: Nanoseconds
    links: Count
    shares: tuple[PathShare, ...]
    segments: tuple[PathSegment, ...] = Field(description="the first ones, if there are very many")


class IdleOut(Part):
    """Devices with the same rows: busy time and idle time by what they wait for; they add up to ``whole_ns``."""

    devices: tuple[Name, ...]
    num_gpus: Count = Field(default=0, description="that these devices are: more where GPUs hold layers together")
    whole_ns: Nanoseconds = Field(description="one step; of a periodic plan its steady window")
    global_batches: PositiveCount
    busy_ns: Nanoseconds
    slower_ns: Nanoseconds = Field(default=0, description="slower devices of the same stage still compute")
    fill_ns: Nanoseconds
    drain_ns: Nanoseconds
    transfer_ns: Nanoseconds
    all_reduce_ns: Nanoseconds
    other_stages_ns: Nanoseconds = Field(description="what they need is still computed by other stages")
    order_ns: Nanoseconds = Field(description="another operation of the row could have run")
    memory_ns: Nanoseconds = Field(description="a forward could have run if its activations had fitted")


class SensitivityOut(Part):
    """The plan with one thing changed."""

    thing: str
    sentence: str
    time_ns: Nanoseconds
    ratio: Number = Field(description="of the plan's own time")
    how: str


class WhatIf(Part):
    """A changed request, and its best plan."""

    name: str = Field(description="the change as requested; empty: no change")
    sentence: str
    how: Literal["as it is", "re-timed", "re-drafted", "re-planned", "none"]
    time_ns: Nanoseconds | None
    ratio: Number | None = Field(description="of the plan's own time")
    headroom_bytes: int | None = Field(description="smallest free memory of a device; negative: what it lacks")
    bound_ns: Nanoseconds = Field(description="no plan of the changed request takes less")
    shape: str = ""
    why: str = ""


class LayoutSide(Part):
    """One of two layouts that the judge compares; times per global batch."""

    stages: str
    time_ns: Nanoseconds
    bubble: Number
    peak_memory_bytes: Count
    headroom_bytes: int
    transfers_ns: Nanoseconds = Field(description="on the critical path")
    all_reduces_ns: Nanoseconds = Field(description="on the critical path")
    bound_ns: Nanoseconds = Field(description="no order of this allocation takes less")


class DifferenceOut(Part):
    """A part of the difference between two critical paths, per global batch; all parts add up to the difference."""

    name: str
    theirs_ns: int
    ours_ns: int


class LayoutComparison(Part):
    """A user's own layout compared with the plan; ``theirs`` is null where it cannot run at all."""

    fits: Flag
    sentence: str
    ours: LayoutSide
    theirs: LayoutSide | None
    differences: tuple[DifferenceOut, ...]


class Turn(Part):
    """The factor by which a number must be wrong before the other plan is faster; both plans keep their orders."""

    number: Literal["collectives", "computation"] = Field(
        description="the times of collectives in a GPU group, of both plans, or of computation at one choice"
    )
    choice: str | None = Field(description="whose number it is; null: that of both plans")
    factor: Number | None = Field(
        description="on these times, from which on the order turns; null: no factor from a hundredth to a hundred does"
    )
    sentence: str


class WhyNot(Part):
    """Another choice of degrees and sharding: its best plan and why that takes longer, or why no plan exists."""

    question: str = Field(description="the choice as the question named it")
    choice: str = Field(description="the best of the choices that it names, such as tensor 4, optimizer sharded")
    planner: Name = Field(description="that looked for its plan")
    sentence: str
    time_ns: Nanoseconds | None = Field(
        description="per global batch; null: no plan was found, and `sentence` says why"
    )
    ratio: Number | None = Field(description="of the plan's own time")
    bound_ns: Nanoseconds = Field(description="no plan at this choice takes less")
    shape: str = ""
    differences: tuple[DifferenceOut, ...] = Field(
        default=(), description="parts of the time, means over the GPU groups in use; they add up to the times"
    )
    turns: tuple[Turn, ...] = ()


class OtherLayout(Part):
    """Stages of yours, for a comparison with a plan's stages."""

    cuts: Annotated[tuple[str, ...], Field(min_length=1, max_length=1024)] = Field(
        description="layers, by number or name, at which the later stages begin"
    )
    replicas: Annotated[tuple[PositiveCount, ...], Field(max_length=1024)] = Field(
        default=(), description="devices of each stage; none: shared out evenly"
    )
    devices: Annotated[tuple[tuple[Name, ...], ...], Field(max_length=1024)] = Field(
        default=(), description="devices of each stage by name; none: chosen"
    )
    schedule: Name | None = Field(default=None, description="left out: the plan's")
    num_micro_batches: PositiveCount | None = Field(default=None, description="left out: the best")


class ExplainRequest(PlanQuestion):
    """A plan, with changes to try, and other degrees and a layout to compare it with."""

    kind: ClassVar[str] = "explain request"

    what_if: Annotated[tuple[str, ...], Field(max_length=64)] = Field(
        default=(),
        description="changes to try: `bandwidth=2`, `devices=+8`, …; `default`: the usual ones, if the plan has at "
        "most 50,000 operations and 2,048 GPUs; `all`: those of any plan",
    )
    planner: Name | None = Field(default=None, description="plans again for each change")
    max_plans: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=20, description="plans that it may judge for each"
    )
    layout: OtherLayout | None = None
    why_not: Annotated[tuple[str, ...], Field(max_length=16)] = Field(
        default=(),
        description="other degrees and sharding: `tensor=4`, `sharding=none`, both with a comma; `next`: the next "
        "best; `default`: these where there are any, on up to 2,048 GPUs",
    )


class Explanation(Part):
    """The judge's explanation of a plan, beyond its numbers."""

    plan_hash: ContentHash
    valid: Flag
    faults: tuple[str, ...]
    time_ns: PositiveCount = Field(description="per global batch")
    sentences: tuple[str, ...]
    binds: str
    helps: str = Field(description="the tried change that helps most; empty where none does")
    path: Path
    idle: tuple[IdleOut, ...]
    sensitivities: tuple[SensitivityOut, ...]
    what_ifs: tuple[WhatIf, ...] = ()
    layout: LayoutComparison | None = None
    why_not: tuple[WhyNot, ...] = ()
    untried: str = Field(default="", description="why no change was tried that was not named; empty where they were")
