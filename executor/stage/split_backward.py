"""A backward in two halves: I, the gradients of a segment's inputs, and W, the gradients of its parameters.

Zero-bubble schedules (Qi et al., ICLR 2024, section 2) run W later than I. Here the unit of W is a module that owns
trainable parameters (the outermost such module). I asks autograd for the gradients of the inputs and of every unit's
results. W goes, unit by unit, from these gradients to the unit's parameters. So W repeats only the part of I between a
unit's result and its parameters, which is nothing for linear layers, convolutions, norms and embeddings.

Tensors that autograd saved outside of the units are freed at the end of I; tensors that it saved within them (their
inputs, mostly) at W. `torch.distributed.pipelining` keeps all of them until W: the nodes that it remembers hold the
graph below them.

A parameter may be used elsewhere than in one call of its unit (a tied weight, a weight read from another module). Its
gradient is then computed in I and only added in W: no path around the unit may be lost, and none counted twice (PyTorch
issue 180952). These parameters are read from the graph, again whenever a forward takes another course.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.executor.torch_versions import run_engine, top_saved_tensors_hooks

WITHIN_EXCHANGE = "computes_between_exchanges"
"""The attribute of a unit whose forward also exchanges tensors with other ranks. It holds the part that computes with
the
unit's parameters, as a module. That part is the unit for the two halves, and W exchanges nothing."""

Place = tuple[int, int]
"""A parameter: the number of its unit, and its number within the unit."""


class SplitBackward:
    """The units of some modules, and the parameters whose gradients I computes, for each course of a forward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.units = [unit for module in modules for unit in _units(module)]
        self.places = [
            [(owner._parameters, name) for owner in unit.modules() for name in owner._parameters] for unit in self.units
        ]
        self.recording: Recorded | None = None
        self._early: dict[tuple[int, ...], frozenset[Place]] = {}
        for number, unit in enumerate(self.units):
            computes: nn.Module = unit.__dict__.get(WITHIN_EXCHANGE, unit)
            computes.register_forward_pre_hook(self._enter)
            computes.register_forward_hook(self._leaver(number), prepend=True)  # before hooks that send results

    def record(self) -> Recorded:
        """Return a context for one run of the modules. It then computes the two halves of their backward."""
        return Recorded(self)

    def pack(self, tensor: Tensor) -> Any:
        """Return a tensor with its version for autograd to keep; between units, in a slot that I can empty."""
        recording = self.recording
        if recording is None or recording.depth:
            return tensor, tensor._version
        slot = [tensor, tensor._version]
        recording.slots.append(slot)
        return slot

    def early(
        self, trail: tuple[int, ...], recorded: Recorded, roots: Sequence[Tensor | GradientEdge]
    ) -> frozenset[Place]:
        """Return the parameters whose gradients I has to compute, cached by the course that a forward took."""
        parameters = self._early.get(trail)
        if parameters is None:
            parameters = self._early[trail] = _early(recorded.calls, roots)
        return parameters

    def _enter(self, _: nn.Module, __: Any) -> None:
        if self.recording is not None:
            self.recording.depth += 1

    def _leaver(self, number: int) -> Any:
        def leave(_: nn.Module, __: Any, results: Any) -> None:
            if self.recording is not None:
                self.recording.leave(number, results)

        return leave


class Call:
    """One call of a unit: the graph edges of its results, and the unit's parameters."""

    __slots__ = ("edges", "parameters", "unit")

    def __init__(self, unit: int, edges: list[GradientEdge], parameters: list[tuple[Place, nn.Parameter]]) -> None:
        self.unit = unit
        self.edges = edges
        self.parameters = parameters


