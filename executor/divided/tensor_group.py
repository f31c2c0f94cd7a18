"""The GPUs that share each layer, without any GPU: layers divided among ranks of which only the first one exists.

torch's own tensor parallelism divides a layer on the meta device over a process group of kind ``fake``, whose
collectives send nothing. What is recorded is one rank's: its matrices, its storages, and its collectives.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves

from penstock.executor.profiling.meta_cost import OperationRecorder
from penstock.executor.run.job import LayerSpec
from penstock.schemas.errors import Conflict, UnsupportedRequest
from penstock.schemas.transformers.degrees import Operation as Collective

_COLLECTIVES: dict[str, tuple[Collective, Callable[[Any, Any], Tensor]]] = {
    "_c10d_functional.all_gather_into_tensor": ("all_gather", lambda args, result: result),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", lambda args, result: args[0]),
    "_c10d_functional.all_reduce": ("all_reduce", lambda args, result: args[0]),
    "_c10d_functional.all_reduce_": ("all_reduce", lambda args, result: args[0]),
    "_c10d_functional.all_to_all_single": ("all_to_all", lambda args, result: args[0]),
    "c10d._allgather_base_": ("all_gather", lambda args, result: args[0]),
    "c10d._reduce_scatter_base_": ("reduce_scatter", lambda args, result: args[1]),
    "c10d.allreduce_": ("all_reduce", lambda args, result: args[0][0]),
    "c10d.alltoall_base_": ("all_to_all", lambda args, result: args[1]),
}
"""torch's collectives, and which tensor of each is the whole one (of an all-to-all: what one GPU sends)."""
_LOCAL = {"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"}
"""What belongs to them and sends nothing."""


class Sent(NamedTuple):
    """One collective: its kind, and the bytes of the whole tensor."""

    operation: Collective
    bytes: int


@contextmanager
def tensor_group(degree: int) -> Iterator[DeviceMesh]:
    """Ranks of which this process is the first, until it is left.

    Raises Conflict in a process that has a process group already.
    """
    if dist.is_initialized():
        raise Conflict(
            f"costs at tensor {degree} are traced with a process group of their own, and this process has one already",
            remedy="compute the profile in a process without torch.distributed, such as `penstock profile`",
        )
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it prints a traceback for each operation that fails, which the error says, too
    dist.init_process_group("fake", rank=0, world_size=degree)
    try:
        yield init_device_mesh("cpu", (degree,))
    finally:
        dist.destroy_process_group()
        log.setLevel(level)


def divide(spec: LayerSpec, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The layer as ``spec.parallel`` divides it. Raises UnsupportedRequest where it cannot be divided so."""
    if spec.parallel is None:
        raise refused(
            spec, mesh.size(), "it does not say how", remedy='give LayerSpec(…, parallel=…): styles, or "replicated"'
        )
    if spec.parallel == "replicated":
        return module
    plan = spec.parallel() if callable(spec.parallel) else spec.parallel
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a path without a module, and goes on
        try:
            return parallelize_module(module, mesh, dict(plan))
        except Exception as error:
            raise refused(spec, mesh.size(), reason(error)) from error


def refused(spec: LayerSpec, degree: int, why: str, *, remedy: str | None = None) -> UnsupportedRequest:
    """The error of a layer that cannot be divided so."""
    return UnsupportedRequest(f"layer {spec.name!r} cannot be divided by tensor {degree}: {why}", remedy=remedy)


def reason(error: Exception) -> str:
    """The first line of what torch says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class LocalRecorder(OperationRecorder):
    """Records what one rank does: operations on its own tensors, and its collectives in ``sent``.

    Operations on tensors that ranks share are taken apart by torch first. To see how an operation is divided, torch
    also runs it once on tensors without numbers and of the whole shape: these are no work, and not recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs, result))):
            return result
        if func.namespace in ("_c10d_functional", "c10d"):
            self._send(f"{func.namespace}.{func.overloadpacket.__name__}", args, result)
        else:
            self.record(func, args, kwargs, result)
        return result

    def _send(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in _LOCAL:
            return
        if name not in _COLLECTIVES:
            raise NotImplementedError(f"the collective {name} has no cost")
        operation, whole_of = _COLLECTIVES[name]
        whole = whole_of(args, result)
        self.sent.append(Sent(operation, whole.numel() * whole.itemsize))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; a sum of which each rank has a part is refused with ValueError."""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"its result of {tuple(tensor.shape)} is left as a sum over the GPUs")
    return tensor.to_local()


def summed_bytes(module: nn.Module, *, unnamed: bool) -> int:
    """Bytes of the gradients that ranks have to sum once a step, after a backward pass: in fp32, as trainers keep them.

    Those of parameters that the ranks share say so themselves. Parameters that the layer's plan does not name are
    whole on every rank; ``unnamed`` says whether their gradients are parts of sums.
    """
    total = 0
    for parameter in module.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        partial = unnamed
        if isinstance(gradient, DTensor):
            partial = any(placement.is_partial() for placement in gradient.placements)
        total += partial * parameter.numel() * torch.float32.itemsize
    return total


def local_bytes(module: nn.Module) -> dict[str, int]:
    """Bytes of each parameter on this rank, the one with the largest parts."""
    found = {}
    for name, parameter in module.named_parameters():
        part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        found[name] = part.numel() * part.itemsize
    return found


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of this rank as ordinary ones, for its optimizer."""
    found = []
    for parameter in module.parameters():
        part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        found.append(nn.Parameter(torch.empty_like(part), requires_grad=parameter.requires_grad))
    return found
