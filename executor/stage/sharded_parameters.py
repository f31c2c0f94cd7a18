"""Parameters and gradients whose rows the replicas of a stage share out (ZeRO, stages 2 and 3 [1]_; FSDP2).

Of every parameter a rank of the group keeps the rows that torch's ``fully_shard`` would give it: of n rows along
dimension 0 and D ranks, ⌈n / D⌉ from its place on, as far as they go. These rows, an ordinary parameter, are
what is summed, stepped and saved. The whole parameter, which layers compute with, is gathered when it is needed, and
its memory is let go of afterwards; so is that of its gradient. Whole parameters keep their storages, which shrink to
nothing and grow again, so that what autograd keeps of them stays what it is.

A *unit* is what is gathered, and summed, by one collective: of one data type and one group, of a bucket where
parameters are gathered once a step, of a layer otherwise. Ranks move the padded rows, as ``fully_shard`` does.

.. [1] Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.executor.stage.precision import Copied, Copies
from penstock.schemas.program import Sharding

if TYPE_CHECKING:
    from penstock.executor.divided.division import Piece


class Group(NamedTuple):
    """A process group, its ranks in order, and this rank's place among them."""

    group: Any
    ranks: tuple[int, ...]
    mine: int


class Member(NamedTuple):
    """A parameter of a layer, ``leaf``, with what this rank has of it, of the same storage (``part``).

    ``piece``: of a parameter that ranks share otherwise, too.
    """

    leaf: nn.Parameter
    part: nn.Parameter
    piece: Piece | None = None


class RowPiece(NamedTuple):
    """The rows ``low`` to ``high`` that this rank has of a parameter, or of what it has of one (``Piece``).

    ``own``: these rows as an ordinary parameter, which is reduced, stepped and saved.
    """

    leaf: nn.Parameter
    own: nn.Parameter
    low: int
    high: int
    group: Group
    inner: Piece | None

    @property
    def is_part(self) -> bool:
        """Whether each rank of the tensor group has a part of the gradient's sum."""
        return self.inner is not None and self.inner.is_part

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks of the mesh have other parts."""
        return self.inner is not None and self.inner.is_sharded

    @property
    def is_expert(self) -> bool:
        """Whether it is of experts that the ranks of the expert group share out."""
        return self.inner is not None and self.inner.is_expert

    def of(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor, such as a gradient, of the parameter's shape."""
        part = whole if self.inner is None else self.inner.of(whole)
        return part[self.low : self.high]

    def shared(self, rows: Tensor) -> Tensor:
        """A tensor of these rows, such as an optimizer's state, as one that all ranks share."""
        from torch.distributed.device_mesh import DeviceMesh  # a second, where nothing else needs it
        from torch.distributed.tensor import DTensor, Shard

        ranks, leaf = torch.tensor(self.group.ranks), self.leaf
        placements: list[Any] = [Shard(0)]
        if isinstance(leaf, DTensor):  # cut by the mesh first, its ranks being neighbours, then by rows
            others = torch.arange(leaf.device_mesh.size()) - leaf.device_mesh.get_local_rank()
            ranks, placements = others[:, None] + ranks[None, :], [*leaf.placements, Shard(0)]
        mesh = DeviceMesh(rows.device.type, ranks, _init_backend=False)
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=leaf.shape, stride=leaf.stride())

    def part(self, shared: Any) -> Any:
        """This rank's rows of a tensor that ``shared`` made; anything else as it is."""
        return shared.to_local() if hasattr(shared, "to_local") else shared


