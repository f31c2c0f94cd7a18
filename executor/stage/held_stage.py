"""A stage of this rank with all that its STEP works on: layers, optimizer, gradients, versions, reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class StageParts:
    """The parameters that a stage steps. A layer that several stages of the rank hold belongs to one of them.

    ``buckets``: those of each of the stage's buckets, by number; ``ties``: the tied ones, by number in the program.
    ``names``: all of them by their full names, in the optimizer's order; always the same objects.
    """

    held: Held
    buckets: Mapping[int, list[nn.Parameter]]
    ties: Mapping[int, nn.Parameter]
    names: Mapping[str, nn.Parameter]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them, in the optimizer's order."""
        return list(self.names.values())


@dataclass(frozen=True, slots=True)
class Gradients:
    """Where a stage's gradients lie: in flat buffers where they are reduced, or where several versions share them.

    ``views``: parameters with their places in ``flat``; ``plain``: the others, whose gradients autograd makes.
    ``reduced``: the buckets that are reduced, by number.
    """

    flat: Sequence[Tensor]
    views: Sequence[tuple[nn.Parameter, Tensor]]
    plain: Sequence[nn.Parameter]
    reduced: Mapping[int, Bucket]

    def clear(self) -> None:
        """Leave no gradients, or zeros where they have a place of their own."""
        for parameter in self.plain:
            parameter.grad = None
        for flat in self.flat:
            flat.zero_()
        for parameter, view in self.views:
            parameter.grad = view


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStage:
    """A stage of this rank, made of its ``parts``.

    ``counted``: what this rank counts in the norm of all gradients. ``sharding``: which states this replica has.
    ``replicated_buffers``: buffers that other ranks have too, with the first of these and their process group.
    ``schedule``: of the learning rate, stepped after each step of the optimizer.
    ``scale``: what gradients are multiplied by where micro-batches are normalised one by one (weight stashing).
    ``row_group``: the replicas that share a micro-batch's rows.
    """

    parts: StageParts
    module: StageModule
    gradients: Gradients
    optimizer: Optimizer | None
    reduction: Reduction | None
    versions: Versions | None
    averaging: Averaging | None
    tie_groups: Mapping[int, Any]
    counted: Sequence[nn.Parameter]
    sharding: ShardedStates | None
    replicated_buffers: Sequence[tuple[Tensor, int, Any]]
    schedule: LRScheduler | None
    scale: float | None
    row_group: Any

    @property
    def held(self) -> Held:
        """The stage in the program."""
        return self.parts.held

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer steps, by full names."""
        return self.parts.names

    @property
    def ties(self) -> Mapping[int, nn.Parameter]:
        """The tied parameters that the stage steps, by number in the program."""
        return self.parts.ties

    def clear_gradients(self) -> None:
        """Start with no gradients, or with zeros where they have a place of their own."""
        self.gradients.clear()
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
        parts = self._parts(held)
        optimizer = self.chain.job.optimizer(parts.parameters) if parts.names else None
        averaging = self._averaging(parts)
        sharding = self._sharding(parts, optimizer)
        schedule = self._schedule(optimizer)
        gradients = self._gradients(parts)
        stashing = self.program.update_rule == "weight_stashing"
        shares_rows = stashing and len(held.ranks) > 1 and held.dispatch == "rows"
        return HeldStage(
            parts=parts,
            module=module,
            gradients=gradients,
            optimizer=optimizer,
            reduction=Reduction(dict(gradients.reduced)) if gradients.reduced else None,
            versions=self._versions(parts, module, gradients),
            averaging=averaging,
            tie_groups={k: self.groups[self.program.shared[k].group] for k in parts.ties},
            counted=self._counted(parts),
            sharding=sharding,
            replicated_buffers=self._replicated_buffers(held),
            schedule=schedule,
            scale=1.0 / held.update_every if stashing else None,
            row_group=self.groups[held.buckets[0][2]] if shares_rows else None,
        )

    def _parts(self, held: Held) -> StageParts:
        names = {id(p): name for name, p in self.chain.named_parameters(self._modules)}
        buckets: dict[int, list[nn.Parameter]] = {}
        ties: dict[int, nn.Parameter] = {}
        for k, (first, last, _) in sorted(enumerate(held.buckets), key=lambda entry: entry[1][0]):
            buckets[k] = members = []
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
        parameters = [p for k in sorted(buckets, reverse=True) for p in buckets[k]] + list(ties.values())
        return StageParts(held, buckets, ties, {names[id(p)]: p for p in parameters})

    def _replicated_buffers(self, held: Held) -> list[tuple[Tensor, int, Any]]:
        if self.program.update_rule == "elastic_averaging":
            return []
        return [
            (buffer, self.program.groups[group][0], self.groups[group])
            for first, last, group in held.buckets
            if group >= 0
            for i in range(first, last + 1)
            for buffer in self._modules[i].buffers()
        ]

    def _counted(self, parts: StageParts) -> list[nn.Parameter]:
        """Parameters that no rank before this one holds: over all ranks each is counted once."""
        groups = self.program.groups
        counted = []
        for k, members in parts.buckets.items():
            group = parts.held.buckets[k][2]
            if group < 0 or min(groups[group]) == self.program.rank:
                counted += members
        tied = parts.ties.items()
        return counted + [p for k, p in tied if min(groups[self.program.shared[k].group]) == self.program.rank]

    def _sharding(self, parts: StageParts, optimizer: Optimizer | None) -> ShardedStates | None:
        if optimizer is None or not self.program.shard_states:
            return None
        replicated = [
            Replicated(members, self.groups[group], self.program.groups[group])
            for k, members in sorted(parts.buckets.items())
            if (group := parts.held.buckets[k][2]) >= 0 and members
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

    def _gradients(self, parts: StageParts) -> Gradients:
        """Places for the stage's gradients."""
        versioned = self._limit(parts.held.stage) > 1
        placed: dict[int, Tensor] = {}
        flat: list[Tensor] = []
        reduced: dict[int, Bucket] = {}
        for k, members in (*parts.buckets.items(), (-1, list(parts.ties.values()))):
            group = parts.held.buckets[k][2] if k >= 0 else -1
            is_reduced = group >= 0 and self.program.update_rule != "elastic_averaging"
            if not is_reduced and not versioned:
                continue
            bucket = Bucket(members, self.groups[group] if is_reduced else None)
            if is_reduced:
                reduced[k] = bucket
            flat += bucket.flat
            placed |= {id(p): view for p, view in zip(members, bucket.views, strict=True)}
        views = [(p, placed[id(p)]) for p in parts.parameters if id(p) in placed]
        return Gradients(flat, views, [p for p in parts.parameters if id(p) not in placed], reduced)

    def _versions(self, parts: StageParts, module: StageModule, gradients: Gradients) -> Versions | None:
        limit = self._limit(parts.held.stage)
        if limit == 1 or not parts.names:
            return None
        for parameter, view in gradients.views:
            parameter.grad = view
        return Versions(
            module.modules.values(),
            parts.parameters,
            [view for _, view in gradients.views],
            limit=limit,
            oldest=self._oldest(parts.held.stage),
        )

    def _limit(self, stage: int) -> int:
        return max(held.versions for program in self.programs for held in program.stages if held.stage == stage)

    def _oldest(self, stage: int) -> int:
        """By how many updates the forwards of a stage lag behind at most."""
        delays = [one.micro_batch for p in self.programs for one in _parts(p) if one[:2] == ("VERSION", stage)]
        return max(delays, default=0)

    def _averaging(self, parts: StageParts) -> Averaging | None:
        program = self.program
        if program.update_rule != "elastic_averaging" or program.pipelines == 1:
            return None
        buckets = {
            k: ReferenceBucket(members, self.groups[parts.held.buckets[k][2]], k)
            for k, members in sorted(parts.buckets.items())
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
