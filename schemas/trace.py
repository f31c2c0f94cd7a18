"""Measurements of ranks, in the shape of the judge's timeline; and a run's report of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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


class Hardware(Part):
    """The device that a rank computed on, and how busy its machine was from the first step to the last."""

    kind: Name = Field(description="kind of device, as topologies name it; 'cpu' for a processor")
    model: Name = Field(description="as its maker names it: 'NVIDIA H100 80GB HBM3'")
    planned_kind: Name | None = Field(default=None, description="kind of the rank's device in the plan")
    ranks: PositiveCount = Field(description="of the run, on the rank's machine")
    cores: PositiveCount = Field(description="that those ranks may use: their affinities and the container's quota")
    machine_cores: PositiveCount = Field(description="all of the machine, which its load is about")
    load_at_start: Number = Field(ge=0, description="the machine's load average over a minute")
    load_at_end: Number = Field(ge=0)
    cpu_ns: Nanoseconds = Field(description="processor time of the rank's process, of all its threads")
    wall_ns: Nanoseconds


def alike(ranks: Iterable[Hardware]) -> tuple[Hardware, ...]:
    """Return what ranks ran on, those alike as one: with the largest loads, and the sums of their times."""
    groups: dict[tuple[object, ...], Hardware] = {}
    for one in ranks:
        key = (one.kind, one.model, one.planned_kind, one.ranks, one.cores, one.machine_cores)
        other = groups.get(key)
        groups[key] = (
            one
            if other is None
            else one.model_copy(
                update={
                    "load_at_start": max(one.load_at_start, other.load_at_start),
                    "load_at_end": max(one.load_at_end, other.load_at_end),
                    "cpu_ns": one.cpu_ns + other.cpu_ns,
                    "wall_ns": one.wall_ns + other.wall_ns,
                }
            )
        )
    return tuple(groups.values())


def summed(ranks: Iterable[Mapping[str, int] | None]) -> dict[str, int] | None:
    """Return how many collectives of each kind ran on all ranks; None where no rank compared them."""
    compared = [Counter(one) for one in ranks if one is not None]
    return dict(sum(compared, Counter())) if compared else None


def first_difference(ranks: Iterable[str | None]) -> str | None:
    """Return the first collective of all ranks that is not as predicted; None where all are, or none was compared."""
    return next(filter(None, ranks), None)


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
    hardware: Hardware | None = Field(default=None, description="none in traces of versions that did not record it")


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
