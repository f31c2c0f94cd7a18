"""``Drawn``: a trainer's own layout of a pipeline, in our words, and the plan that the trainer makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.convert.layer_roles import Roles
from penstock.importers.cluster.hostlist import expand
from penstock.schemas.errors import Fault, InvalidDocument, InvalidPlan, meant
from penstock.schemas.profile import ModelProfile
from penstock.schemas.transformers.degrees import ContextKind
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Degrees, Modules, Sharding, without_parts
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.trainer_limits import Recomputing, Within
from penstock.solvers.planners.proposal import unreachable
from penstock.solvers.schedules.interleaved import groups_go
from penstock.solvers.schedules.trainer_orders import order_of, ranks_of_stages
from penstock.solvers.verify.verifier import check_allocation, check_rows, verify

NONE = Recomputing()
ONE = Degrees()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A layout, as its file states it; a field is None where the file does not state it.

    Parameters
    ----------
    stages
        First and last layer of each stage.
    ranks
        Ranks of the pipeline, to which stages are dealt in turn.
    rows
        Samples of a micro-batch on each replica.
    group
        Micro-batches that interleaved 1F1B takes together.
    local_rows
        Samples of a replica between two flushes.
    overlap
        Whether the all-reduce runs during the backwards.
    shard_states
        Whether optimizer states are shared out over replicas.
    processes
        Devices that the launcher starts.
    gradient
        Width of the gradients of 16-bit parameters.
    other_order
        Whether ranks count along the pipeline first, which differs from stage after stage where there are several ranks
        and replicas.
    sharding
        Sharding of gradients, or of parameters too, over the replicas. It is judged where these are all GPUs of the
        cluster.
    counted_whole
        A sentence for the case where they are not, and sharded tensors are counted whole.
    unmodelled
        Names of settings that lower memory and are not counted, so that a layout may fit although Penstock counts more.
    degrees
        GPUs that share a layer.
    named
        The file's text for each degree, and its place.
    sized
        Likewise for ranks and batch.
    launched
        Likewise for the settings that say how many processes start.
    modules
        Modules that every layer recomputes.
    sequence_parallel
        Whether activations between layers are split too.
    """

    stages: tuple[tuple[int, int], ...]
    ranks: int
    schedule: str
    rows: int | None = None
    global_batch_size: int | None = None
    group: int | None = None
    local_rows: int | None = None
    recompute: Recomputing = NONE
    overlap: bool | None = None
    shard_states: bool | None = None
    processes: int | None = None
    gradient: Literal["parameter", "fp32"] | None = None
    other_order: bool = False
    sharding: Sharding | None = None
    counted_whole: str = ""
    unmodelled: tuple[str, ...] = ()
    degrees: Degrees = ONE
    named: tuple[tuple[str, str], ...] = ()
    sized: tuple[tuple[str, str], ...] = ()
    launched: tuple[tuple[str, str], ...] = ()
    modules: Modules = ()
    sequence_parallel: bool | None = None
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """A reader's input besides the text: the model, its roles where names give them, and values that the text may omit.

    ``rows`` and ``ranks`` are as in ``Drawn``. ``gpus`` is the number of GPUs that each device of the topology
    represents; 0 where devices differ.
    """

    profile: ModelProfile
    roles: Roles | None
    source: str
    rows: int | None = None
    ranks: int | None = None
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Expressed:
    """A plan that a trainer can express, for a writer.

    Parameters
    ----------
    title
        A line that identifies the plan.
    replicas
        Replicas of a stage, each of tensor × context GPUs.
    order
        The order, by our name.
    group
        Micro-batches that interleaved 1F1B takes together.
    rows
        Samples of a micro-batch on each replica.
    gradient
        Width of gradients.
    nodes
        Name and number of devices of each node, as ranks count them.
    modules
        Modules that every layer recomputes by themselves.
    context_kind
        The way in which GPUs that share a sequence see all keys.
    gpus
        GPUs of the largest device of the topology.
    """

    title: str
    profile: ModelProfile
    roles: Roles | None
    stages: tuple[tuple[int, int], ...]
    ranks: int
    replicas: int
    order: str
    group: int
    rows: int
    num_micro_batches: int
    global_batch_size: int
    recompute: Recomputing
    overlap: bool
    sharding: Sharding
    gradient: Literal["parameter", "fp32"]
    nodes: tuple[tuple[str, int], ...]
    assumptions: tuple[str, ...]
    degrees: Degrees = ONE
    modules: Modules = ()
    context_kind: ContextKind | None = None
    gpus: int = 1

    @property
    def shard_states(self) -> bool:
        """True where replicas share out the optimizer's states at least."""
        return self.sharding != "none"

    @property
    def chunks(self) -> int:
        """Stages of a rank of the pipeline."""
        return len(self.stages) // self.ranks

    @property
    def world(self) -> int:
        """Processes of the job."""
        return self.ranks * self.replicas * self.degrees.mesh

    def remarks(self) -> list[str]:
        """Return the remarks above the settings of a written file."""
        hosts = ", ".join(f"{name} ({count})" for name, count in self.nodes)
        within = f" × {self.degrees.mesh} that share layers ({self.degrees})" if self.degrees != ONE else ""
        return [
            self.title,
            f"{self.world} ranks, {self.ranks} of the pipeline × {self.replicas} replicas{within}; they count through "
            f"these nodes (devices of each): {hosts}",
            *self.assumptions,
        ]


