"""In which numbers a run trains, and how far its gradients may reach.

Lower precision is torch's autocast over parameters of full precision: matrix products run in bfloat16 or float16, what
needs range stays in float32, and gradients arrive in the parameters' own type. Tensors that cross a cut have whatever
type autocast gave them.

Autocast's copies of the weights are kept from one micro-batch to the next, until an update changes them: one copy of a
weight then serves all micro-batches in flight, and is made once. A copy that is made without gradients must not be used
with them, so what runs without gradients, as the first forward of recomputed layers, makes its own.

Where replicas share out parameters, copies come and go with the whole parameters that they are made of
(``Copies``): their storages shrink to nothing and are filled again, so that what autograd keeps stays what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.executor.runtime.interface import Precision
from penstock.schemas.errors import InvalidDocument

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Training:
    """Numbers of a run: its precision, and the L2 norm to which gradients are clipped (None: not).

    Raises InvalidDocument for an unknown precision or a norm that is not above 0.
    """

    precision: Precision = "fp32"
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise InvalidDocument(f"precision {self.precision!r} is unknown; give one of {', '.join(PRECISIONS)}")
        if self.clip_norm is not None and not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise InvalidDocument(f"clip_norm is {self.clip_norm!r}; give a finite norm above 0, or none")

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast computes in; None where it is left out."""
        return _DTYPES.get(self.precision)

    @property
    def lowered(self) -> bool:
        """Whether tensors may be smaller than in a profile of full precision."""
        return self.dtype is not None

    @property
    def needs_norm(self) -> bool:
        """Whether steps wait for all ranks' gradients: to clip them, or to see whether one overflowed."""
        return self.clip_norm is not None or self.precision == "fp16"

    def autocast(self, device: torch.device | str, *, keeps_casts: bool = True) -> AbstractContextManager[Any] | None:
        """What layers and loss run under; None in full precision. It can be entered again and again.

        ``keeps_casts``: it uses copies of weights that were made before, and keeps those that it makes.
        """
        if not self.lowered:
            return None
        return torch.autocast(torch.device(device).type, dtype=_DTYPES[self.precision], cache_enabled=keeps_casts)


@contextmanager
def kept_casts() -> Iterator[None]:
    """Inside it autocast keeps its copies of weights; ``forget_casts`` has to follow every change of a weight."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def forget_casts() -> None:
    """Let autocast copy weights again, which have changed."""
    torch.clear_autocast_cache()


FULL = Training()
"""Full precision, nothing clipped."""


class Copies:
    """The copies in another data type that layers, under autocast, have made of what lies in the buffer ``whole``."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole
        self._made: list[tuple[Tensor, Tensor]] = []

    def note(self, source: Tensor, copy: Tensor) -> None:
        """Take a copy over; both are seen through tensors whose versions autograd does not look at."""
        original, made = (_alias(each) for each in (source, copy))
        self._made.append((original, made))

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the buffer."""
        return bool(tensor.untyped_storage()._cdata == self._whole.untyped_storage()._cdata)

    def fill(self) -> None:
        """Have them, of the numbers that the buffer has now."""
        for source, copy in self._made:
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
            copy.copy_(source)

    def empty(self) -> None:
        """Let go of their memory."""
        for _, copy in self._made:
            copy.untyped_storage().resize_(0)

    def forget(self) -> None:
        """Have none: an update ends those that autocast keeps."""
        self._made.clear()


class Copied(TorchDispatchMode):
    """Inside it whole copies of parameters are noted by those of ``kept`` in whose buffer the parameters lie."""

    def __init__(self, kept: Sequence[Copies]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, on DTensors by their own way, which ends here with local tensors."""
        if any(issubclass(kind, Tensor) and hasattr(kind, "_local_tensor") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            for each in self._kept:
                if each.has(args[0]) and result.device == args[0].device:
                    each.note(args[0], result)
        return result


def _alias(tensor: Tensor) -> Tensor:
    """A tensor of the same storage and no history."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
