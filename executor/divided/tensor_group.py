"""The GPUs that share each layer, simulated: layers divided among ranks of which only the first one exists.

torch's tensor parallelism divides a layer on the meta device over a process group of kind ``fake``, whose collectives
send nothing. One rank is recorded: its matrices, its storages, and its collectives.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.executor.divided.division import Meshes, is_expert
from penstock.executor.profiling.meta_cost import OperationRecorder
from penstock.executor.profiling.numberless import is_foreign
from penstock.executor.profiling.tracing import CollectiveKind, Sent
from penstock.schemas.errors import Conflict
from penstock.schemas.transformers.degrees import Degrees

_COLLECTIVES: dict[str, tuple[CollectiveKind, Callable[[Any], Any]]] = {
    "_c10d_functional.all_gather_into_tensor": ("all_gather", lambda args: args[0].nbytes * args[1]),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", lambda args: args[0].nbytes),
    "_c10d_functional.all_reduce": ("all_reduce", lambda args: args[0].nbytes),
    "_c10d_functional.all_reduce_": ("all_reduce", lambda args: args[0].nbytes),
    "_c10d_functional.all_to_all_single": ("all_to_all", lambda args: args[0].nbytes),
    "c10d._allgather_base_": ("all_gather", lambda args: args[0].nbytes),
    "c10d._reduce_scatter_base_": ("reduce_scatter", lambda args: args[1].nbytes),
    "c10d.allreduce_": ("all_reduce", lambda args: args[0][0].nbytes),
    "c10d.alltoall_base_": ("all_to_all", lambda args: args[1].nbytes),
    "c10d.reduce_": ("reduce", lambda args: args[0][0].nbytes),
    "c10d.broadcast_": ("broadcast", lambda args: args[0][0].nbytes),
}
"""torch's collectives, and the bytes of each one's whole tensor (all-to-all: the bytes that one GPU sends)."""
_NO_COLLECTIVES = {
    *("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"),
    *("c10d.send", "c10d.recv_", "c10d.recv_any_source_", "c10d.barrier"),
}
"""Operations of these namespaces that are no collectives: waits, messages, barriers."""


def sent_by(func: Any, args: tuple[Any, ...]) -> Sent | None:
    """Return the collective of a torch operation, or None. NotImplementedError for an unknown collective."""
    name = f"{func.namespace}.{func.overloadpacket.__name__}"
    if name in _NO_COLLECTIVES:
        return None
    if name not in _COLLECTIVES:
        raise NotImplementedError(f"the collective {name} has no cost")
    operation, bytes_of = _COLLECTIVES[name]
    return Sent(operation, _group(args), bytes_of(args))


@contextmanager
def first_of(degrees: Degrees) -> Iterator[Meshes]:
    """Create ranks of which this process is the first, for the time of this context.

    Raises Conflict in a process that has a process group already.
    """
    if dist.is_initialized():
        raise Conflict(
            f"tracing costs at {degrees} needs a separate process group, but this process already has one",
            remedy="compute the profile in a process without torch.distributed, such as `penstock profile`",
        )
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it prints tracebacks of failed operations, and the error has them too
    hook = sys.excepthook  # torch wraps it once more for each group
    dist.init_process_group("fake", rank=0, world_size=degrees.gpus)
    try:
        tensor = degrees.tensor
        ranks = {
            "tensor": range(tensor),
            "context": range(0, tensor * degrees.context, tensor),
            "expert": range(degrees.expert),
        }
        groups = {name: dist.new_group(list(members)) if len(members) > 1 else None for name, members in ranks.items()}
        yield Meshes.of(groups, "cpu")
    finally:
        dist.destroy_process_group()
        log.setLevel(level)
        sys.excepthook = hook


class LocalMode(TorchDispatchMode):
    """A mode that sees one rank's work: operations on its own tensors, and its collectives.

    torch first splits operations on tensors that ranks share into operations on local tensors.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace not in ("_c10d_functional", "c10d"):
            self.computes(func, args, kwargs, result)
        elif not _has_no_numbers(args, result):
            sent = sent_by(func, args)
            if sent is not None:
                self.sends(sent)
        return result

    def computes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """Note an operation that has run."""

    def sends(self, sent: Sent) -> None:
        """Note a collective that was started."""
        raise NotImplementedError


class LocalRecorder(LocalMode, OperationRecorder):
    """A recorder of one rank's operations, with its collectives in ``sent``."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def computes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """Record an operation that is this rank's work."""
        if not _has_no_numbers(args, kwargs, result):
            self.record(func, args, kwargs, result)

    def sends(self, sent: Sent) -> None:
        """Record a collective."""
        self.sent.append(sent)


def _has_no_numbers(*tensors: Any) -> bool:
    """Return whether torch ran an operation on whole-shaped tensors without numbers, to see how it is divided."""
    return any(map(is_foreign, tree_leaves(tensors)))


def _group(args: tuple[Any, ...]) -> str:
    """Return the name of a collective's group, which is an argument itself or the group's."""
    name = next((each for each in reversed(args) if isinstance(each, str)), None)
    if name is not None:
        return name
    boxed = next(each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()))
    return dist.ProcessGroup.unbox(boxed).group_name


def local_bytes(module: nn.Module) -> dict[str, int]:
    """Return the bytes of each parameter on this rank, which has the largest parts."""
    sizes = {}
    for name, parameter in module.named_parameters():
        part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        sizes[name] = part.numel() * part.itemsize
    return sizes


def expert_bytes(module: nn.Module) -> int:
    """Return the bytes of shared-out experts on this rank."""
    return sum(size for name, size in local_bytes(module).items() if is_expert(module.get_parameter(name)))


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return this rank's parameters as ordinary ones, for its optimizer."""
    parameters = []
    for parameter in module.parameters():
        part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        parameters.append(nn.Parameter(torch.empty_like(part), requires_grad=parameter.requires_grad))
    return parameters
