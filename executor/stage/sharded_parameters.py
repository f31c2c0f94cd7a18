"""Parameters and gradients whose rows the replicas of a stage share out (ZeRO, stages 2 and 3 [1]_; FSDP2).

A rank of the group keeps the rows of each parameter that torch's ``fully_shard`` would give it: of n rows along
dimension 0 and D ranks, at most ⌈n / D⌉ consecutive rows, in the order of ranks. These rows are an ordinary parameter,
which is summed, stepped and saved. The whole parameter, with which layers compute, is gathered when it is needed, and
its memory is freed afterwards; the memory of its gradient as well. Whole parameters keep their storages, which shrink
to nothing and grow again, so that references that autograd keeps to them stay valid.

A *unit* is gathered, and summed, by one collective. Its parameters have one data type and one group. They belong to one
bucket where parameters are gathered once a step, otherwise to one layer. Ranks move the padded rows, as ``fully_shard``
does.

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
    """A parameter of a layer, ``leaf``, and this rank's part of it, with the same storage (``part``).

    ``piece``: the division of the parameter among a mesh's ranks; None if only replicas share it.
    """

    leaf: nn.Parameter
    part: nn.Parameter
    piece: Piece | None = None


class RowPiece(NamedTuple):
    """The rows from ``low`` to ``high`` of a parameter, or of this rank's part of it (``inner``), that this rank keeps.

    ``local_parameter``: these rows as an ordinary parameter, which is reduced, stepped and saved.
    """

    leaf: nn.Parameter
    local_parameter: nn.Parameter
    low: int
    high: int
    group: Group
    inner: Piece | None

    @property
    def is_part(self) -> bool:
        """True if each rank of the tensor group has a part of the gradient's sum."""
        return self.inner is not None and self.inner.is_part

    @property
    def is_sharded(self) -> bool:
        """True if other ranks of the mesh have other parts of the parameter."""
        return self.inner is not None and self.inner.is_sharded

    @property
    def is_expert(self) -> bool:
        """True if it belongs to experts that the ranks of the expert group share out."""
        return self.inner is not None and self.inner.is_expert

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor with the parameter's shape, such as a gradient."""
        part = whole if self.inner is None else self.inner.of(whole)
        return part[self.low : self.high]

    def shared(self, rows: Tensor) -> Tensor:
        """Return these rows of a tensor, such as an optimizer's state, as a DTensor over all ranks."""
        from torch.distributed.device_mesh import DeviceMesh  # importing it takes a second
        from torch.distributed.tensor import DTensor, Shard

        ranks, leaf = torch.tensor(self.group.ranks), self.leaf
        placements: list[Any] = [Shard(0)]
        if isinstance(leaf, DTensor):  # cut by the mesh first, its ranks being neighbours, then by rows
            others = torch.arange(leaf.device_mesh.size()) - leaf.device_mesh.get_local_rank()
            ranks, placements = others[:, None] + ranks[None, :], [*leaf.placements, Shard(0)]
        mesh = DeviceMesh(rows.device.type, ranks, _init_backend=False)
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=leaf.shape, stride=leaf.stride())

    def part(self, shared: Any) -> Any:
        """Return this rank's rows of a tensor that ``shared`` returned; return anything else unchanged."""
        return shared.to_local() if hasattr(shared, "to_local") else shared


