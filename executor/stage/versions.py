"""Several versions of a stage's weights at once, for update rules that do not flush (ALGORITHMS 5.1).

A version is a set of Parameters over separate storage. A forward points the layers at its version's Parameters (a
pointer per parameter, 0.05 µs; EXECUTOR C.3), and its graph keeps references to them. All versions' gradients arrive in
one buffer. The optimizer's parameters stay the same objects for ever, over the storage of the newest version. A step
copies the newest weights into free storage, moves the optimizer's parameters there, and steps in place, so graphs of
older versions stay valid (their Parameters have separate version counters).

Buffers such as running statistics are not versioned. A device may need the weights of a recurrent layer contiguous, so
each version lays out its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.interface import Runtime
from penstock.executor.stage.stage_module import MicroBatch
from penstock.schemas.errors import InvalidDocument

if TYPE_CHECKING:
    from penstock.executor.divided.division import Piece


class Version:
    """Weights after some number of updates. ``in_flight``: micro-batches between their forward and their backward."""

    __slots__ = ("in_flight", "parameters", "tensors")

    def __init__(self, tensors: Sequence[Tensor], places: Sequence[Place]) -> None:
        self.tensors = list(tensors)
        self.parameters = [place.leaf_over(tensor) for place, tensor in zip(places, tensors, strict=True)]
        self.in_flight = 0


class Place(NamedTuple):
    """The place of a parameter in all versions: ``leaf`` in a layer at first, with its gradients in ``gradient``.

    ``piece``: the relation of the optimizer's parameter to the layer's parameter, where ranks share layers.
    """

    leaf: nn.Parameter
    gradient: Tensor
    piece: Piece | None = None

    def leaf_over(self, tensor: Tensor) -> nn.Parameter:
        """Return a parameter for the layer over the memory of ``tensor``."""
        if self.piece is not None and self.piece.leaf is not self.piece.local_parameter:
            return self.piece.leaf_over(tensor, self.gradient)
        # From .data, so that autograd does not take in-place optimizer steps for changes of tensors that a graph saved.
        leaf = nn.Parameter(tensor.data)
        leaf.grad = self.gradient
        return leaf


def places_of(
    parameters: Iterable[nn.Parameter], gradients: Iterable[tuple[nn.Parameter, Tensor]], pieces: Iterable[Piece]
) -> list[Place]:
    """Return the places of an optimizer's parameters, whose gradients arrive in these tensors."""
    arrive = {id(parameter): gradient for parameter, gradient in gradients}
    piece_of = {id(piece.local_parameter): piece for piece in pieces}
    places = []
    for parameter in parameters:
        piece = piece_of.get(id(parameter))
        places.append(Place(parameter if piece is None else piece.leaf, arrive[id(parameter)], piece))
    return places


LayOut = tuple[Callable[[Sequence[Tensor]], None], Sequence[int]]
"""A function that lays weights out as the device needs them, and the numbers of the stage's parameters it moves."""


