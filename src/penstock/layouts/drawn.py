"""``Drawn``: what a trainer's own file says of a pipeline, in our words; and the plan that the trainer makes of it."""

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
    """A layout. ``stages``: first and last layer of each; ``ranks`` of the pipeline, to which stages are dealt in turn.

    ``rows``: samples of a micro-batch on each replica; ``group``: micro-batches that interleaved 1F1B takes together.
    ``local_rows``: samples of a replica between two flushes. ``overlap``: all-reduce during the backwards.
    ``shard_states``: optimizer states are shared out over replicas. ``processes``: devices that the launcher starts.
    ``gradient``: width of the gradients of 16-bit parameters. ``other_order``: ranks count along the pipeline first,
    which differs from stage after stage where there are several ranks and replicas. ``sharding``: gradients, or
    parameters too, are sharded over the replicas, as is judged where these are all GPUs of the cluster;
    ``counted_whole``: what is said where they are not, and are counted whole. ``unmodelled``: the names of what lowers
    memory and is not counted, so that a layout may fit that does not by Penstock's count. ``degrees``: GPUs that share
    a layer; ``named``: how the file has each of them, by place; ``sized``, ``launched``: likewise ranks and batch, and
    what says how many processes start; ``modules``: those that every layer recomputes; ``sequence_parallel``:
    whether activations between layers are split too. None: not said.
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
    """A reader's input other than the text: the model, its roles where names say them, and what the text may leave out.

    ``rows`` and ``ranks`` as in ``Drawn``. ``gpus``: how many each device of the topology represents; 0 where that
    differs.
    """

    profile: ModelProfile
    roles: Roles | None
    source: str
    rows: int | None = None
    ranks: int | None = None
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Expressed:
    """A plan that a trainer can express, for a writer. ``nodes``: name and GPUs of each, as ranks count them.

    ``replicas``: of a stage, each of tensor × context GPUs; ``order`` by our name; ``group``: micro-batches that
    interleaved 1F1B takes together; ``rows``: samples of a micro-batch on each replica; ``modules``: what every layer
    recomputes by itself; ``gradient``: width of gradients; ``gpus``: of the largest device of the topology.
    ``context_kind``: how GPUs that share a sequence see all keys; ``title`` says which plan it is.
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
        """Whether replicas share out the optimizer's states at least."""
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
        """What a file says above what its trainer reads."""
        hosts = ", ".join(f"{name} ({count})" for name, count in self.nodes)
        within = f" × {self.degrees.mesh} that share layers ({self.degrees})" if self.degrees != ONE else ""
        return [
            self.title,
            f"{self.world} ranks, {self.ranks} of the pipeline × {self.replicas} replicas{within}; they count through "
            f"these nodes (devices of each): {hosts}",
            *self.assumptions,
        ]