class _Place(NamedTuple):
    """The layout of a parameter: its number of rows, the elements of a row, and the most rows of a rank.

    ``at``: the offset of its rows among all rows of a rank, in elements.
    """

    rows: int
    width: int
    most: int
    at: int

    def moves(self, whole: Tensor, ranks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of equal shape: views of the whole tensor and of all ranks' rows, (D, elements of a rank)."""
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

    ``sharding`` says which of them are sharded. With ``gradients`` the parameters stay whole, and only gradients are
    shared out. With ``parameters_kept`` gradients are summed once a step. ``pieces``: this rank's rows, by the id of
    the parameter (or part) before it was sharded.
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
            parameter = nn.Parameter(view[low:high] if keeps_whole else self.rows[span].view(shape))
            if not keeps_whole:
                parameter.data.copy_(view[low:high])
            self.pieces[id(member.part)] = RowPiece(member.leaf, parameter, low, high, group, member.piece)
            self._sums.append((parameter, self.summed[span].view(shape)))
        self._gradients = [
            (member.leaf, view if member.piece is None else member.piece.place(view))
            for member, view in zip(members, self._viewed(members, self.gradient), strict=True)
        ]
        _resize(self.gradient, 0)

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The parameters, as objects of their layers."""
        return [leaf for leaf, _ in self._gradients]

    @staticmethod
    def _viewed(members: Sequence[Member], flat: Tensor) -> list[Tensor]:
        """Return the views of the parameters in a flat buffer."""
        sizes = [member.part.numel() for member in members]
        return [part.view(member.part.shape) for member, part in zip(members, flat.split(sizes), strict=True)]

    # Parameters

    def enter(self) -> None:
        """Count one more user of the whole parameters; gather them for the first user."""
        if self._users == 0:
            self.gather()
        self._users += 1

    def start(self) -> None:
        """Start to gather the parameters before they are entered, also while the layer before still runs."""
        if self._gathering is None:
            all_rows = self.whole.new_empty((self._ranks, len(self.summed)))
            work: Any = dist.all_gather_into_tensor(all_rows.view(-1), self._sent(), group=self.group, async_op=True)
            self._gathering = all_rows, work

    def leave(self) -> None:
        """Count one user less; after the last user free the memory of the whole parameters."""
        self._users -= 1
        if self._users == 0:
            _resize(self.whole, 0)
            self.copies.empty()

    def gather(self) -> None:
        """Gather all ranks' rows into the whole parameters."""
        self.start()
        assert self._gathering is not None
        (all_rows, work), self._gathering = self._gathering, None
        work.wait()
        if not self._keeps_whole:
            _resize(self.whole, self.whole.numel())
        with torch.no_grad():
            for place, view in zip(self._places, self._views, strict=True):
                for whole, ranks in place.moves(view, all_rows):
                    whole.copy_(ranks)
        self.copies.fill()

    def _sent(self) -> Tensor:
        """Return this rank's rows of all parameters, padded."""
        if not self._keeps_whole:
            return self.rows
        sent = torch.zeros_like(self.summed)
        for place, (rows, _) in zip(self._places, self._sums, strict=True):
            sent[place.at : place.at + rows.numel()] = rows.detach().reshape(-1)
        return sent

    # Gradients

    def clear(self) -> None:
        """Start a step with sums of zero."""
        if self.sums_once:
            _resize(self.summed, 0)
            self.open()
        else:
            self.summed.zero_()
        for rows, view in self._sums:
            rows.grad = view

    def open(self) -> None:
        """Allocate the whole gradients, filled with zeros."""
        _resize(self.gradient, self.gradient.numel())
        self.gradient.zero_()
        for leaf, place in self._gradients:
            if place is not None:
                leaf.grad = place

    def sum(self) -> list[Scatter]:
        """Start to sum this rank's rows of the gradients over the group; return the works to ``wait()`` for."""
        return [Scatter(self)]

    def close(self) -> None:
        """Free the memory of the whole gradients."""
        for leaf, _ in self._gradients:
            leaf.grad = None
        _resize(self.gradient, 0)

    def by_ranks(self) -> Tensor:
        """Return the whole gradients as rows of all ranks: (D, elements of a rank)."""
        all_rows = self.gradient.new_zeros((self._ranks, len(self.summed)))
        sizes = [view.numel() for view in self._views]
        for place, view in zip(self._places, self.gradient.split(sizes), strict=True):
            for whole, ranks in place.moves(view, all_rows):
                ranks.copy_(whole)
        return all_rows


class Scatter:
    """A reduce-scatter of a unit's gradients that is in progress."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._all_rows = unit.by_ranks()
        unit.close()
        if unit.sums_once:
            _resize(unit.summed, unit.summed.numel())
        self._sum = unit.summed if unit.sums_once else torch.empty_like(unit.summed)
        self._work: Any = dist.reduce_scatter_tensor(
            self._sum, self._all_rows.view(-1), group=unit.group, async_op=True
        )

    def wait(self) -> None:
        """Wait for the sums, and add them to the step's sums."""
        self._work.wait()
        if not self._unit.sums_once:
            self._unit.summed.add_(self._sum)
        del self._work, self._all_rows, self._sum


class Shards:
    """The units of a stage, by bucket and by layer."""

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
        self._local_ids = {id(piece.local_parameter) for unit in self.units for piece in unit.pieces.values()}

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter consists of this rank's rows of a whole parameter."""
        return id(parameter) in self._local_ids

    def enclose(self, modules: Mapping[int, nn.Module], *, lowered: bool) -> None:
        """Make every forward of a layer gather its parameters before it runs, and free them afterwards.

        ``lowered``: layers run under autocast; its copies of gathered parameters are filled and freed with them.
        """
        if self.sharding == "parameters" or (lowered and self.sharding == "parameters_kept"):
            for index, module in modules.items():
                if index in self._layers:
                    self._enclose(index, module, lowered=lowered)

    def _enclose(self, index: int, module: nn.Module, *, lowered: bool) -> None:
        enclosed: Any = module
        forward = self._noting(index, module.forward) if lowered else module.forward

        def run(*arguments: Any, **options: Any) -> Any:
            for unit in self._layers[index]:
                unit.enter()
            if index + 1 in self._ahead:
                self._start(index + 1)
            results = forward(*arguments, **options)
            for unit in self._layers[index]:
                unit.leave()
            return results

        enclosed.forward = run if self.sharding == "parameters" else forward

    def _noting(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a layer's forward so that its first run with gradients after an update notes autocast's copies."""

        def run(*arguments: Any, **options: Any) -> Any:
            if index in self._noted or not (torch.is_grad_enabled() and torch.is_autocast_cache_enabled()):
                return forward(*arguments, **options)
            self._noted.add(index)
            with Copied([unit.copies for unit in self._layers[index]]):
                return forward(*arguments, **options)

        return run

    def forget_copies(self) -> None:
        """Forget autocast's copies, and note new copies (``precision.forget_casts`` discards the old ones)."""
        self._noted.clear()
        for unit in self.units:
            unit.copies.forget()

    def _start(self, layer: int) -> None:
        for unit in self._layers.get(layer, ()):
            unit.start()

    @contextmanager
    def ahead_in(self, layers: range) -> Iterator[None]:
        """Let each of these layers, run forward in their order, start to gather the parameters of the next layer."""
        self._ahead = layers
        yield
        self._ahead = _NOTHING

    def unshard(self, bucket: int) -> None:
        """Gather the parameters of a bucket (UNSHARD)."""
        for unit in self.buckets.get(bucket, ()):
            unit.enter()

    def reshard(self, bucket: int) -> None:
        """Free the whole parameters of a bucket (RESHARD)."""
        for unit in self.buckets.get(bucket, ()):
            unit.leave()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Keep all parameters that are gathered once a step whole within this context."""
        kept = self.units if self.sharding == "parameters_kept" else ()
        for unit in kept:
            unit.enter()
        yield
        for unit in kept:
            unit.leave()

    def settle(self) -> None:
        """Free the whole parameters with which layers were built."""
        if self.sharding != "gradients":
            for unit in self.units:
                unit.leave()

    def clear(self) -> None:
        """Start a step with sums of zero."""
        for unit in self.units:
            unit.clear()

    def stepped(self) -> None:
        """Gather the parameters that other ranks have stepped, where parameters stay whole; also after loading them."""
        self.forget_copies()
        if self.sharding == "gradients":
            for unit in self.units:
                unit.gather()

    @contextmanager
    def backward(self, layer: int, before: int | None) -> Iterator[None]:
        """Provide a layer's parameters while it runs backward; afterwards start to sum its gradients.

        ``before``: the layer that runs backward next. Its parameters start to be gathered.
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
        """Wait for the sums that were started."""
        for work in self._sums:
            work.wait()
        self._sums = []


_NOTHING = range(0)


def _resize(tensor: Tensor, numbers: int) -> None:
    """Resize a tensor's storage to this many of its elements."""
    tensor.untyped_storage().resize_(numbers * tensor.element_size())
