"""The layers that a rank shares with other ranks of its mesh, divided as jobs say, and this rank's parts of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module

from penstock.executor.divided.context import Context
from penstock.executor.divided.experts import ExpertParallel
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import LayerSpec
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import Mesh

Placements = tuple[Placement, ...]


class Meshes(NamedTuple):
    """The groups of ranks of a rank, each as a mesh with one named dimension; None where the rank is alone."""

    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None
    expert: DeviceMesh | None = None

    @classmethod
    def of(cls, groups: Mapping[str, Any], kind: str) -> Meshes:
        """Create the meshes of process groups, by name, on a kind of device."""
        return cls(
            **{
                name: DeviceMesh.from_group(group, kind, mesh_dim_names=(name,))
                for name, group in groups.items()
                if group is not None
            }
        )

    @property
    def shares(self) -> bool:
        """True if the rank shares anything."""
        return any(mesh is not None for mesh in self)

    @property
    def sequences(self) -> Context | None:
        """The context in which the rank shares sequences with other ranks; None if it does not."""
        return None if self.context is None else Context(self.context.get_group())

    def size(self, name: str) -> int:
        """Return how many ranks share a layer's tensors, its sequences, or its experts."""
        mesh: DeviceMesh | None = getattr(self, name)
        return 1 if mesh is None else mesh.size()

    def __str__(self) -> str:
        """Return the degrees above 1, as in "tensor 8, expert 2"."""
        return ", ".join(f"{name} {self.size(name)}" for name in self._fields if self.size(name) > 1)


class Gradient(NamedTuple):
    """The layout of a parameter's gradient over ranks.

    ``placements``: the placements of the DTensor that ranks share; None where each rank has a separate tensor.
    ``is_part``: each rank has a part of a sum over the mesh's tensor group.
    """

    placements: Placements | None
    is_part: bool


_WHOLE = Gradient(None, False)


class Piece(NamedTuple):
    """This rank's part of a parameter.

    ``leaf``: the parameter in its layer, to which autograd adds gradients. ``local_parameter``: this rank's part as an
    ordinary parameter with the same storage, which is reduced, stepped and saved.
    """

    leaf: nn.Parameter
    local_parameter: nn.Parameter
    gradient: Gradient

    @property
    def is_part(self) -> bool:
        """True if each rank of the tensor group has a part of the gradient's sum."""
        return self.gradient.is_part

    @property
    def is_sharded(self) -> bool:
        """True if other ranks of the mesh have other parts of the parameter."""
        return isinstance(self.leaf, DTensor) and any(each.is_shard() for each in self.leaf.placements)

    @property
    def is_expert(self) -> bool:
        """True if it belongs to experts that the expert group shares out; another group sums its gradients."""
        return is_expert(self.leaf)

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor with the parameter's shape, such as a gradient."""
        leaf = self.leaf
        if not isinstance(leaf, DTensor):
            return whole
        for axis, placement in enumerate(leaf.placements):
            if isinstance(placement, Shard):
                parts = torch.chunk(whole, leaf.device_mesh.size(axis), placement.dim)
                mine = leaf.device_mesh.get_local_rank(axis)
                whole = parts[mine] if mine < len(parts) else whole.narrow(placement.dim, 0, 0)
        return whole

    def shared(self, part: Tensor) -> Tensor:
        """Return a DTensor over the mesh, of which ``part``, such as an optimizer's state, is this rank's part."""
        return self._joined(part, self.leaf.placements) if isinstance(self.leaf, DTensor) else part

    def part(self, shared: Any) -> Any:
        """Return this rank's part of a tensor that ``shared`` returned; return anything else unchanged."""
        return shared.to_local() if isinstance(shared, DTensor) else shared

    def place(self, view: Tensor) -> Tensor | None:
        """Return the tensor to which autograd must add this rank's gradient so that it arrives in ``view``.

        None where autograd computes the gradient in another layout, as torch does for an embedding with a part of the
        words on each rank: a hook then adds each gradient to ``view`` and frees it at once.
        """
        placements, leaf = self.gradient.placements, self.leaf
        if placements is None:
            return view
        assert isinstance(leaf, DTensor)
        if self.gradient.is_part or placements == leaf.placements:
            return self._joined(view, placements)

        def add(_: Tensor) -> None:
            gradient = leaf.grad
            assert isinstance(gradient, DTensor)
            view.add_(gradient.redistribute(placements=leaf.placements).to_local())
            leaf.grad = None

        hooked: Any = leaf  # torch has no types for the method
        hooked.register_post_accumulate_grad_hook(add)
        return None

    def leaf_over(self, part: Tensor, view: Tensor) -> nn.Parameter:
        """Create another leaf of the layer, over the memory of ``part``, whose gradients arrive in ``view``."""
        assert isinstance(self.leaf, DTensor)
        # From .data, so that autograd does not take in-place optimizer steps for changes of tensors that a graph saved.
        leaf = nn.Parameter(self._joined(part.data, self.leaf.placements))
        place: Any = self._replace(leaf=leaf).place(view)  # a DTensor, as the leaf is
        leaf.grad = place
        return leaf

    def _joined(self, part: Tensor, placements: Placements) -> DTensor:
        leaf = self.leaf
        assert isinstance(leaf, DTensor)
        return DTensor.from_local(
            part, leaf.device_mesh, placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
        )


