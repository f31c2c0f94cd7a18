"""In which numbers a run trains, and how far its gradients may reach.

Lower precision is torch's autocast over parameters of full precision: matrix products run in bfloat16 or float16, what
needs range stays in float32, and gradients arrive in the parameters' own type. Tensors that cross a cut have whatever
type autocast gave them.

Autocast's copies of the weights are kept from one micro-batch to the next, until an update changes them: one copy of a
weight then serves all micro-batches in flight, and is made once. A copy that is made without gradients must not be used
with them, so what runs without gradients, as the first forward of recomputed layers, makes its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch

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
