"""A stage of this rank with all that its STEP uses: layers, optimizer, gradients, versions, reference model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.executor.divided.optimizers import refuse_whole_tensor_optimizer
from penstock.executor.program.global_batch import GlobalBatch
from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.runtime.interface import Runtime
from penstock.executor.stage.averaging import Averaging, ReferenceBucket
from penstock.executor.stage.layerwise_stage import LayerwiseStage
from penstock.executor.stage.precision import FULL, Training, forget_casts
from penstock.executor.stage.reduction import Bucket, Reduction, Summed
from penstock.executor.stage.sharded_optimizer import ShardedStates, Shares, shares_of
from penstock.executor.stage.sharded_parameters import RowPiece, Shards
from penstock.executor.stage.sharing import share_out
from penstock.executor.stage.stage_module import MicroBatch, StageModule
from penstock.executor.stage.versions import Version, Versions, places_of
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import WITHIN_PASSES, Program, RankStage

if TYPE_CHECKING:
    from penstock.executor.divided.division import Division, Piece


_Summed = tuple[list[nn.Parameter], int]


class Cell(MicroBatch):
    """A micro-batch that a stage has in flight, with its global batch and the version of the weights that it uses.

    One object serves all micro-batches that are never in flight together. ``terms``: the terms of this micro-batch's
    mean loss, where each micro-batch is normalised separately.
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

    ``buckets``: the parameters of each bucket of the stage, by number. ``ties``: the tied parameters, by number in the
    program. ``names``: all parameters by full name, in the optimizer's order; always the same objects. ``pieces``: this
    rank's parts of the layers' parameters, by full name, where ranks share layers. ``entry``: the stage in the program.
    """

    entry: RankStage
    buckets: Mapping[int, list[nn.Parameter]]
    ties: Mapping[int, nn.Parameter]
    names: Mapping[str, nn.Parameter]
    pieces: Mapping[str, Piece | RowPiece]

    def summed(self, number: int) -> tuple[_Summed, _Summed]:
        """Return a bucket's dense parameters and its experts, each with the number of the group that sums them."""
        entry, members = self.entry, self.buckets[number]
        experts = {id(piece.local_parameter) for piece in self.pieces.values() if piece.is_expert}
        dense = [parameter for parameter in members if id(parameter) not in experts]
        routed = [parameter for parameter in members if id(parameter) in experts]
        return (dense, entry.buckets[number][2]), (routed, entry.expert_groups[number] if entry.expert_groups else -1)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the optimizer's order."""
        return list(self.names.values())

    def shared(self, name: str, value: Any) -> Any:
        """Return a parameter's value, or a state of its shape, as this rank's part of a tensor of all ranks' parts."""
        piece = self.pieces.get(name)
        alike = piece is not None and isinstance(value, Tensor) and value.shape == piece.local_parameter.shape
        return piece.shared(value) if piece is not None and alike else value

    def local_part(self, name: str, value: Any) -> Any:
        """Return this rank's part of a tensor that ``shared`` returned."""
        piece = self.pieces.get(name)
        return value if piece is None else piece.part(value)