def is_expert(parameter: nn.Parameter) -> bool:
    """Return whether a parameter belongs to experts that ranks share out."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("expert",)


class Division:
    """The way in which this rank shares layers: its place in a ``mesh``, and the process groups of the run by number.

    ``gradients``: the layout of gradients, by layer and parameter name. ``tracer``: a tracer of the divided layers.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[Any], device: torch.device | str = "cpu") -> None:
        self.mesh = mesh
        self.tensor_group = groups[mesh.tensor_group] if mesh.tensor_group >= 0 else None
        context_group = groups[mesh.context_group] if mesh.context_group >= 0 else None
        expert_group = groups[mesh.expert_group] if mesh.expert_group >= 0 else None
        self.meshes = Meshes.of(
            {"tensor": self.tensor_group, "context": context_group, "expert": expert_group}, torch.device(device).type
        )
        self.context = self.meshes.sequences
        self.gradients: dict[int, Mapping[str, Gradient]] = {}
        self.tracer: Any = None
        self._in_loss = False

    @property
    def counts(self) -> bool:
        """True if this rank counts results that all ranks of a tensor group compute alike, such as the loss."""
        return self.mesh.tensor_rank == 0

    @property
    def counts_rows(self) -> bool:
        """True if this rank counts its mesh's samples. Ranks that share a sequence each count their loss."""
        return self.counts and self.mesh.context_rank == 0

    def divide(self, spec: LayerSpec, module: nn.Module) -> None:
        """Divide a layer in place. Raises UnsupportedRequest where it cannot be divided."""
        if self.meshes.shares:
            divide(spec, module, self.meshes)

    def pieces(self, layer: int, module: nn.Module) -> Iterator[tuple[nn.Parameter, Piece]]:
        """Yield the parameters of a divided layer with this rank's parts of them."""
        gradients = self.gradients.get(layer, {})
        for name, leaf in module.named_parameters():
            part = leaf
            if isinstance(leaf, DTensor):
                part = nn.Parameter(leaf._local_tensor.detach(), requires_grad=leaf.requires_grad)
            yield leaf, Piece(leaf, part, gradients.get(name, _WHOLE))

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a layer's result."""
        return local(tensor)

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Run a loss over parts of the scores, and its backward, which may compute the loss again."""
        if self.meshes.tensor is None or self._in_loss:
            yield
            return
        self._in_loss = True
        try:
            with loss_parallel():
                yield
        finally:
            self._in_loss = False

    def whole_loss(self, total: Tensor) -> Tensor:
        """Return a loss over parts of the scores as one number."""
        return total.full_tensor() if isinstance(total, DTensor) else total


def divide(spec: LayerSpec, module: nn.Module, meshes: Meshes) -> nn.Module:
    """Divide a layer as ``spec.parallel`` says: every rank builds it whole, and keeps its part.

    Raises UnsupportedRequest where it cannot be divided so.
    """
    if (sequences := meshes.sequences) is not None:
        sequences.enclose(module)
    if spec.parallel == "replicated":
        return module
    if spec.parallel is None:
        if meshes.tensor is None:
            return module
        raise refused(
            spec,
            meshes,
            "its LayerSpec has no `parallel`",
            remedy='give LayerSpec(…, parallel=…): styles, or "replicated"',
        )
    plan = spec.parallel() if callable(spec.parallel) else spec.parallel
    experts: dict[str, ParallelStyle] = {
        path: style for path, style in plan.items() if isinstance(style, ExpertParallel)
    }
    others = {path: style for path, style in plan.items() if path not in experts}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch only warns of a path without a module
        try:
            for mesh, styles in ((meshes.expert, experts), (meshes.tensor, others)):
                for path, style in styles.items() if mesh is not None else ():
                    # with a dictionary, torch forgets src_data_rank=None for the module itself
                    parallelize_module(module, mesh, {path: style} if path else style, src_data_rank=None)
        except Exception as error:
            raise refused(spec, meshes, reason(error)) from error
    return module


def has_experts(spec: LayerSpec) -> bool:
    """Return whether a layer's ``parallel`` lets ranks share out experts."""
    plan = spec.parallel() if callable(spec.parallel) else spec.parallel
    return isinstance(plan, Mapping) and any(isinstance(style, ExpertParallel) for style in plan.values())


def refuse_without_experts(chain: Chain, meshes: Meshes) -> None:
    """Raise UnsupportedRequest where ranks are to share experts of a job without experts."""
    if meshes.expert is not None and not any(map(has_experts, chain.specs)):
        raise UnsupportedRequest(
            f"job {chain.job.name!r} has no experts for {meshes.size('expert')} GPUs to share: no layer has an "
            "ExpertParallel in its `parallel`",
            remedy="leave the expert degree at 1, or say in `parallel` which module holds experts",
        )


def refused(spec: LayerSpec, meshes: Meshes, why: str, *, remedy: str | None = None) -> UnsupportedRequest:
    """Create the error for a layer that cannot be divided so."""
    return UnsupportedRequest(f"layer {spec.name!r} cannot be divided by {meshes}: {why}", remedy=remedy)


def reason(error: Exception) -> str:
    """Return the first line of torch's message, with the type of the error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor. ValueError where the tensor is a sum of which each rank has a part."""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"its result of shape {tuple(tensor.shape)} is not yet summed over the GPUs")
    return tensor.to_local()


def gradients_of(module: nn.Module, *, unnamed: bool) -> dict[str, Gradient]:
    """Return the layout of the gradients of a divided layer, after a backward pass.

    Gradients of shared parameters are DTensors, which say it themselves. Parameters that the layer's plan does not name
    are whole on every rank; ``unnamed`` says whether their gradients are parts of sums.
    """
    gradients = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            placements = gradient.placements
            gradients[name] = Gradient(placements, any(each.is_partial() for each in placements))
        else:
            gradients[name] = Gradient(None, unnamed and gradient is not None)
    return gradients