class Versions:
    """The versions of a stage's weights.

    ``parameters``: the optimizer's parameters, each with its place in a layer. ``limit``: versions that may be alive at
    once, by the plan. ``oldest``: by how many updates forwards lag behind at most. ``peak``: the most versions that
    were alive so far.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        parameters: Sequence[nn.Parameter],
        places: Sequence[Place],
        *,
        limit: int,
        oldest: int,
        runtime: Runtime = CPU,
    ) -> None:
        self.parameters = list(parameters)
        self._of = list(places)
        self.limit = limit
        self.oldest = oldest
        self.delay = 0
        self.peak = 1
        layers = list(modules)
        leaves = [place.leaf for place in places]
        self._places = _places(layers, leaves)
        self._lay_outs = list(_lay_outs(layers, leaves, runtime))
        self._free: list[Version] = []
        self.live = [self._version([p.data for p in self.parameters])]
        for parameter, tensor in zip(self.parameters, self.live[0].tensors, strict=True):
            parameter.data = tensor
        self._current: Version | None = None
        self.point_at(self.live[0])

    @property
    def current(self) -> Version:
        """The version that the layers point at."""
        assert self._current is not None
        return self._current

    def point_at(self, version: Version) -> None:
        """Let the layers use a version's weights."""
        if version is not self._current:
            parameters = version.parameters
            for holder, name, index in self._places:
                holder[name] = parameters[index]
            self._current = version

    def use(self, delay: int) -> None:
        """Make the forwards from here on use the weights of ``delay`` updates ago."""
        self.delay = delay

    def enter(self, cell: MicroBatch) -> None:
        """Set a micro-batch's forward to the weights of ``delay`` updates ago, or at the oldest weights."""
        live = self.live
        version = live[self.delay if self.delay < len(live) else -1]
        self.point_at(version)
        version.in_flight += 1
        cell.version = version  # type: ignore[attr-defined]

    def leave(self, cell: MicroBatch) -> None:
        """Release a micro-batch's version, after its last gradient."""
        cell.version.in_flight -= 1  # type: ignore[attr-defined]
        cell.version = None  # type: ignore[attr-defined]

    def step(self, update: Callable[[], Any]) -> None:
        """Make a new version by ``update``, which changes the optimizer's parameters in place.

        Raises InvalidDocument where the program would need more versions than the plan has.
        """
        newest = self.live[0]
        if newest.in_flight or self.oldest:
            self._release(ahead=1)
            version = self._take()
            with torch.no_grad():
                torch._foreach_copy_(version.tensors, newest.tensors)
            for parameter, tensor in zip(self.parameters, version.tensors, strict=True):
                parameter.data = tensor
            self.live.insert(0, version)
            self.peak = max(self.peak, len(self.live))
        update()
        self._release()

    def _take(self) -> Version:
        if self._free:
            return self._free.pop()
        if len(self.live) >= self.limit:
            raise InvalidDocument(
                f"an update needs {len(self.live) + 1} versions of the weights at once, but the plan has {self.limit}",
                remedy="lower the plan again, or plan with more micro-batches",
            )
        return self._version([torch.empty_like(tensor) for tensor in self.live[0].tensors])

    def _version(self, tensors: Sequence[Tensor]) -> Version:
        """Create a version over these weights, which are moved where the device needs them contiguous."""
        version = Version(tensors, self._of)
        for lay_out, numbers in self._lay_outs:
            lay_out([version.parameters[number] for number in numbers])
            for number in numbers:
                version.tensors[number] = version.parameters[number].data
        return version

    def _release(self, ahead: int = 0) -> None:
        """Free the storage of versions that no backward and no forward uses, counting ``ahead`` updates in advance."""
        kept = [v for age, v in enumerate(self.live, ahead) if v.in_flight or age <= self.oldest]
        self._free += [version for version in self.live if version not in kept]
        self.live = kept

    # For checkpoints

    def state(self) -> list[list[Tensor]]:
        """Return the weights of all versions that are alive, newest first, each in the order of ``parameters``."""
        return [[tensor.detach() for tensor in version.tensors] for version in self.live]

    def restore(self, state: Sequence[Sequence[Tensor]]) -> None:
        """Restore ``state``. Where the plan keeps fewer versions, the oldest are dropped.

        An optimizer that holds ``parameters`` need not be notified. No micro-batch may be in flight.
        """
        self._free += self.live
        self.live = []
        for tensors in state[: self.oldest + 1]:
            version = self._take_for_restoring()
            with torch.no_grad():
                torch._foreach_copy_(version.tensors, list(tensors))
            self.live.append(version)
        for parameter, tensor in zip(self.parameters, self.live[0].tensors, strict=True):
            parameter.data = tensor
        self._current = None
        self.point_at(self.live[0])

    def _take_for_restoring(self) -> Version:
        if self._free:
            return self._free.pop()
        return self._version([torch.empty_like(parameter) for parameter in self.parameters])


def _lay_outs(modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter], runtime: Runtime) -> Iterator[LayOut]:
    """Yield the layout function of each recurrent layer whose weights are all versioned."""
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    for module in dict.fromkeys(module for top in modules for module in top.modules()):
        lay_out = runtime.flatten(module)
        weights: Any = getattr(module, "_flat_weights", ())
        if lay_out is not None and all(id(weight) in index for weight in weights):
            yield lay_out, [index[id(weight)] for weight in weights]


def _places(
    modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter]
) -> list[tuple[MutableMapping[Any, Any], Any, int]]:
    """Return every place where a module looks a parameter up: (container, key, number of the parameter)."""
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    places: list[tuple[Any, Any, int]] = []
    seen: set[int] = set()
    for top in modules:
        for module in top.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            places += [(module._parameters, n, index[id(p)]) for n, p in module._parameters.items() if id(p) in index]
            if isinstance(module, nn.RNNBase):
                # Recurrent layers look their weights up in a separate list.
                flat: list[Any] = module._flat_weights
                places += [(flat, k, index[id(p)]) for k, p in enumerate(flat) if id(p) in index]
    return places