def placed(problem: Problem, within: Within, drawn: Drawn, world: Sequence[int]) -> Allocation:
    """The stages on the devices that ranks count through (``world_of``).

    Raises InvalidDocument where devices, ranks, batch and micro-batches do not fit each other.
    """
    devices, each = len(world), len(problem.gpus(0))
    if drawn.ranks > devices or devices % drawn.ranks:
        several = f"{devices * each} GPUs in groups of {each}, which is {devices} groups," if each > 1 else ""
        raise wrong(
            f"{several or f'{devices} devices'} cannot be {drawn.ranks} pipeline ranks with equally many replicas"
            f"{_other_size(problem, drawn, world)}",
            "the nodes that the job runs on (--nodes), or another pipeline size",
        )
    replicas = devices // drawn.ranks
    if drawn.other_order and drawn.ranks > 1 and problem.samples_per_row > 1:
        raise wrong(
            "--use-tp-pp-dp-mapping counts ranks along the pipeline first, and experts are spread over "
            f"{problem.samples_per_row} replicas: they would be on different stages",
            "leave it out, or fewer ranks for the experts",
        )
    rows = drawn.rows or 1
    number, left = divmod(problem.global_batch_size, rows * replicas)
    if left or number == 0:
        raise wrong(
            f"a global batch of {problem.batch_samples} samples is no multiple of {rows} samples × "
            f"{replicas * problem.samples_per_row} "
            f"replicas: micro-batches would not be equal{_other_size(problem, drawn, world)}",
            "another micro-batch size (--micro-batch-size) or global batch size",
        )
    if drawn.other_order:
        held = [tuple(world[r :: drawn.ranks]) for r in range(drawn.ranks)]
    else:
        held = [tuple(world[r * replicas : (r + 1) * replicas]) for r in range(drawn.ranks)]
    modules = without_parts(tuple(module for module in drawn.modules if module in problem.modules))
    rank_of = ranks_of_stages(drawn.schedule, drawn.ranks, len(drawn.stages) // drawn.ranks)
    plain = [Stage(first, last, held[r]) for r, (first, last) in zip(rank_of, drawn.stages, strict=True)]
    stages = tuple(
        Stage(stage.first, stage.last, stage.devices, "rows", within.segments(stage, drawn.recompute), modules=modules)
        for stage in plain
    )
    return single_pipeline(stages, number)


def ordered(problem: Problem, within: Within, drawn: Drawn, allocation: Allocation) -> Orders:
    """The trainer's order on the stages. Raises InvalidDocument for micro-batches that do not go into its groups."""
    group = _group(within, drawn, allocation.num_micro_batches)
    return order_of(problem, allocation, drawn.schedule, group)


def by_hand(problem: Problem, allocation: Allocation, orders: Orders, overlap: bool) -> tuple[JudgedPlan, list[str]]:
    """The plan, judged as it is, and what verification finds wrong. Raises InvalidPlan where it cannot be simulated."""
    faults = check_allocation(problem, allocation) or check_rows(problem, allocation, orders)
    if faults or (apart := unreachable(problem, allocation)) is not None:
        raise InvalidPlan(f"the layout cannot be simulated: {faults[0] if faults else apart}")
    timeline = simulate(problem, allocation, orders, overlap=overlap)
    faults = verify(problem, allocation, orders, timeline, overlap=overlap)
    return JudgedPlan.of("by-hand", allocation, orders, timeline, overlap), faults


def differing(problem: Problem, within: Within, drawn: Drawn, world: Sequence[int]) -> tuple[str, ...]:
    """What the layout's own numbers say otherwise than what is judged. Raises InvalidDocument for contradictions."""
    said = []
    if other := _other_size(problem, drawn, world):
        said.append(other.removeprefix("; "))
    said += _not_judged(problem, drawn)
    if drawn.local_rows is not None:
        replicas = len(world) // drawn.ranks
        flushed = drawn.local_rows * replicas
        times, left = divmod(problem.global_batch_size, flushed)
        if left or times == 0 or (times > 1 and within.trainer != "torchtitan"):
            raise wrong(
                f"{drawn.local_rows} samples on each of {replicas * problem.samples_per_row} replicas are "
                f"{flushed * problem.samples_per_row}, the request has {problem.batch_samples}",
                "a global batch size that agrees, or the nodes that the job runs on (--nodes)",
            )
        if times > 1:
            said.append(
                f"the step is {times} pipelines of {drawn.local_rows} samples a replica, one after the other "
                "(gradient accumulation); judged is one of them all, which waits less"
            )
    return tuple(said)


def _other_size(problem: Problem, drawn: Drawn, world: Sequence[int]) -> str:
    """What to add where the file starts another number of devices than the job has."""
    gpus = len(world) * len(problem.gpus(0))
    if drawn.processes in (None, gpus):
        return ""
    by = " and ".join(f"{name} ({place})" for name, place in drawn.launched) or "its flags"
    return f"; {by} start {drawn.processes} devices; judged is a job on {gpus}"


def in_file(error: InvalidDocument, source: str, drawn: Drawn) -> InvalidDocument:
    """An error of a layout that does not fit, with the file, and by line the numbers that the layout has there."""
    if error.faults:
        return error
    faults = tuple(Fault(place, name, "layout") for name, place in (*drawn.sized, *drawn.launched))
    return InvalidDocument(f"{source}: {error.detail}", faults=faults, remedy=error.remedy)


def lacking_modules(problem: Problem, drawn: Drawn) -> Modules:
    """Return the modules that are recomputed and have no costs."""
    return tuple(module for module in drawn.modules if module not in problem.modules)


def not_counted(problem: Problem, drawn: Drawn) -> tuple[str, ...]:
    """Return the names of what lowers memory and is not counted."""
    return (*drawn.unmodelled, *(f"recomputing {module}" for module in lacking_modules(problem, drawn)))


def _not_judged(problem: Problem, drawn: Drawn) -> list[str]:
    """What of degrees and of recomputed modules the costs do not have."""
    said = []
    if lacking := lacking_modules(problem, drawn):
        said.append(f"recomputing {', '.join(lacking)} is not counted: no costs of that at {problem.degrees}")
    if drawn.degrees.tensor > 1 and drawn.sequence_parallel is False:
        said.append(
            "no sequence parallelism: judged is the same with it, which sends as much and keeps less of what is between"
            " layers"
        )
    return said


def _group(within: Within, drawn: Drawn, number: int) -> int | None:
    """How many micro-batches interleaved 1F1B takes together."""
    if drawn.schedule != "interleaved":
        return None
    group = drawn.group or within.group(drawn.ranks, number)
    if group is None:
        raise wrong(
            f"interleaved 1F1B takes micro-batches in groups of {drawn.ranks}, the pipeline ranks"
            + (f", or in {number // drawn.ranks} equal ones" if within.rounds else "")
            + f"; {number} are no multiple of that",
            "another micro-batch size or global batch size, or one stage on each rank",
        )
    if not groups_go(drawn.ranks, number, group) or (group < drawn.ranks and not within.rounds):
        raise wrong(
            f"{number} micro-batches in groups of {group} leave {number % group} for {drawn.ranks} pipeline ranks; a "
            f"group has at least one micro-batch per rank, {drawn.ranks}, and at most all of them, {number}",
            "another size of groups, or the number of ranks",
        )
    return group


def world_of(problem: Problem, nodes: str, devices_per_node: int | None) -> tuple[int, ...]:
    """The devices of a job in the order of its ranks: ``devices_per_node``, or all, of each node of a hostlist.

    Raises InvalidDocument for a node that the topology lacks, one named twice, and one with fewer devices.
    """
    known = dict(zip(problem.network.node_names, problem.nodes(), strict=True))
    names = expand(nodes) if nodes.strip() else list(known)
    if doubled := [name for name, count in Counter(names).items() if count > 1]:
        raise wrong(f"node {doubled[0]!r} is named twice", where="/nodes")
    for name in names:
        if name not in known:
            hint = meant(name, known, f"nodes are called like {next(iter(known))!r}")
            raise wrong(f"the topology has no node {name!r}", hint, "/nodes")
        if devices_per_node is not None and len(known[name]) < devices_per_node:
            raise wrong(f"node {name!r} has {len(known[name])} devices, not {devices_per_node}", where="/nodes")
    return tuple(device for name in names for device in known[name][:devices_per_node])


def wrong(what: str, remedy: str | None = None, where: str | None = None) -> InvalidDocument:
    """A layout that contradicts itself or the request; ``where``: in which field of the question."""
    faults = () if where is None else (Fault(where, what, "layout"),)
    return InvalidDocument(f"the layout contradicts itself or the request: {what}", faults=faults, remedy=remedy)