def placed(problem: Problem, within: Within, drawn: Drawn, world: Sequence[int]) -> Allocation:
    """Build the stages on the devices that ranks count through (``world_of``).

    Raises InvalidDocument where devices, ranks, batch and micro-batches do not fit each other.
    """
    devices, each = len(world), len(problem.gpus(0))
    if drawn.ranks > devices or devices % drawn.ranks:
        several = f"{devices * each} GPUs in {devices} groups of {each}" if each > 1 else ""
        raise wrong(
            f"{several or f'{devices} devices'} cannot be split into {drawn.ranks} pipeline ranks "
            "with equally many replicas"
            f"{_other_size(problem, drawn, world)}",
            "the nodes that the job runs on (--nodes), or another pipeline size",
        )
    replicas = devices // drawn.ranks
    if drawn.other_order and drawn.ranks > 1 and problem.samples_per_row > 1:
        raise wrong(
            f"--use-tp-pp-dp-mapping would put the experts of {problem.samples_per_row} replicas on different stages: "
            "it counts ranks along the pipeline first",
            "leave out --use-tp-pp-dp-mapping, or spread experts over fewer ranks",
        )
    rows = drawn.rows or 1
    number, left = divmod(problem.global_batch_size, rows * replicas)
    if left or number == 0:
        raise wrong(
            f"a global batch of {problem.batch_samples} samples is not a multiple of {rows} samples × "
            f"{replicas * problem.samples_per_row} "
            f"replicas: micro-batches would not be equal{_other_size(problem, drawn, world)}",
            "another micro-batch size (--micro-batch-size) or global batch size",
        )
    if drawn.other_order:
        rank_devices = [tuple(world[r :: drawn.ranks]) for r in range(drawn.ranks)]
    else:
        rank_devices = [tuple(world[r * replicas : (r + 1) * replicas]) for r in range(drawn.ranks)]
    modules = without_parts(tuple(module for module in drawn.modules if module in problem.modules))
    rank_of = ranks_of_stages(drawn.schedule, drawn.ranks, len(drawn.stages) // drawn.ranks)
    plain = [Stage(first, last, rank_devices[r]) for r, (first, last) in zip(rank_of, drawn.stages, strict=True)]
    stages = tuple(
        Stage(stage.first, stage.last, stage.devices, "rows", within.segments(stage, drawn.recompute), modules=modules)
        for stage in plain
    )
    return single_pipeline(stages, number)


def ordered(problem: Problem, within: Within, drawn: Drawn, allocation: Allocation) -> Orders:
    """Build the trainer's order. Raises InvalidDocument for a number of micro-batches that its groups do not divide."""
    group = _group(within, drawn, allocation.num_micro_batches)
    return order_of(problem, allocation, drawn.schedule, group)


def by_hand(problem: Problem, allocation: Allocation, orders: Orders, overlap: bool) -> tuple[JudgedPlan, list[str]]:
    """Judge the plan as it is and return it with the faults that verification finds.

    Raises InvalidPlan where it cannot be simulated.
    """
    faults = check_allocation(problem, allocation) or check_rows(problem, allocation, orders)
    if faults or (apart := unreachable(problem, allocation)) is not None:
        raise InvalidPlan(f"the layout cannot be simulated: {faults[0] if faults else apart}")
    timeline = simulate(problem, allocation, orders, overlap=overlap)
    faults = verify(problem, allocation, orders, timeline, overlap=overlap)
    return JudgedPlan.of("by-hand", allocation, orders, timeline, overlap), faults


def differing(problem: Problem, within: Within, drawn: Drawn, world: Sequence[int]) -> tuple[str, ...]:
    """Return sentences on numbers of the layout that differ from the judged plan.

    Raises InvalidDocument for contradictions.
    """
    sentences = []
    if other := _other_size(problem, drawn, world):
        sentences.append(other.removeprefix("; "))
    sentences += _not_judged(problem, drawn)
    if drawn.local_rows is not None:
        replicas = len(world) // drawn.ranks
        flushed = drawn.local_rows * replicas
        times, left = divmod(problem.global_batch_size, flushed)
        if left or times == 0 or (times > 1 and within.trainer != "torchtitan"):
            raise wrong(
                f"{drawn.local_rows} samples on each of {replicas * problem.samples_per_row} replicas make a "
                f"global batch of {flushed * problem.samples_per_row}; the request has {problem.batch_samples}",
                "a global batch size that agrees, or the nodes that the job runs on (--nodes)",
            )
        if times > 1:
            sentences.append(
                f"the step is {times} pipelines of {drawn.local_rows} samples a replica, one after the other "
                "(gradient accumulation); judged is one of them all, which waits less"
            )
    return tuple(sentences)


def _other_size(problem: Problem, drawn: Drawn, world: Sequence[int]) -> str:
    """Return words to add where the file starts another number of devices than the job has."""
    gpus = len(world) * len(problem.gpus(0))
    if drawn.processes in (None, gpus):
        return ""
    by = " and ".join(f"{name} ({place})" for name, place in drawn.launched) or "its flags"
    return f"; {by} start {drawn.processes} devices; judged is a job on {gpus}"


def in_file(error: InvalidDocument, source: str, drawn: Drawn) -> InvalidDocument:
    """Return an error of a layout that does not fit, with the file, and the lines of the layout's numbers."""
    if error.faults:
        return error
    faults = tuple(Fault(place, name, "layout") for name, place in (*drawn.sized, *drawn.launched))
    return InvalidDocument(f"{source}: {error.detail}", faults=faults, remedy=error.remedy)


def lacking_modules(problem: Problem, drawn: Drawn) -> Modules:
    """Return the modules that are recomputed and have no costs."""
    return tuple(module for module in drawn.modules if module not in problem.modules)


def not_counted(problem: Problem, drawn: Drawn) -> tuple[str, ...]:
    """Return the names of settings that lower memory and are not counted."""
    return (*drawn.unmodelled, *(f"recomputing {module}" for module in lacking_modules(problem, drawn)))


def _not_judged(problem: Problem, drawn: Drawn) -> list[str]:
    """Return sentences on degrees and recomputed modules for which there are no costs."""
    sentences = []
    if lacking := lacking_modules(problem, drawn):
        sentences.append(f"recomputing {', '.join(lacking)} is not counted: no costs of that at {problem.degrees}")
    if drawn.degrees.tensor > 1 and drawn.sequence_parallel is False:
        sentences.append(
            "no sequence parallelism: judged is the same with it, which sends as much and keeps less of what is between"
            " layers"
        )
    return sentences


def _group(within: Within, drawn: Drawn, number: int) -> int | None:
    """Return how many micro-batches interleaved 1F1B takes together."""
    if drawn.schedule != "interleaved":
        return None
    group = drawn.group or within.group(drawn.ranks, number)
    if group is None:
        raise wrong(
            f"interleaved 1F1B on {drawn.ranks} pipeline ranks runs micro-batches in "
            + (f"{number // drawn.ranks} equal groups" if within.rounds else f"groups of {drawn.ranks}")
            + f", which {number} micro-batches cannot form",
            "another micro-batch size or global batch size, or one stage on each rank",
        )
    if not groups_go(drawn.ranks, number, group) or (group < drawn.ranks and not within.rounds):
        raise wrong(
            f"groups of {group} do not fit {number} micro-batches on {drawn.ranks} pipeline ranks: each group, "
            f"also the last one, has {drawn.ranks} to {number} micro-batches",
            "another group size or number of ranks",
        )
    return group


def world_of(problem: Problem, nodes: str, devices_per_node: int | None) -> tuple[int, ...]:
    """Return the devices of a job in the order of its ranks: ``devices_per_node``, or all, of each node of a hostlist.

    Raises InvalidDocument for a node that the topology lacks, one named twice, and one with fewer devices.
    """
    devices_of = dict(zip(problem.network.node_names, problem.nodes(), strict=True))
    names = expand(nodes) if nodes.strip() else list(devices_of)
    if doubled := [name for name, count in Counter(names).items() if count > 1]:
        raise wrong(f"node {doubled[0]!r} is named twice", where="/nodes")
    for name in names:
        if name not in devices_of:
            hint = meant(name, devices_of, f"nodes are called like {next(iter(devices_of))!r}")
            raise wrong(f"the topology has no node {name!r}", hint, "/nodes")
        if devices_per_node is not None and len(devices_of[name]) < devices_per_node:
            raise wrong(f"node {name!r} has {len(devices_of[name])} devices, not {devices_per_node}", where="/nodes")
    return tuple(device for name in names for device in devices_of[name][:devices_per_node])


def wrong(what: str, remedy: str | None = None, where: str | None = None) -> InvalidDocument:
    """Return the error of a layout that contradicts itself or the request; ``where`` is the field of the question."""
    faults = () if where is None else (Fault(where, what, "layout"),)
    return InvalidDocument(f"the layout contradicts itself or the request: {what}", faults=faults, remedy=remedy)