class _Place(NamedTuple):
    """Where a parameter is: its number of rows, the numbers of a row, and the most rows of a rank.

    ``at``: where its rows begin among those of a rank, in numbers.
    """

    rows: int
    width: int
    most: int
    at: int

    def moves(self, whole: Tensor, ranks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of equal shape that lie in the whole tensor, and in the rows of all ranks, (D, numbers of a rank)."""
        if not self.most:
            return
        full, rest = divmod(self.rows, self.most)
        size = self.most * self.width
        flat = whole.view(-1)
        if full:
            yield flat[: full * size].view(full, size), ranks[:full, self.at : self.at + size]
        if rest:
            yield flat[full * size :], ranks[full, self.at : self.at + rest * self.width]


class Unit:
    """Parameters of one data type that the ranks of ``group`` share out, gathered and summed together.

    Its parameters are as ``sharding`` says: of ``gradients`` they stay whole, and only gradients are shared out; of
    ``parameters_kept`` gradients are summed once a step. ``pieces``: what this rank has, by the id of the part that it
    had before.
    """

    is_shared_out = False

    def __init__(self, members: Sequence[Member], group: Group, sharding: Sharding) -> None:
        first = members[0].part
        self.group = group.group
        self._ranks = ranks = len(group.ranks)
        self._keeps_whole = keeps_whole = sharding == "gradients"
        self.sums_once = sharding == "parameters_kept"
        self._places: list[_Place] = []
        at = 0
        for member in members:
            rows = member.part.shape[0]
            width = member.part[0].numel() if rows else 0
            most = -(-rows // ranks)
            self._places.append(_Place(rows, width, most, at))
            at += most * width
        total = sum(member.part.numel() for member in members)
        self.whole = torch.empty(total, dtype=first.dtype, device=first.device)
        self.gradient = torch.empty_like(self.whole)
        self.rows = torch.zeros(0 if keeps_whole else at, dtype=first.dtype, device=first.device)
        self.summed = torch.zeros(at, dtype=first.dtype, device=first.device)
        self._views = self._viewed(members, self.whole)
        self.copies = Copies(self.whole)
        self._users = 1
        self._gathering: tuple[Tensor, Any] | None = None
        for member, view in zip(members, self._views, strict=True):
            view.copy_(member.part.detach())
            for tensor in (member.part, getattr(member.leaf, "_local_tensor", member.leaf)):
                tensor.data = view
        self.pieces: dict[int, RowPiece] = {}
        self._sums: list[tuple[nn.Parameter, Tensor]] = []
        for member, place, view in zip(members, self._places, self._views, strict=True):
            low, high = (min(place.rows, each * place.most) for each in (group.mine, group.mine + 1))
            span, shape = slice(place.at, place.at + (high - low) * place.width), (high - low, *view.shape[1:])
            own = nn.Parameter(view[low:high] if keeps_whole else self.rows[span].view(shape))
            if not keeps_whole:
                own.data.copy_(view[low:high])
            self.pieces[id(member.part)] = RowPiece(member.leaf, own, low, high, group, member.piece)
            self._sums.append((own, self.summed[span].view(shape)))
        self._gradients = [
            (member.leaf, view if member.piece is None else member.piece.place(view))
            for member, view in zip(members, self._viewed(members, self.gradient), strict=True)
        ]
        _resize(self.gradient, 0)

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The parameters in their layers."""
        return [leaf for leaf, _ in self._gradients]

    @staticmethod
    def _viewed(members: Sequence[Member], flat: Tensor) -> list[Tensor]:
        """The parameters' places in a buffer."""
        sizes = [member.part.numel() for member in members]
        return [part.view(member.part.shape) for member, part in zip(members, flat.split(sizes), strict=True)]

    # Parameters

    def enter(self) -> None:
        """Have the whole parameters, gathered by the first who needs them."""
        if self._users == 0:
            self.gather()
        self._users += 1

    def start(self) -> None:
        """Start to gather the parameters, which are going to be entered; also while the layer before has them."""
        if self._gathering is None:
            made = self.whole.new_empty((self._ranks, len(self.summed)))
            work: Any = dist.all_gather_into_tensor(made.view(-1), self._sent(), group=self.group, async_op=True)
            self._gathering = made, work

    def leave(self) -> None:
        """Have no more need of them; the last one lets go of their memory."""
        self._users -= 1
        if self._users == 0:
            _resize(self.whole, 0)
            self.copies.empty()

    def gather(self) -> None:
        """Take all ranks' rows into the whole parameters."""
        self.start()
        assert self._gathering is not None
        (made, work), self._gathering = self._gathering, None
        work.wait()
        if not self._keeps_whole:
            _resize(self.whole, self.whole.numel())
        with torch.no_grad():
            for place, view in zip(self._places, self._views, strict=True):
                for whole, ranks in place.moves(view, made):
                    whole.copy_(ranks)
        self.copies.fill()

    def _sent(self) -> Tensor:
        """This rank's rows of all parameters, padded."""
        if not self._keeps_whole:
            return self.rows
        sent = torch.zeros_like(self.summed)
        for place, (own, _) in zip(self._places, self._sums, strict=True):
            sent[place.at : place.at + own.numel()] = own.detach().reshape(-1)
        return sent

    # Gradients

    def clear(self) -> None:
        """Start a step: nothing is summed."""
        if self.sums_once:
            _resize(self.summed, 0)
            self.open()
        else:
            self.summed.zero_()
        for own, view in self._sums:
            own.grad = view

    def open(self) -> None:
        """Have room for the whole gradients, and none in it."""
        _resize(self.gradient, self.gradient.numel())
        self.gradient.zero_()
        for leaf, place in self._gradients:
            if place is not None:
                leaf.grad = place

    def sum(self) -> list[Scatter]:
        """Start to sum this rank's rows of the gradients over the group; what to ``wait()`` for."""
        return [Scatter(self)]

    def close(self) -> None:
        """Let go of the whole gradients."""
        for leaf, _ in self._gradients:
            leaf.grad = None
        _resize(self.gradient, 0)

    def by_ranks(self) -> Tensor:
        """The whole gradients, as rows of all ranks: (D, numbers of a rank)."""
        made = self.gradient.new_zeros((self._ranks, len(self.summed)))
        sizes = [view.numel() for view in self._views]
        for place, view in zip(self._places, self.gradient.split(sizes), strict=True):
            for whole, ranks in place.moves(view, made):
                ranks.copy_(whole)
        return made


class Scatter:
    """A reduce-scatter of a unit's gradients on its way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._given = unit.by_ranks()
        unit.close()
        if unit.sums_once:
            _resize(unit.summed, unit.summed.numel())
        self._made = unit.summed if unit.sums_once else torch.empty_like(unit.summed)
        self._work: Any = dist.reduce_scatter_tensor(self._made, self._given.view(-1), group=unit.group, async_op=True)

    def wait(self) -> None:
        """Add the sums to those of the step."""
        self._work.wait()
        if not self._unit.sums_once:
            self._unit.summed.add_(self._made)
        del self._work, self._given, self._made


class Shards:
    """The units of a stage: by bucket, and of each layer those with parameters of its."""

    def __init__(
        self, sharding: Sharding, buckets: Mapping[int, Sequence[Unit]], layers: Mapping[int, Sequence[Unit]]
    ) -> None:
        self.sharding = sharding
        self.buckets = buckets
        self.units = list(dict.fromkeys(unit for units in buckets.values() for unit in units))
        self._layers = layers
        self._ahead = _NOTHING
        self._noted: set[int] = set()
        self._sums: list[Scatter] = []
        self._own = {id(piece.own) for unit in self.units for piece in unit.pieces.values()}

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is this rank's rows of one."""
        return id(parameter) in self._own

    def enclose(self, modules: Mapping[int, nn.Module], *, lowered: bool) -> None:
        """Let every forward of a layer gather its parameters first, and let go of them afterwards.

        ``lowered``: layers run under autocast, whose copies of parameters that come and go do so, too.
        """
        if self.sharding == "parameters" or (lowered and self.sharding == "parameters_kept"):
            for index, module in modules.items():
                if index in self._layers:
                    self._enclose(index, module, lowered=lowered)

    def _enclose(self, index: int, module: nn.Module, *, lowered: bool) -> None:
        enclosed: Any = module
        forward = self._noting(index, module.forward) if lowered else module.forward

        def run(*given: Any, **named: Any) -> Any:
            for unit in self._layers[index]:
                unit.enter()
            if index + 1 in self._ahead:
                self._start(index + 1)
            results = forward(*given, **named)
            for unit in self._layers[index]:
                unit.leave()
            return results

        enclosed.forward = run if self.sharding == "parameters" else forward

    def _noting(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward whose first run with gradients after an update notes what autocast copies."""

        def run(*given: Any, **named: Any) -> Any:
            if index in self._noted or not (torch.is_grad_enabled() and torch.is_autocast_cache_enabled()):
                return forward(*given, **named)
            self._noted.add(index)
            with Copied([unit.copies for unit in self._layers[index]]):
                return forward(*given, **named)

        return run

    def forget_copies(self) -> None:
        """Note autocast's copies again, which forgets those that it has made (``precision.forget_casts``)."""
        self._noted.clear()
        for unit in self.units:
            unit.copies.forget()

    def _start(self, layer: int) -> None:
        for unit in self._layers.get(layer, ()):
            unit.start()

    @contextmanager
    def ahead_in(self, layers: range) -> Iterator[None]:
        """Inside it these layers run forward in their order, so that each gathers the parameters of the next one."""
        self._ahead = layers
        yield
        self._ahead = _NOTHING

    def unshard(self, bucket: int) -> None:
        """UNSHARD."""
        for unit in self.buckets.get(bucket, ()):
            unit.enter()

    def reshard(self, bucket: int) -> None:
        """RESHARD."""
        for unit in self.buckets.get(bucket, ()):
            unit.leave()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside it all parameters that are gathered once a step are whole."""
        kept = self.units if self.sharding == "parameters_kept" else ()
        for unit in kept:
            unit.enter()
        yield
        for unit in kept:
            unit.leave()

    def settle(self) -> None:
        """Let go of the whole parameters that layers were built with."""
        if self.sharding != "gradients":
            for unit in self.units:
                unit.leave()

    def clear(self) -> None:
        """Start a step."""
        for unit in self.units:
            unit.clear()

    def stepped(self) -> None:
        """Take over what other ranks have stepped, where parameters stay whole; when they are read, too."""
        self.forget_copies()
        if self.sharding == "gradients":
            for unit in self.units:
                unit.gather()

    @contextmanager
    def backward(self, layer: int, before: int | None) -> Iterator[None]:
        """Inside it a layer runs backward, with its parameters; then its gradients begin to be summed.

        ``before``: the layer that runs backward next, whose parameters begin to be gathered.
        """
        units = self._layers.get(layer, ())
        for unit in units:
            unit.enter()
            unit.open()
        if before is not None and self.sharding == "parameters":
            self._start(before)
        yield
        sums = [work for unit in units for work in unit.sum()]
        for unit in units:
            unit.leave()
        self.finish()
        self._sums = sums

    def finish(self) -> None:
        """Wait for the sums that have begun."""
        for work in self._sums:
            work.wait()
        self._sums = []


_NOTHING = range(0)


def _resize(tensor: Tensor, numbers: int) -> None:
    """Let a tensor's storage hold this many of its elements."""
    tensor.untyped_storage().resize_(numbers * tensor.element_size())