@dataclass(frozen=True, slots=True)
class Gradients:
    """The memory of a stage's gradients: flat buffers where they are reduced, or where several versions share them.

    ``views``: parameters with their places in ``flat``. ``plain``: the other parameters, whose gradients autograd
    allocates. ``reduced``: the buckets that are reduced, by number. ``shards``: parameters with separate buffers.
    """

    flat: Sequence[Tensor]
    views: Sequence[tuple[nn.Parameter, Tensor]]
    plain: Sequence[nn.Parameter]
    reduced: Mapping[int, Bucket]
    shards: Shards | None = None

    def clear(self) -> None:
        """Remove all gradients, or set them to zero where they have a place in a buffer."""
        if self.shards is not None:
            self.shards.clear()
        for parameter in self.plain:
            parameter.grad = None
        for flat in self.flat:
            flat.zero_()
        for parameter, view in self.views:
            parameter.grad = view


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStage:
    """A stage of this rank, with the parameters in ``parts``.

    ``counted``: the parameters that this rank counts in the norm of all gradients. ``sharding``, ``shards``: the
    states, and the gradients and parameters, that this replica has. ``replicated_buffers``: buffers that other ranks
    have too, with the first of these ranks and their process group. ``schedule``: the learning-rate schedule.
    ``scale``: the factor for gradients where micro-batches are normalised separately (weight stashing). ``row_group``:
    the replicas that split each micro-batch. ``part_group``: ranks that each have a part of some gradients, or None.
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
    shards: Shards | None
    replicated_buffers: Sequence[tuple[Tensor, int, Any]]
    schedule: LRScheduler | None
    scale: float | None
    row_group: Any
    part_group: Any

    @property
    def entry(self) -> RankStage:
        """The stage in the program."""
        return self.parts.entry

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the optimizer steps, by full name."""
        return self.parts.names

    @property
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """The parameters that this rank steps. It has their optimizer states."""
        sharding = self.sharding
        if sharding is None:
            return self.parameters
        return {name: parameter for name, parameter in self.parameters.items() if sharding.steps(parameter)}

    @property
    def ties(self) -> Mapping[int, nn.Parameter]:
        """The tied parameters that the stage steps, by number in the program."""
        return self.parts.ties

    def clear_gradients(self) -> None:
        """Remove all gradients, or set them to zero where they have a place in a buffer."""
        self.gradients.clear()
        if self.reduction is not None:
            self.reduction.begin()

    def step(self) -> None:
        """Step the optimizer by the update rule."""
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
        if self.shards is not None:
            self.shards.stepped()
        forget_casts()
        if self.schedule is not None:
            self.schedule.step()

    def share_buffers(self) -> list[Any]:
        """Start to copy the first rank's buffers, such as running statistics; return the works to wait for."""
        return [
            torch.distributed.broadcast(buffer, src=first, group=group, async_op=True)
            for buffer, first, group in self.replicated_buffers
        ]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients that the next step uses; zeros for a parameter without a gradient."""
        for name, parameter in self.stepped.items():
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


class Holder:
    """A builder of the stages of a rank, in the order of its program."""

    def __init__(
        self,
        programs: Sequence[Program],
        chain: Chain,
        shapes: Sequence[dict[str, TensorShape]],
        groups: Sequence[Any],
        *,
        seed: int,
        runtime: Runtime,
        training: Training = FULL,
        division: Division | None = None,
    ) -> None:
        self.division = division
        self._pieces: dict[int, Piece] = {}
        self.programs = programs
        self.program = programs[0]
        self.chain = chain
        self.shapes = shapes
        self.groups = groups
        self.seed = seed
        self.runtime = runtime
        self.training = training
        self._modules: dict[int, nn.Module] = {}
        self._parameter_ids: set[int] = set()
        self._tied = {tie.name: k for k, tie in enumerate(self.program.shared)}

    def stages(self) -> dict[int, HeldStage]:
        """Build the stages, by number."""
        modules = {entry.stage: self._module(entry) for entry in self.program.stages}
        return {entry.stage: self._stage(entry, modules[entry.stage]) for entry in self.program.stages}

    def _module(self, entry: RankStage) -> StageModule:
        kind = LayerwiseStage if self.program.sharding in WITHIN_PASSES else StageModule
        module = kind(
            self.chain,
            self.shapes,
            entry.first,
            entry.last,
            seed=self.seed,
            recompute=entry.recompute,
            recomputed_modules=entry.modules,
            runtime=self.runtime,
            training=self.training,
            split=self._has(entry.stage, "W"),
            modules=self._modules,
            division=self.division,
        )
        if self.division is not None:
            for index in module.modules.keys() - self._modules.keys():
                for leaf, piece in self.division.pieces(index, module.modules[index]):
                    self._pieces.setdefault(id(leaf), piece)
        self._modules |= module.modules
        return module

    def _local_parameter(self, leaf: nn.Parameter) -> nn.Parameter:
        """Return this rank's part of a layer's parameter."""
        piece = self._pieces.get(id(leaf))
        return leaf if piece is None else piece.local_parameter

    def _has(self, stage: int, kind: str) -> bool:
        return any(one.kind == kind and one.stage == stage for p in self.programs for one in _parts(p))

    def _stage(self, entry: RankStage, module: StageModule) -> HeldStage:
        parts, shards = share_out(self._parts(entry), self.program, self.groups, self._modules)
        if shards is not None:
            shards.enclose(module.modules, lowered=self.training.lowered)
            if isinstance(module, LayerwiseStage):
                module.shards = shards
        pieces = parts.pieces.values()
        apart = [each.local_parameter for each in pieces if isinstance(each, RowPiece) or each.is_sharded]
        refuse_whole_tensor_optimizer(self.chain.job, apart)
        optimizer = self._optimizer(parts)
        averaging = self._averaging(parts)
        schedule = self._schedule(optimizer)
        shares = self._shares(parts)
        gradients = self._gradients(parts, shares, shards)
        flats = [flat for k in sorted(gradients.reduced) for flat in gradients.reduced[k].flats if flat.is_shared_out]
        sharding = ShardedStates(optimizer, flats) if optimizer is not None and flats else None
        stashing = self.program.update_rule == "weight_stashing"
        shares_rows = stashing and entry.buckets[0][2] >= 0 and entry.dispatch == "rows"
        return HeldStage(
            parts=parts,
            module=module,
            gradients=gradients,
            optimizer=optimizer,
            reduction=Reduction(dict(gradients.reduced)) if gradients.reduced else None,
            versions=self._versions(parts, module, gradients),
            averaging=averaging,
            tie_groups={k: self.groups[self.program.shared[k].group] for k in parts.ties},
            counted=self._counted(parts, sharding),
            sharding=sharding,
            shards=shards,
            replicated_buffers=self._replicated_buffers(entry),
            schedule=schedule,
            scale=1.0 / entry.update_every if stashing else None,
            row_group=self.groups[entry.buckets[0][2]] if shares_rows else None,
            part_group=None if self.division is None else self.division.tensor_group,
        )

    def _optimizer(self, parts: StageParts) -> Optimizer | None:
        """Create the job's optimizer for a stage's parameters, in the form that is fastest on the device."""
        if not parts.names:
            return None
        optimizer = self.chain.job.optimizer(parts.parameters)
        self.runtime.prepare(optimizer)
        return optimizer

    def _parts(self, entry: RankStage) -> StageParts:
        names = {id(p): name for name, p in self.chain.named_parameters(self._modules)}
        full_names: dict[int, str] = {}
        pieces: dict[str, Piece] = {}
        buckets: dict[int, list[nn.Parameter]] = {}
        ties: dict[int, nn.Parameter] = {}
        for k, (first, last, _) in sorted(enumerate(entry.buckets), key=lambda pair: pair[1][0]):
            buckets[k] = members = []
            for i in range(first, last + 1):
                for parameter in self._modules[i].parameters():
                    if not parameter.requires_grad or id(parameter) in self._parameter_ids:
                        continue
                    self._parameter_ids.add(id(parameter))
                    tie = self._tied.get(names[id(parameter)])
                    local = self._local_parameter(parameter)
                    full_names[id(local)] = names[id(parameter)]
                    if self.division is not None:
                        pieces[names[id(parameter)]] = self._pieces[id(parameter)]
                    if tie is None:
                        members.append(local)
                    else:
                        ties[tie] = local
        parameters = [p for k in sorted(buckets, reverse=True) for p in buckets[k]] + list(ties.values())
        return StageParts(entry, buckets, ties, {full_names[id(p)]: p for p in parameters}, pieces)

    def _replicated_buffers(self, entry: RankStage) -> list[tuple[Tensor, int, Any]]:
        if self.program.update_rule == "elastic_averaging":
            return []
        return [
            (buffer, self.program.groups[group][0], self.groups[group])
            for first, last, group in entry.buckets
            if group >= 0
            for i in range(first, last + 1)
            for buffer in self._modules[i].buffers()
        ]

    def _counted(self, parts: StageParts, sharding: ShardedStates | None) -> list[nn.Parameter]:
        """Return the parameters that count here, so that each counts once over all ranks."""
        groups = self.program.groups
        counted = []
        for k in parts.buckets:
            for members, group in parts.summed(k):
                if group >= 0 and self.program.sharding is not None:
                    counted += members
                elif group >= 0 and sharding is not None:
                    counted += [parameter for parameter in members if sharding.steps(parameter)]
                elif group < 0 or min(groups[group]) == self.program.rank:
                    counted += members
        tied = parts.ties.items()
        counted += [p for k, p in tied if min(groups[self.program.shared[k].group]) == self.program.rank]
        if self.division is None or self.division.counts:
            return counted
        sharded = {id(piece.local_parameter) for piece in parts.pieces.values() if piece.is_sharded}
        return [parameter for parameter in counted if id(parameter) in sharded]

    def _shares(self, parts: StageParts) -> Shares:
        """Assign parameters of buckets that replicas share out to the replicas that step them.

        Loads are the bytes of whole parameters, so ranks with different parts agree. Each group is balanced by itself.
        """
        program = self.program
        if not program.shard_states or program.update_rule == "elastic_averaging":
            return {}
        leaves = {id(p): p for members in parts.buckets.values() for p in members}
        leaves |= {id(piece.local_parameter): piece.leaf for piece in parts.pieces.values()}
        sizes = {key: leaf.numel() * leaf.element_size() for key, leaf in leaves.items()}
        loads: dict[int, list[int]] = {}
        shares: dict[tuple[int, int], list[list[nn.Parameter]]] = {}
        for k in sorted(parts.buckets):
            for members, group in parts.summed(k):
                if group >= 0 and members:
                    carried = loads.setdefault(group, [0] * len(program.groups[group]))
                    shares[k, group] = shares_of(members, carried, sizes)
        return shares

    def _schedule(self, optimizer: Optimizer | None) -> LRScheduler | None:
        """Create the job's learning-rate schedule for an optimizer. InvalidDocument if it depends on losses."""
        make: Any = getattr(self.chain.job, "lr_scheduler", None)
        if make is None or optimizer is None:
            return None
        schedule: Any = make(optimizer)
        if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
            raise InvalidDocument(
                f"job {self.chain.job.name!r}: lr_scheduler returned {type(schedule).__name__}, which is not supported",
                remedy="give a scheduler of torch.optim.lr_scheduler that counts steps, such as LambdaLR",
            )
        return schedule

    def _gradients(self, parts: StageParts, shares: Shares, shards: Shards | None) -> Gradients:
        """Allocate the stage's gradients."""
        versioned = self._limit(parts.entry.stage) > 1
        pieces = {id(each.local_parameter): each for each in parts.pieces.values() if not isinstance(each, RowPiece)}
        placed: dict[int, Tensor] = {}
        flats: list[Tensor] = []
        reduced: dict[int, Bucket] = {}
        kinds = {k: parts.summed(k) for k in parts.buckets}
        for k, each in (*kinds.items(), (-1, ((list(parts.ties.values()), -1),))):
            units = [] if shards is None else shards.buckets.get(k, ())
            sums = [self._sum(k, members, group, shares) for members, group in each if group < 0 or shards is None]
            is_reduced = any(one.group is not None for one in sums) or any(unit.sums_once for unit in units)
            if not is_reduced and not versioned and not pieces:
                continue
            leaves = [pieces[id(p)].leaf for one in sums for p in one.parameters] if pieces else None
            bucket = Bucket(sums, leaves, [unit for unit in units if unit.sums_once])
            if is_reduced:
                reduced[k] = bucket
            flats += [flat.buffer for flat in bucket.flats]
            placed |= {id(p): view for p, view in zip(bucket.parameters, bucket.views, strict=True)}
        views = [(p, placed[id(p)]) for p in parts.parameters if id(p) in placed]
        divided = [
            (piece.leaf, piece.place(placed[key]))
            for key, piece in pieces.items()
            if piece.leaf is not piece.local_parameter
        ]
        views += [(leaf, place) for leaf, place in divided if place is not None]
        plain = [p for p in parts.parameters if id(p) not in placed and (shards is None or not shards.has(p))]
        return Gradients(flats, views, plain, reduced, shards)

    def _sum(self, number: int, members: list[nn.Parameter], group: int, shares: Shares) -> Summed:
        """Return parameters of a bucket with the ranks that sum their gradients."""
        if group < 0 or self.program.update_rule == "elastic_averaging":
            return Summed(members)
        shares_of_ranks = shares.get((number, group))
        mine = 0 if shares_of_ranks is None else self.program.groups[group].index(self.program.rank)
        return Summed(members, self.groups[group], shares_of_ranks, mine)

    def _versions(self, parts: StageParts, module: StageModule, gradients: Gradients) -> Versions | None:
        limit = self._limit(parts.entry.stage)
        if limit == 1 or not parts.names:
            return None
        gradients.clear()
        pieces = [each for each in parts.pieces.values() if not isinstance(each, RowPiece)]
        return Versions(
            module.modules.values(),
            parts.parameters,
            places_of(parts.parameters, gradients.views, pieces),
            limit=limit,
            oldest=self._oldest(parts.entry.stage),
            runtime=self.runtime,
        )

    def _limit(self, stage: int) -> int:
        return max(entry.versions for program in self.programs for entry in program.stages if entry.stage == stage)

    def _oldest(self, stage: int) -> int:
        """Return by how many updates the forwards of a stage lag behind at most."""
        delays = [one.micro_batch for p in self.programs for one in _parts(p) if one[:2] == ("VERSION", stage)]
        return max(delays, default=0)

    def _averaging(self, parts: StageParts) -> Averaging | None:
        program = self.program
        if program.update_rule != "elastic_averaging" or program.pipelines == 1:
            return None
        buckets = {
            k: ReferenceBucket(members, self.groups[parts.entry.buckets[k][2]], k)
            for k, members in sorted(parts.buckets.items())
            if members
        }
        return Averaging(buckets, pipelines=program.pipelines, staleness=program.staleness)


def _parts(program: Program) -> Iterator[Any]:
    """Yield the instructions; instructions of the body once."""
    yield from program.prologue
    yield from program.body
    yield from program.epilogue


def refuse_other_stages(programs: Sequence[Program]) -> None:
    """Raise InvalidDocument where programs that share stages hold different stages or groups."""
    first = programs[0]
    for other in programs[1:]:
        if _essence(other) != _essence(first):
            raise InvalidDocument(
                f"the programs of rank {first.rank} hold different stages or groups; lower them from one plan"
            )


def _essence(program: Program) -> Any:
    every = program.stages
    stages = [(e.stage, e.first, e.last, e.replica, e.ranks, e.rows, e.buckets, e.recompute, e.modules) for e in every]
    return program.rank, program.num_micro_batches, program.update_rule, program.groups, program.shared, stages
