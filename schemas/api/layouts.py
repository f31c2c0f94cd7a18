"""The import of a trainer's layout: its text and request; the plan that it is, and the best plans to compare with."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.schemas.api.explanation import LayoutComparison
from penstock.schemas.document import Document, Part
from penstock.schemas.plan import Plan
from penstock.schemas.quantities import Bytes, Flag, Name, Nanoseconds, Number, PositiveCount
from penstock.schemas.request import PlanRequest

LayoutFormat = Literal["megatron", "torchtitan", "deepspeed", "ranges"]
MOST_CHARACTERS = 1_000_000


class LayoutRequest(Document):
    """A user's present configuration, in the trainer's terms."""

    kind: ClassVar[str] = "layout request"

    format: LayoutFormat
    layout: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)] = Field(
        description="megatron: a script, a configuration or the layout string; torchtitan: TOML, JSON, flags or Python;"
        " deepspeed: Python or JSON; ranges: JSON"
    )
    source: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        default="the layout", description="the text's name in messages"
    )
    request: PlanRequest = Field(description="model, cluster and training; its target is the format's trainer")
    micro_batch_size: PositiveCount | None = Field(
        default=None, description="samples of a micro-batch on each replica, where the text does not say"
    )
    pipeline_parallel_size: PositiveCount | None = Field(
        default=None, description="ranks of the pipeline, where the text does not say; else one for each stage"
    )
    nodes: Annotated[str, Field(max_length=MOST_CHARACTERS)] = Field(
        default="", description="hostlist of the nodes that the job runs on, as its ranks count them; else all"
    )
    devices_per_node: PositiveCount | None = Field(
        default=None, description="use only this number of devices of each node, the first ones; default: all"
    )
    given: dict[Name, Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, description="values that the text leaves open, by variable or flag: {PP: 8}"
    )
    config: Name | None = Field(default=None, description="which of the configurations of a Python text is meant")
    compare: Flag = Field(default=True, description="also find the best plan within the trainer's limits, and without")


class Rival(Part):
    """The best plan of a wider choice, and how the layout (``theirs``) compares with it (``ours``)."""

    choice: str = Field(description="within the trainer's limits, or without")
    status: Literal["optimal", "feasible", "infeasible", "none_found", "time_limit"]
    why: str
    time_ns: Nanoseconds | None
    bound_ns: Nanoseconds | None = Field(description="no plan of this choice takes less")
    saved: Number | None = Field(description="share of the layout's time")
    plan: Plan | None
    comparison: LayoutComparison | None
    request: PlanRequest | None = Field(
        default=None, description="what the plan answers, where its degrees are open; else the layout's request"
    )


class LayoutImported(Part):
    """The layout as a plan with the judge's numbers; ``faults``: why it cannot run as it is."""

    format: LayoutFormat
    plan: Plan
    request: PlanRequest
    fits: Flag | None = Field(
        description="null: not known, as it does not fit by a count that leaves out something that lowers memory"
    )
    faults: tuple[str, ...]
    missing_bytes: Bytes = Field(description="on the device that lacks most, by that count")
    sentences: tuple[str, ...]
    assumptions: tuple[str, ...]
    rivals: tuple[Rival, ...]
