"""Tensors without numbers, on which layers are traced: on the meta device, or torch's fake tensors for autocast.

Autocast leaves tensors of the meta device as they are, so a trace under autocast needs fake tensors.

Fake tensors have no numbers either, and their storages are on the meta device, but autocast treats them as tensors of a
CPU. torch creates other fake tensors to see how an operation on shared tensors is divided; ``is_foreign`` recognises
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.executor.stage.precision import FULL, Training, forget_casts, kept_casts


class _Traced(FakeTensorMode):
    """The mode of the tensors on which layers are traced."""


def is_foreign(tensor: Any) -> bool:
    """Return whether torch made a tensor for internal use, with the shape of all ranks' parts together."""
    return isinstance(tensor, FakeTensor) and not isinstance(tensor.fake_mode, _Traced)


class Numberless:
    """The place where layers are traced: in full precision the meta device, otherwise fake tensors under autocast."""

    def __init__(self, training: Training = FULL) -> None:
        self._training = training
        # a layer may create tensors with numbers on the CPU, such as positions
        self._mode = _Traced(allow_non_fake_inputs=True) if training.lowered else None

    @property
    def lowered(self) -> bool:
        """True if layers run under autocast."""
        return self._mode is not None

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor without numbers of this shape and type."""
        on_meta = tensor.to("meta")
        if self._mode is None:
            return on_meta
        return FakeTensor(self._mode, on_meta, torch.device("cpu"))

    def module(self, module: nn.Module) -> nn.Module:
        """Replace a module's parameters and buffers, which are on the meta device, by tensors without numbers."""
        if self._mode is not None:
            replaced: dict[int, Any] = {}
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        replacement = replaced.setdefault(id(parameter), self._parameter(parameter))
                        part._parameters[name] = replacement
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        part._buffers[name] = replaced.setdefault(id(buffer), self.tensor(buffer))
        return module

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self.tensor(parameter.detach()), requires_grad=parameter.requires_grad)

    def layers(self) -> AbstractContextManager[Any]:
        """Create the context in which layers run."""
        return self._training.autocast("cpu") or nullcontext()

    @contextmanager
    def copying(self, parameters: Iterable[Tensor]) -> Iterator[Copying]:
        """Keep autocast's copies of parameters within this context; a layer's first run makes all of them.

        The object that it yields notes the copies.
        """
        if not self.lowered:
            yield Copying((), None)
            return
        with kept_casts():
            forget_casts()
            yield Copying(parameters, self._training.dtype)


class Copying(TorchDispatchMode):
    """A mode that notes copies in ``dtype`` of whole parameters; autocast keeps no copies of parts of them."""

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self._parameter_ids = {id(getattr(parameter, "_local_tensor", parameter)) for parameter in parameters}
        self.copies: list[Tensor] = []

    @property
    def copied_bytes(self) -> int:
        """The bytes of all copies."""
        return sum(copy.numel() * copy.itemsize for copy in self.copies)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation. An operation on DTensors is left to DTensor, and comes back here with local tensors."""
        if any(hasattr(kind, "_local_tensor") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._to_copy.default
            and id(args[0]) in self._parameter_ids
            and result.dtype == self._dtype
        ):
            self.copies.append(result)
        return result
