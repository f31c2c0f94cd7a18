"""A stage of this rank with all that its STEP works on: layers, optimizer, gradients, versions, reference model."""

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
from penstock.schemas.program import WITHIN_PASSES, Held, Program

if TYPE_CHECKING:
    from penstock.executor.divided.division import Division, Piece


_Summed = tuple[list[nn.Parameter], int]


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
    ``names``: all of them by their full names, in the optimizer's order; always the same objects. ``pieces``: what they
    are of the layers' parameters, by full names, where ranks share layers.
    """

    held: Held
    buckets: Mapping[int, list[nn.Parameter]]
    ties: Mapping[int, nn.Parameter]
    names: Mapping[str, nn.Parameter]
    pieces: Mapping[str, Piece | RowPiece]

    def summed(self, number: int) -> tuple[_Summed, _Summed]:
        """A bucket's parameters with the number of the group that sums them: dense ones, and experts of the cell."""
        held, members = self.held, self.buckets[number]
        experts = {id(piece.own) for piece in self.pieces.values() if piece.is_expert}
        dense = [parameter for parameter in members if id(parameter) not in experts]
        own = [parameter for parameter in members if id(parameter) in experts]
        return (dense, held.buckets[number][2]), (own, held.expert_groups[number] if held.expert_groups else -1)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them, in the optimizer's order."""
        return list(self.names.values())

    def shared(self, name: str, value: Any) -> Any:
        """A parameter's value, or a state of its shape, as a part of what the ranks that share layers have of it."""
        piece = self.pieces.get(name)
        alike = piece is not None and isinstance(value, Tensor) and value.shape == piece.own.shape
        return piece.shared(value) if piece is not None and alike else value

    def own(self, name: str, value: Any) -> Any:
        """This rank's part of what ``shared`` made."""
        piece = self.pieces.get(name)
        return value if piece is None else piece.part(value)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Where a stage's gradients lie: in flat buffers where they are reduced, or where several versions share them.

    ``views``: parameters with their places in ``flat``; ``plain``: the others, whose gradients autograd makes.
    ``reduced``: the buckets that are reduced, by number. ``shards``: have places of their own.
    """

    flat: Sequence[Tensor]
    views: Sequence[tuple[nn.Parameter, Tensor]]
    plain: Sequence[nn.Parameter]
    reduced: Mapping[int, Bucket]
    shards: Shards | None = None

    def clear(self) -> None:
        """Leave no gradients, or zeros where they have a place of their own."""
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
    """A stage of this rank, made of its ``parts``.

    ``counted``: what this rank counts in the norm of all gradients. ``sharding``: which states this replica has,
    ``shards`` which gradients and parameters.
    ``replicated_buffers``: buffers that other ranks have too, with the first of these and their process group.
    ``schedule``: of the learning rate, stepped after each step of the optimizer.
    ``scale``: what gradients are multiplied by where micro-batches are normalised one by one (weight stashing).
    ``row_group``: the replicas that share a micro-batch's rows. ``part_group``: the ranks each of which has a part of
    some gradients; None without such.
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
    def held(self) -> Held:
        """The stage in the program."""
        return self.parts.held

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer steps, by full names."""
        return self.parts.names

    @property
    def stepped(self) -> Mapping[str, nn.Parameter]:
        """Those of them that this rank steps, and whose optimizer states it has."""
        sharding = self.sharding
        if sharding is None:
            return self.parameters
        return {name: parameter for name, parameter in self.parameters.items() if sharding.steps(parameter)}

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
        if self.shards is not None:
            self.shards.stepped()
        forget_casts()
        if self.schedule is not None:
            self.schedule.step()

    def share_buffers(self) -> list[Any]:
        """Start to take the buffers of the first rank that has them, such as running statistics; what to wait for."""
        return [
            torch.distributed.broadcast(buffer, src=first, group=group, async_op=True)
            for buffer, first, group in self.replicated_buffers
        ]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that the next step here uses; zeros for a parameter that has none."""
        for name, parameter in self.stepped.items():
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
        self._taken: set[int] = set()
        self._tied = {tie.name: k for k, tie in enumerate(self.program.shared)}

    def stages(self) -> dict[int, HeldStage]:
        """The stages by number."""
        modules = {held.stage: self._module(held) for held in self.program.stages}
        return {held.stage: self._stage(held, modules[held.stage]) for held in self.program.stages}

    def _module(self, held: Held) -> StageModule:
        kind = LayerwiseStage if self.program.sharding in WITHIN_PASSES else StageModule
        module = kind(
            self.chain,
            self.shapes,
            held.first,
            held.last,
            seed=self.seed,
            recompute=held.recompute,
            recomputed_modules=held.modules,
            runtime=self.runtime,
            training=self.training,
            split=self._has(held.stage, "W"),
            modules=self._modules,
            division=self.division,
        )
        if self.division is not None:
            for index in module.modules.keys() - self._modules.keys():
                for leaf, piece in self.division.pieces(index, module.modules[index]):
                    self._pieces.setdefault(id(leaf), piece)
        self._modules |= module.modules
        return module

    def _own(self, leaf: nn.Parameter) -> nn.Parameter:
        """This rank's part of a parameter of a layer."""
        piece = self._pieces.get(id(leaf))
        return leaf if piece is None else piece.own

    def _has(self, stage: int, kind: str) -> bool:
        return any(one.kind == kind and one.stage == stage for p in self.programs for one in _parts(p))

    def _stage(self, held: Held, module: StageModule) -> HeldStage:
        parts, shards = share_out(self._parts(held), self.program, self.groups, self._modules)
        if shards is not None:
            shards.enclose(module.modules, lowered=self.training.lowered)
            if isinstance(module, LayerwiseStage):
                module.shards = shards
        apart = [each.own for each in parts.pieces.values() if isinstance(each, RowPiece) or each.is_sharded]
        refuse_whole_tensor_optimizer(self.chain.job, apart)
        optimizer = self._optimizer(parts)
        averaging = self._averaging(parts)
        schedule = self._schedule(optimizer)
        shares = self._shares(parts)
        gradients = self._gradients(parts, shares, shards)
        flats = [flat for k in sorted(gradients.reduced) for flat in gradients.reduced[k].flats if flat.is_shared_out]
        sharding = ShardedStates(optimizer, flats) if optimizer is not None and flats else None
        stashing = self.program.update_rule == "weight_stashing"
        shares_rows = stashing and held.buckets[0][2] >= 0 and held.dispatch == "rows"
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
            replicated_buffers=self._replicated_buffers(held),
            schedule=schedule,
            scale=1.0 / held.update_every if stashing else None,
            row_group=self.groups[held.buckets[0][2]] if shares_rows else None,
            part_group=None if self.division is None else self.division.tensor_group,
        )

    def _optimizer(self, parts: StageParts) -> Optimizer | None:
        """The job's optimizer of a stage's parameters, stepping as the device does it best."""
        if not parts.names:
            return None
        optimizer = self.chain.job.optimizer(parts.parameters)
        self.runtime.prepare(optimizer)
        return optimizer

    def _parts(self, held: Held) -> StageParts:
        names = {id(p): name for name, p in self.chain.named_parameters(self._modules)}
        full_names: dict[int, str] = {}
        pieces: dict[str, Piece] = {}
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
                    own = self._own(parameter)
                    full_names[id(own)] = names[id(parameter)]
                    if self.division is not None:
                        pieces[names[id(parameter)]] = self._pieces[id(parameter)]
                    if tie is None:
                        members.append(own)
                    else:
                        ties[tie] = own
        parameters = [p for k in sorted(buckets, reverse=True) for p in buckets[k]] + list(ties.values())
        return StageParts(held, buckets, ties, {full_names[id(p)]: p for p in parameters}, pieces)

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

    def _counted(self, parts: StageParts, sharding: ShardedStates | None) -> list[nn.Parameter]:
        """Parameters that no rank before this one holds, or that it alone steps: each counts once over all ranks."""
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
        sharded = {id(piece.own) for piece in parts.pieces.values() if piece.is_sharded}
        return [parameter for parameter in counted if id(parameter) in sharded]

    def _shares(self, parts: StageParts) -> Shares:
        """Who steps which parameters of buckets that replicas share out.

        By the bytes of whole parameters, so that ranks with other parts of them agree on it, and group by group: other
        ranks may have a group's layers in a stage with other groups.
        """
        program = self.program
        if not program.shard_states or program.update_rule == "elastic_averaging":
            return {}
        leaves = {id(p): p for members in parts.buckets.values() for p in members}
        leaves |= {id(piece.own): piece.leaf for piece in parts.pieces.values()}
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

    def _gradients(self, parts: StageParts, shares: Shares, shards: Shards | None) -> Gradients:
        """Places for the stage's gradients."""
        versioned = self._limit(parts.held.stage) > 1
        pieces = {id(each.own): each for each in parts.pieces.values() if not isinstance(each, RowPiece)}
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
            (piece.leaf, piece.place(placed[own])) for own, piece in pieces.items() if piece.leaf is not piece.own
        ]
        views += [(leaf, place) for leaf, place in divided if place is not None]
        plain = [p for p in parts.parameters if id(p) not in placed and (shards is None or not shards.has(p))]
        return Gradients(flats, views, plain, reduced, shards)

    def _sum(self, number: int, members: list[nn.Parameter], group: int, shares: Shares) -> Summed:
        """Parameters of a bucket with who sums their gradients."""
        if group < 0 or self.program.update_rule == "elastic_averaging":
            return Summed(members)
        own = shares.get((number, group))
        mine = 0 if own is None else self.program.groups[group].index(self.program.rank)
        return Summed(members, self.groups[group], own, mine)

    def _versions(self, parts: StageParts, module: StageModule, gradients: Gradients) -> Versions | None:
        limit = self._limit(parts.held.stage)
        if limit == 1 or not parts.names:
            return None
        gradients.clear()
        pieces = [each for each in parts.pieces.values() if not isinstance(each, RowPiece)]
        return Versions(
            module.modules.values(),
            parts.parameters,
            places_of(parts.parameters, gradients.views, pieces),
            limit=limit,
            oldest=self._oldest(parts.held.stage),
            runtime=self.runtime,
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


def refuse_other_stages(programs: Sequence[Program]) -> None:
    """Raise InvalidDocument where programs that are to share stages hold others."""
    first = programs[0]
    for other in programs[1:]:
        if _essence(other) != _essence(first):
            raise InvalidDocument(
                f"the programs of rank {first.rank} hold different stages or groups; lower them from one plan"
            )


def _essence(program: Program) -> Any:
    held = program.stages
    stages = [(h.stage, h.first, h.last, h.replica, h.ranks, h.rows, h.buckets, h.recompute, h.modules) for h in held]
    return program.rank, program.num_micro_batches, program.update_rule, program.groups, program.shared, stages
