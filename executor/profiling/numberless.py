"""Tensors without numbers, which layers are traced on: of the meta device, or as torch's fake tensors where a trace is
under autocast, which leaves tensors of the meta device as they are.

Fake tensors have no numbers either, and storages of the meta device, but autocast takes them for tensors of a CPU.
torch makes others, to see how an operation on tensors that ranks share is divided: ``is_foreign`` tells them apart.
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
    """The mode of the tensors that layers are traced on."""


def is_foreign(tensor: Any) -> bool:
    """Whether torch made a tensor for its own use, of the shape that all ranks have together."""
    return isinstance(tensor, FakeTensor) and not isinstance(tensor.fake_mode, _Traced)


class Numberless:
    """Where layers are traced: in full precision on the meta device, else on fake tensors under autocast."""

    def __init__(self, training: Training = FULL) -> None:
        self._training = training
        # what a layer makes of itself, such as positions, is a tensor of the CPU with numbers
        self._mode = _Traced(allow_non_fake_inputs=True) if training.lowered else None

    @property
    def lowered(self) -> bool:
        """Whether layers run under autocast."""
        return self._mode is not None

    def tensor(self, tensor: Tensor) -> Tensor:
        """A tensor of this shape and type here."""
        on_meta = tensor.to("meta")
        if self._mode is None:
            return on_meta
        return FakeTensor(self._mode, on_meta, torch.device("cpu"))

    def module(self, module: nn.Module) -> nn.Module:
        """The module, whose parameters and buffers are of the meta device, on tensors of here."""
        if self._mode is not None:
            known: dict[int, Any] = {}
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        made = known.setdefault(id(parameter), self._parameter(parameter))
                        part._parameters[name] = made
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        part._buffers[name] = known.setdefault(id(buffer), self.tensor(buffer))
        return module

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(self.tensor(parameter.detach()), requires_grad=parameter.requires_grad)

    def layers(self) -> AbstractContextManager[Any]:
        """What layers run under."""
        return self._training.autocast("cpu") or nullcontext()

    @contextmanager
    def copying(self, parameters: Iterable[Tensor]) -> Iterator[Copying]:
        """Inside it autocast keeps the copies that it makes of parameters, of which the first run of a layer makes all.

        They are noted by what it gives.
        """
        if not self.lowered:
            yield Copying((), None)
            return
        with kept_casts():
            forget_casts()
            yield Copying(parameters, self._training.dtype)


class Copying(TorchDispatchMode):
    """Notes copies in ``dtype`` that are made of whole parameters inside it; of parts of them autocast keeps none."""

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        self._own = {id(getattr(parameter, "_local_tensor", parameter)) for parameter in parameters}
        self.copies: list[Tensor] = []

    @property
    def copied_bytes(self) -> int:
        """Of all copies."""
        return sum(copy.numel() * copy.itemsize for copy in self.copies)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, on DTensors by their own way, which ends here with local tensors."""
        if any(hasattr(kind, "_local_tensor") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._own and result.dtype == self._dtype:
            self.copies.append(result)
        return result