class Recorded:
    """One forward of the modules, until its weight gradients are computed."""

    __slots__ = ("_hooks", "_owner", "_pending", "_veiled", "calls", "depth", "slots", "trail")

    def __init__(self, owner: SplitBackward) -> None:
        self._owner = owner
        self._hooks: Any = None
        self._pending: list[tuple[tuple[Any, ...], tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        self._veiled = False
        self.calls: list[Call] = []
        self.depth = 0
        self.slots: list[list[Any]] = []
        self.trail: list[int] = []

    def __enter__(self) -> Recorded:
        self._owner.recording = self
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._owner.pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._hooks = self._owner.recording = None

    def leave(self, unit: int, results: Any) -> None:
        """Record the results of a unit when its forward returns."""
        self.depth -= 1
        if self.depth:
            return
        hooks = top_saved_tensors_hooks(False)
        self._veiled |= hooks is None or hooks[0] != self._owner.pack
        edges = [get_gradient_edge(one) for one in _tensors(results) if one.requires_grad and one.grad_fn is not None]
        if edges:
            parameters = []
            for k, (container, name) in enumerate(self._owner.places[unit]):
                parameter = container[name]
                if parameter is not None and parameter.requires_grad:
                    parameters.append(((unit, k), parameter))
            self.calls.append(Call(unit, edges, parameters))
        self.trail += (unit, len(edges), len(self.slots))

    def backward_input(
        self, roots: Sequence[Tensor | GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of ``inputs``, None where none is needed or arrives; free what W does not need."""
        starts: list[Any] = list(roots)
        wanted: list[Any] = [one for one in inputs if one.requires_grad]
        num_inputs = len(wanted)
        wanted += [edge for call in self.calls for edge in call.edges]
        places = self._owner.early((*self.trail, len(self.slots)), self, roots) if roots else frozenset()
        early = list({id(p): p for call in self.calls for place, p in call.parameters if place in places}.values())
        wanted += early
        if not (roots and wanted):
            self._forget()
            return [None] * len(inputs)
        computed = torch.autograd.grad(
            starts, wanted, list(gradients), retain_graph=True, allow_unused=True, materialize_grads=False
        )
        pairs = [(p, g) for p, g in zip(early, computed[len(wanted) - len(early) :], strict=True) if g is not None]
        if pairs:
            self._pending.append((tuple(p for p, _ in pairs), tuple(g for _, g in pairs), ()))
        at = num_inputs
        for call in self.calls:
            arrived = [
                (e, g) for e, g in zip(call.edges, computed[at : at + len(call.edges)], strict=True) if g is not None
            ]
            at += len(call.edges)
            late = [p for place, p in call.parameters if place not in places]
            if arrived and late:
                self._pending.append((tuple(e for e, _ in arrived), tuple(g for _, g in arrived), tuple(late)))
        self._forget()
        ready = iter(computed[:num_inputs])
        return [next(ready) if one.requires_grad else None for one in inputs]

    def backward_weight(self) -> None:
        """Add the gradients of the parameters, last units first; each parameter's hooks fire once."""
        while self._pending:
            edges, gradients, parameters = self._pending.pop()
            run_engine(edges, gradients, False, False, parameters, allow_unreachable=True, accumulate_grad=True)
            del edges, gradients

    def _forget(self) -> None:
        """Drop tensors that W does not need. Drop none if others' hooks (checkpointing) run layers again in W."""
        for slot in () if self._veiled else self.slots:
            slot.clear()
        self.calls, self.slots, self.trail = [], [], []


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that own trainable parameters, each once."""
    if any(p is not None and p.requires_grad for p in module._parameters.values()):
        yield module
        return
    for child in module.children():
        yield from _units(child)


def _unpack(packed: Any) -> Tensor:
    if not packed:
        raise RuntimeError(
            "a weight's gradient needs a tensor from outside of the module that owns the weight, but the input half of "
            "the backward has freed the tensor; compute it inside the module, or plan with backwards that are not split"
        )
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place after the forward "
            f"had used it (its version was {version}, and is now {tensor._version})"
        )
    result: Tensor = tensor
    return result


def _tensors(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, dict):
        for one in results.values():
            yield from _tensors(one)
    elif isinstance(results, list | tuple):
        for one in results:
            yield from _tensors(one)


def _early(calls: Sequence[Call], roots: Sequence[Tensor | GradientEdge]) -> frozenset[Place]:
    """Return the parameters that gradients reach by another path than the one call of their unit.

    The graph is walked from the roots and from each call's results. Each walk ends at other calls' results.
    """
    results = {edge.node for call in calls for edge in call.edges}
    reached: dict[int, int] = {}
    outside = set(_leaves((node for node in map(_node, roots) if node not in results), results))
    for call in calls:
        ids = {id(parameter) for _, parameter in call.parameters}
        for leaf in set(_leaves((edge.node for edge in call.edges), results)):
            reached[leaf] = reached.get(leaf, 0) + 1
            if leaf not in ids:
                outside.add(leaf)
    return frozenset(
        place for call in calls for place, p in call.parameters if id(p) in outside or reached.get(id(p), 0) > 1
    )


def _node(root: Tensor | GradientEdge) -> Node:
    return root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node


def _leaves(starts: Iterable[Node], results: set[Node]) -> Iterator[int]:
    """Yield the ids of the leaf tensors that lie below some nodes; no other node of ``results`` is entered."""
    queue = deque(starts)
    seen = set(queue)
    while queue:
        node = queue.popleft()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield id(leaf)
        for below, _ in node.next_functions:
            if below is not None and below not in seen and below not in results:
                seen.add(below)
                queue.append(below)
