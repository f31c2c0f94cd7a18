"""Sees every operation of this thread, and tells the recorder which of them are the device's work.

Two things that torch does without an operation are seen, too: storages that get another size, and ``Tensor.tolist``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simulated_cuda.recorder import Recorder

_OF_GROUPS = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
"""Operations that call process groups, which tell the recorder themselves."""

_READS_BACK = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}
"""Operations whose result the host needs, so that it waits for the stream."""

_WITHOUT_KERNEL = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}
"""Operations that only take memory."""


class Watch(TorchDispatchMode):
    """A mode that records operations with a tensor of the device, and their results, as the device's work.

    A number without dimensions may belong to the host even then. torch first splits tensors that ranks share.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        is_view, written = _effects(func)
        if is_view or func.namespace in _OF_GROUPS:
            return result
        recorder = self._recorder
        arguments = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        writes = [one for place in written for one in _at(func, place, args, kwargs or {})]
        if not any(recorder.is_of_device(one) for one in arguments):
            if any(recorder.is_of_host(one) for one in arguments):
                recorder.host_touches(reads=arguments, writes=writes)
            return result
        results = [one for one in tree_leaves(result) if isinstance(one, Tensor) and all(one is not w for w in writes)]
        of_device = [one for one in arguments if one.dim() > 0 or recorder.is_of_device(one)]
        name = func._schema.name
        if name.endswith("_like") or name.startswith("aten::new_"):  # of which only shape and kind are read
            of_device = []
        if name not in _WITHOUT_KERNEL:
            recorder.loads(f"{func} of {', '.join(sorted({str(one.dtype) for one in [*of_device, *results]}))}")
        if name not in _READS_BACK:
            recorder.works(reads=of_device, writes=[*writes, *results])
        else:
            recorder.works(reads=of_device, writes=())
            recorder.host_waits(recorder.record(recorder.current))
        return result


@contextmanager
def without_operations(recorder: Recorder) -> Iterator[None]:
    """Note within this context what no operation shows."""
    resize, tolist = UntypedStorage.resize_, Tensor.tolist

    def resized(storage: UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    def listed(tensor: Tensor) -> Any:
        if recorder.is_of_device(tensor):
            recorder.works(reads=[tensor], writes=())
            recorder.host_waits(recorder.record(recorder.current))
        return tolist(tensor)

    with mock.patch.object(UntypedStorage, "resize_", resized), mock.patch.object(Tensor, "tolist", listed):
        yield


@cache
def _effects(func: Any) -> tuple[bool, tuple[int, ...]]:
    """Return whether an operation only views its argument, and the numbers of the arguments that it writes."""
    schema = func._schema
    aliases = [argument.alias_info for argument in schema.arguments]
    written = tuple(i for i, alias in enumerate(aliases) if alias is not None and alias.is_write)
    is_view = not written and any(one.alias_info is not None for one in schema.returns)
    return is_view or func._schema.name in _SHAPES, written


_SHAPES = {"aten::squeeze_", "aten::unsqueeze_", "aten::t_", "aten::transpose_", "aten::detach_", "aten::lift_fresh"}
"""Operations that are said to write, but only change how a tensor looks."""


def _at(func: Any, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    value = args[place] if place < len(args) else kwargs.get(func._schema.arguments[place].name)
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]
