"""A stage of this rank with all that its STEP works on: layers, optimizer, gradients, versions, reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.executor.program.global_batch import GlobalBatch
from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.stage.averaging import Averaging, ReferenceBucket
from penstock.executor.stage.precision import FULL, Training
from penstock.executor.stage.reduction import Bucket, Reduction
from penstock.executor.stage.sharded_optimizer import Replicated, ShardedStates
from penstock.executor.stage.stage_module import MicroBatch, StageModule
from penstock.executor.stage.versions import Version, Versions
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import Held, Program


class Cell(MicroBatch):
    """A micro-batch that a stage has in flight: of which global batch, and under which version of the weights.

    One object serves all micro-batches that never are in flight together. ``terms``: what the loss of this micro-batch
    is the mean of, where each has a mean of its own.
    """

    __slots__ = ("terms", "version", "within")

    def __init__(self, number: int, rows: range, seeds: tuple[tuple[int, ...], ...], within: GlobalBatch) -> None:
        super().__init__(number, rows, seeds)
        self.within = within
        self.version: Version | None = None
        self.terms: Any = None


@dataclass(slots=True)
class HeldStage:
    """A stage of this rank. ``parameters``: what its optimizer steps, by their full names; always the same objects.

    A layer that several stages of the rank hold is one module, and belongs to the one whose buckets cover it.
    ``counted``: what this rank counts in the norm of all gradients. ``sharding``: which states this replica has.
    ``replicated_buffers``: buffers that other ranks have too, with the first of these and their process group.
    ``schedule``: of the learning rate, stepped after each step of the optimizer.
    ``scale``: what gradients are multiplied by where micro-batches are normalised one by one (weight stashing).
    ``row_group``: the replicas that share a micro-batch's rows.
    """

    held: Held
    module: StageModule
    parameters: dict[str, nn.Parameter]
    optimizer: Optimizer | None
    reduction: Reduction | None
    versions: Versions | None
    averaging: Averaging | None
    ties: dict[int, nn.Parameter]
    tie_groups: Mapping[int, Any]
    counted: list[nn.Parameter]
    sharding: ShardedStates | None = None
    replicated_buffers: list[tuple[Tensor, int, Any]] = field(default_factory=list)
    schedule: LRScheduler | None = None
    scale: float | None = None
    row_group: Any = None
    _flat: list[Tensor] = field(default_factory=list)
    _views: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    _plain: list[nn.Parameter] = field(default_factory=list)

    def clear_gradients(self) -> None:
        """Start with no gradients, or with zeros where they have a place of their own."""
        for parameter in self._plain:
            parameter.grad = None
        if self._flat:
            for flat in self._flat:
                flat.zero_()
            for parameter, view in self._views:
                parameter.grad = view
        if self.reduction is not None:
            self.reduction.begin()

    def step(self) -> None:
        """The optimizer's step, by the update rule."""
        if self.optimizer is None:
            return
        update: Callable[[], Any] = self.optimizer.step
        if self.sharding is not None:
            update = partial(self.sharding.step, update)
        if self.versions is not None:
            self.versions.step(update)
        elif self.averaging is not None:
            self.averaging.step(update)
        else:
            update()
        if self.schedule is not None:
            self.schedule.step()

    def share_buffers(self) -> list[Any]:
        """Start to take the buffers of the first rank that has them, such as running statistics; what to wait for."""
        return [
            torch.distributed.broadcast(buffer, src=first, group=group, async_op=True)
            for buffer, first, group in self.replicated_buffers
        ]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that the next step uses; zeros for a parameter that has none."""
        for name, parameter in self.parameters.items():
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


class Holder:
    """Makes the stages of a rank, in the order of its program."""

    def __init__(
        self,
        programs: Sequence[Program],
        chain: Chain,
        shapes: Sequence[dict[str, TensorShape]],
        groups: Sequence[Any],
        *,
        seed: int,
        device: torch.device,
        training: Training = FULL,
    ) -> None:
        self.programs = programs
        self.program = programs[0]
        self.chain = chain
        self.shapes = shapes
        self.groups = groups
        self.seed = seed
        self.device = device
        self.training = training
        self._modules: dict[int, nn.Module] = {}
        self._taken: set[int] = set()
        self._tied = {tie.name: k for k, tie in enumerate(self.program.shared)}

    def stages(self) -> dict[int, HeldStage]:
        """The stages by number."""
        modules = {held.stage: self._module(held) for held in self.program.stages}
        return {held.stage: self._stage(held, modules[held.stage]) for held in self.program.stages}

    def _module(self, held: Held) -> StageModule:
        module = StageModule(
            self.chain,
            self.shapes,
            held.first,
            held.last,
            seed=self.seed,
            recompute=held.recompute,
            device=self.device,
            training=self.training,
            split=self._has(held.stage, "W"),
            modules=self._modules,
        )
        self._modules |= module.modules
        return module

    def _has(self, stage: int, kind: str) -> bool:
        return any(one.kind == kind and one.stage == stage for p in self.programs for one in _parts(p))

    def _stage(self, held: Held, module: StageModule) -> HeldStage:
        names = {id(p): name for name, p in self.chain.named_parameters(self._modules)}
        in_bucket: dict[int, list[nn.Parameter]] = {}
        ties: dict[int, nn.Parameter] = {}
        for k, (first, last, _) in sorted(enumerate(held.buckets), key=lambda entry: entry[1][0]):
            in_bucket[k] = members = []
            for i in range(first, last + 1):
                for parameter in self._modules[i].parameters():
                    if not parameter.requires_grad or id(parameter) in self._taken:
                        continue
                    self._taken.add(id(parameter))
                    tie = self._tied.get(names[id(parameter)])
                    if tie is None:
                        members.append(parameter)
                    else:
                        ties[tie] = parameter
        parameters = [p for k in sorted(in_bucket, reverse=True) for p in in_bucket[k]] + list(ties.values())
        stage = HeldStage(
            held,
            module,
            {names[id(p)]: p for p in parameters},
            self.chain.job.optimizer(parameters) if parameters else None,
            None,
            None,
            self._averaging(held, in_bucket),
            ties,
            {k: self.groups[self.program.shared[k].group] for k in ties},
            self._counted(held, in_bucket, ties),
        )
        if self.program.shard_states and stage.optimizer is not None:
            stage.sharding = self._sharding(held, in_bucket, stage.optimizer)
        if self.program.update_rule != "elastic_averaging":
            stage.replicated_buffers = [
                (buffer, self.program.groups[group][0], self.groups[group])
                for first, last, group in held.buckets
                if group >= 0
                for i in range(first, last + 1)
                for buffer in self._modules[i].buffers()
            ]
        stage.schedule = self._schedule(stage.optimizer)
        if self.program.update_rule == "weight_stashing":
            stage.scale = 1.0 / held.update_every
            if len(held.ranks) > 1 and held.dispatch == "rows":
                stage.row_group = self.groups[held.buckets[0][2]]
        self._place_gradients(stage, in_bucket)
        return stage

    def _counted(
        self, held: Held, in_bucket: Mapping[int, list[nn.Parameter]], ties: Mapping[int, nn.Parameter]
    ) -> list[nn.Parameter]:
        """Parameters that no rank before this one holds: over all ranks each is counted once."""
        groups = self.program.groups
        counted = []
        for k, members in in_bucket.items():
            group = held.buckets[k][2]
            if group < 0 or min(groups[group]) == self.program.rank:
                counted += members
        return counted + [p for k, p in ties.items() if min(groups[self.program.shared[k].group]) == self.program.rank]

    def _sharding(
        self, held: Held, in_bucket: Mapping[int, list[nn.Parameter]], optimizer: Optimizer
    ) -> ShardedStates | None:
        replicated = [
            Replicated(members, self.groups[group], self.program.groups[group])
            for k, members in sorted(in_bucket.items())
            if (group := held.buckets[k][2]) >= 0 and members
        ]
        return ShardedStates(optimizer, replicated, self.program.rank) if replicated else None

    def _schedule(self, optimizer: Optimizer | None) -> LRScheduler | None:
        """The job's learning-rate schedule for an optimizer; one that looks at losses has no place in a stage."""
        make: Any = getattr(self.chain.job, "lr_scheduler", None)
        if make is None or optimizer is None:
            return None
        schedule: Any = make(optimizer)
        if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
            raise InvalidDocument(
                f"job {self.chain.job.name!r}: lr_scheduler returned {type(schedule).__name__}",
                remedy="give a scheduler of torch.optim.lr_scheduler that counts steps, such as LambdaLR",
            )
        return schedule

    def _place_gradients(self, stage: HeldStage, in_bucket: Mapping[int, list[nn.Parameter]]) -> None:
        """Gradients lie in flat buffers where they are reduced, or where several versions share them."""
        held = stage.held
        versioned = self._limit(held.stage) > 1
        placed: dict[int, Tensor] = {}
        buckets = {}
        for k, members in in_bucket.items():
            group = held.buckets[k][2]
            reduced = group >= 0 and stage.averaging is None and self.program.update_rule != "elastic_averaging"
            if reduced or versioned:
                bucket = Bucket(members, self.groups[group] if reduced else None)
                if reduced:
                    buckets[k] = bucket
                stage._flat += bucket.flat
                placed |= {id(p): view for p, view in zip(members, bucket.views, strict=True)}
        if versioned and stage.ties:
            bucket = Bucket(list(stage.ties.values()), None)
            stage._flat += bucket.flat
            placed |= {id(p): view for p, view in zip(stage.ties.values(), bucket.views, strict=True)}
        parameters = list(stage.parameters.values())
        stage._views = [(p, placed[id(p)]) for p in parameters if id(p) in placed]
        stage._plain = [p for p in parameters if id(p) not in placed]
        if buckets:
            stage.reduction = Reduction(buckets)
        if versioned and parameters:
            for parameter, view in stage._views:
                parameter.grad = view
            stage.versions = Versions(
                stage.module.modules.values(),
                parameters,
                [placed[id(p)] for p in parameters],
                limit=self._limit(held.stage),
                oldest=self._oldest(held.stage),
            )

    def _limit(self, stage: int) -> int:
        return max(held.versions for program in self.programs for held in program.stages if held.stage == stage)

    def _oldest(self, stage: int) -> int:
        """By how many updates the forwards of a stage lag behind at most."""
        delays = [one.micro_batch for p in self.programs for one in _parts(p) if one[:2] == ("VERSION", stage)]
        return max(delays, default=0)

    def _averaging(self, held: Held, in_bucket: Mapping[int, list[nn.Parameter]]) -> Averaging | None:
        program = self.program
        if program.update_rule != "elastic_averaging" or program.pipelines == 1:
            return None
        buckets = {
            k: ReferenceBucket(members, self.groups[held.buckets[k][2]], k)
            for k, members in sorted(in_bucket.items())
            if members
        }
        return Averaging(buckets, pipelines=program.pipelines, staleness=program.staleness)


def _parts(program: Program) -> Iterator[Any]:
    """The instructions, those of the body once."""
    yield from program.prologue
    yield from program.body
    yield from program.epilogue


def sum_tie(stage: HeldStage, number: int) -> None:
    """Sum the gradient of tie ``number`` over all ranks that hold it; every rank then makes the same step of it."""
    parameter = stage.ties[number]
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    torch.distributed.all_reduce(parameter.grad, group=stage.tie_groups[number])


def refuse_other_stages(programs: Sequence[Program]) -> None:
    """Raise InvalidDocument where programs that are to share stages hold others."""
    first = programs[0]
    for other in programs[1:]:
        if _essence(other) != _essence(first):
            raise InvalidDocument(
                f"the programs of rank {first.rank} hold different stages or groups; lower them from one plan"
            )


def _essence(program: Program) -> Any:
    stages = [(h.stage, h.first, h.last, h.replica, h.ranks, h.rows, h.buckets, h.recompute) for h in program.stages]
    return program.rank, program.num_micro_batches, program.update_rule, program.groups, program.shared, stages
