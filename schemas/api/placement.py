"""Placement: the question which nodes a job should get, how many and with what plan; and the answer to a scheduler."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.amounts import duration
from penstock.schemas.document import Document, Part, refuse_doubles
from penstock.schemas.options.placing import about
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.quantities import ContentHash, Count, Flag, Name, Nanoseconds, Number, PositiveCount
from penstock.schemas.request import Training
from penstock.schemas.topology import ClusterTopology

MAX_JOBS = 64

Objective = Literal["throughput", "throughput_per_device", "fastest_within_budget"]
Together = Literal["priority", "joint"]


class NodeRange(Part):
    """The number of nodes that a job may get."""

    min: PositiveCount = 1
    max: PositiveCount | None = Field(default=None, description="default: all free nodes")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self


class Budget(Part):
    """The limits of what a job may take. With a deadline, the fastest placement has the fewest devices that keep it."""

    devices: PositiveCount | None = Field(default=None, description=about("max_devices"))
    price_per_hour: Number | None = Field(default=None, gt=0, description=about("max_price"))
    time_per_global_batch_ns: Annotated[Nanoseconds, Field(ge=1)] | None = Field(
        default=None, description=about("deadline")
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.devices is None and self.price_per_hour is None and self.time_per_global_batch_ns is None:
            raise ValueError("a budget needs devices, price_per_hour or time_per_global_batch_ns")
        return self


class PlacementJob(Training):
    """A job that needs nodes. It gets the free devices of whole nodes; a budget of devices may leave some out."""

    name: Name
    profile: ModelProfile | ContentHash
    nodes: NodeRange = Field(default=NodeRange(), description=about("nodes"))
    budget: Budget | None = None
    weight: Number = Field(default=1, gt=0, description="of its throughput, where jobs are placed jointly")


class PlacementRequest(Document):
    """Jobs and a cluster, some of whose devices are free.

    ``free`` and ``busy`` hold hostlists (``gpu[001-128]``) and device ids (``gpu001/3``); give one of them, or none
    where everything is free.
    """

    kind: ClassVar[str] = "placement request"

    topology: ClusterTopology | ContentHash
    jobs: Annotated[tuple[PlacementJob, ...], Field(min_length=1, max_length=MAX_JOBS)]
    free: tuple[str, ...] | None = Field(default=None, description=about("free"))
    busy: tuple[str, ...] | None = Field(default=None, description=about("busy"))
    objective: Objective = Field(default="throughput", description=about("objective"))
    together: Together = Field(
        default="priority",
        description="priority: each job in turn gets the best remaining nodes; joint: the weighted sum of throughputs",
    )
    time_limit_ns: Annotated[Nanoseconds, Field(ge=1)] | None = Field(
        default=None,
        description=f"{about('time_limit')}, and the answer is the same on every machine; the jobs' planners get the "
        "time that regular layouts leave",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.free is not None and self.busy is not None:
            raise ValueError("give either `free` or `busy`, not both")
        refuse_doubles("job", [job.name for job in self.jobs])
        if self.together == "joint" and self.objective != "throughput":
            raise ValueError(f"together 'joint' needs objective 'throughput', not {self.objective!r}")
        for number, job in enumerate(self.jobs):
            if self.objective == "fastest_within_budget" and job.budget is None:
                raise ValueError(f"jobs/{number} ({job.name!r}) has no budget, but the objective requires one")
        return self


class PlacementRow(Part):
    """The best plan found for one number of nodes: what each further node would bring."""

    nodes: PositiveCount
    devices: PositiveCount
    status: Literal["planned", "unplanned", "none_found", "infeasible"] = Field(
        description="unplanned: the time limit was reached first; none_found: no tried plan fits in memory; "
        "infeasible: it is proven for every examined set that no plan fits"
    )
    time_per_global_batch_ns: Nanoseconds | None = None
    samples_per_s: Number | None = None
    samples_per_s_per_device: Number | None = None
    most_samples_per_s: Number | None = Field(
        default=None, description="no plan on a considered set of this number of nodes has a greater value"
    )
    gain_per_node: Number | None = Field(
        default=None, description="samples per second gained per node over the planned row before"
    )
    price_per_hour: Number | None = None
    within_budget: Flag = True
    chosen: Flag = False


class Placement(Part):
    """The nodes and devices on which one job should run."""

    job: Name
    status: Literal["placed", "none_found", "infeasible"] = Field(
        description="infeasible: it is proven that there is no placement; none_found: the search found none"
    )
    nodes: tuple[Name, ...] = Field(default=(), description="in the order of the plan's topology")
    hostlist: str = Field(default="", description="the same nodes, folded")
    devices: tuple[Name, ...] = ()
    plan_file: PlanFile | None = Field(default=None, description="its topology holds these nodes only")
    time_per_global_batch_ns: Nanoseconds | None = None
    samples_per_s: Number | None = None
    value: Number | None = Field(default=None, description="what the objective measures: the more the better")
    bound: Number | None = Field(default=None, description="no considered set of nodes has a greater value")
    gap: Number | None = Field(default=None, description="bound / value - 1")
    rows: tuple[PlacementRow, ...] = ()
    considered: Count = Field(default=0, description="classes of sets of nodes that are alike in the network")
    planned: Count = Field(default=0, description="of these, how many got a plan")
    every_set: Flag = Field(default=False, description="whether these classes contain every allowed set of free nodes")
    why: tuple[str, ...] = Field(default=(), description="sentences: the choice, the alternatives, and what is proven")


class PlacementProgress(Part):
    """The progress of one job's placement, with the best plan so far if one exists."""

    job: Name
    considered: Count = Field(description="classes of sets of nodes that are to be examined so far")
    settled: Count = Field(description="of these, how many got a plan, or were passed over")
    nodes: PositiveCount | None = None
    time_per_global_batch_ns: Nanoseconds | None = None

    def __str__(self) -> str:
        """Return the progress in words: the classes of sets of nodes, and the best time so far."""
        time_ns, plural = self.time_per_global_batch_ns, "" if self.nodes == 1 else "s"
        best = "" if time_ns is None else f"; {duration(time_ns)} on {self.nodes} node{plural}"
        return f"{self.job}: {self.settled} of {self.considered} classes of sets{best}"


class PlacementAnswer(Document):
    """A placement per job, in the order of the request."""

    kind: ClassVar[str] = "placement"

    topology: Name
    objective: Objective
    free_nodes: Count
    free_devices: Count
    choices: tuple[Placement, ...]
    method: str = Field(description="how several jobs were placed")
