"""The precision in which a run trains, and the limit on the norm of its gradients.

Lower precision is torch's autocast over parameters of full precision. Matrix products run in bfloat16 or float16,
operations that need range stay in float32, and gradients arrive in the parameters' type. Tensors that cross a cut have
the type that autocast gave them.

Autocast's copies of the weights are kept from one micro-batch to the next, until an update changes the weights. One
copy of a weight then serves all micro-batches in flight. A copy that was made without gradients must not be used with
them, so passes without gradients, such as the first forward of recomputed layers, make separate copies.

Where replicas share out parameters, copies come and go with the whole parameters that they are copied from
(``Copies``). Their storages shrink to nothing and are filled again, so the tensors that autograd keeps stay valid.
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
    """The precision of a run, and the L2 norm to which gradients are clipped (None: no clipping).

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
        """The data type of autocast; None in full precision."""
        return _DTYPES.get(self.precision)

    @property
    def lowered(self) -> bool:
        """True if the run uses autocast; tensors may then be smaller than in a profile of full precision."""
        return self.dtype is not None

    @property
    def needs_norm(self) -> bool:
        """True if steps wait for all ranks' gradients, to clip them or to detect an overflow."""
        return self.clip_norm is not None or self.precision == "fp16"

    def autocast(self, device: torch.device | str, *, keeps_casts: bool = True) -> AbstractContextManager[Any] | None:
        """Create the context in which layers and loss run; None in full precision. It can be entered again and again.

        ``keeps_casts``: it uses copies of weights that exist already, and keeps the copies that it makes.
        """
        if not self.lowered:
            return None
        return torch.autocast(torch.device(device).type, dtype=_DTYPES[self.precision], cache_enabled=keeps_casts)


@contextmanager
def kept_casts() -> Iterator[None]:
    """Keep autocast's copies of weights within this context; call ``forget_casts`` after every change of a weight."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def forget_casts() -> None:
    """Discard autocast's copies of the weights, which have changed."""
    torch.clear_autocast_cache()


FULL = Training()
"""Full precision without clipping."""


class Copies:
    """The copies in another data type that layers made, under autocast, of tensors in the buffer ``whole``."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole
        self._copies: list[tuple[Tensor, Tensor]] = []

    def note(self, source: Tensor, copy: Tensor) -> None:
        """Add a copy. Both tensors are aliased, so that autograd does not check the versions of the aliases."""
        original, duplicate = (_alias(each) for each in (source, copy))
        self._copies.append((original, duplicate))

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the buffer."""
        return bool(tensor.untyped_storage()._cdata == self._whole.untyped_storage()._cdata)

    def fill(self) -> None:
        """Allocate the copies, and fill them from the buffer as it is now."""
        for source, copy in self._copies:
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
            copy.copy_(source)

    def empty(self) -> None:
        """Free the memory of the copies."""
        for _, copy in self._copies:
            copy.untyped_storage().resize_(0)

    def forget(self) -> None:
        """Discard the copies: an update also ends autocast's copies."""
        self._copies.clear()


class Copied(TorchDispatchMode):
    """A mode that notes whole copies of parameters in the ``Copies`` whose buffer holds the parameters."""

    def __init__(self, kept: Sequence[Copies]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation. An operation on DTensors is left to DTensor, and comes back here with local tensors."""
        if any(issubclass(kind, Tensor) and hasattr(kind, "_local_tensor") for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            for each in self._kept:
                if each.has(args[0]) and result.device == args[0].device:
                    each.note(args[0], result)
        return result


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same storage, without history."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
