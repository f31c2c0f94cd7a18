"""The norm of a step's whole gradient, for clipping, and the loss scale in float16 with its overflow flag.

Every parameter counts once, however many ranks hold it: the first rank of its group counts it (NORM). By then the sums
of replicas are equal, and so are the gradients of tied parameters. A step multiplies its gradients by one factor: the
correction of the batch's terms, divided by the loss scale, times the clipping (``torch.nn.utils.clip_grad_norm_``).

The loss scale grows and backs off as in ``torch.amp.GradScaler``. An overflow on any rank makes the sum infinite or
NaN, so all ranks see it, skip the step together, and need not exchange the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.interface import Event, Runtime
from penstock.executor.stage.precision import Training
from penstock.executor.stage.stage_module import StageModule
from penstock.executor.transport import sum_over

_EPSILON = 1e-6
"""The constant that ``clip_grad_norm_`` adds to the norm."""


@dataclass(slots=True)
class LossScale:
    """A factor for losses, so that small gradients do not vanish in float16.

    It is halved when a gradient overflows, and doubled after ``interval`` steps without an overflow.
    """

    value: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> None:
        """Count a step, and adjust the scale."""
        if overflow:
            self.value *= self.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value *= self.growth
            self.good_steps = 0

    def state_dict(self) -> dict[str, float | int]:
        """Return the state for checkpoints."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


class GradientNorm:
    """The instructions NORM and WAIT_NORM of a rank.

    ``counted``: the parameters that this rank counts. ``modules``: the rank's stages, whose losses are scaled.
    ``norm``: the last step's norm before clipping. ``overflow``: whether that step is skipped.
    """

    def __init__(
        self,
        training: Training,
        counted: Iterable[nn.Parameter],
        modules: Iterable[StageModule],
        runtime: Runtime = CPU,
    ) -> None:
        self.clip_norm = training.clip_norm
        self.scale = LossScale() if training.precision == "fp16" else None
        self.norm = 0.0
        self.overflow = False
        self._counted = list(counted)
        self._modules = list(modules)
        self._expected_count = 1.0
        self._runtime = runtime
        self._fetched: tuple[Tensor, Event] | None = None
        self._sum: Any = None
        self._raw = 0.0
        self._used_scale = 1.0

    def begin(self, expected_count: float) -> None:
        """Make losses scaled means over ``expected_count`` terms. Call it again after the scale was restored."""
        self._expected_count = expected_count
        scale = 1.0 if self.scale is None else self.scale.value
        for module in self._modules:
            module.count = expected_count / scale

    def start(self) -> None:
        """Start to sum the squares over all ranks (NORM). On a GPU, start to copy them to the host."""
        squares = sum_of_squares(self._counted, self._runtime.device)
        host = self._runtime.host_buffer(squares)
        self._fetched = host, self._runtime.download(squares, host)
        self._sum = sum_over(host) if self._fetched[1].is_over() else None

    def wait(self) -> None:
        """Wait for the sum (WAIT_NORM), and set the scale of the next step's losses."""
        assert self._fetched is not None, "WAIT_NORM without NORM"
        squares, arrived = self._fetched
        arrived.synchronize()
        (self._sum or sum_over(squares)).wait()
        self._fetched = self._sum = None
        total = squares.item()
        self._raw = math.sqrt(total) if total == total else math.nan
        if self.scale is None:
            return
        self._used_scale = self.scale.value
        self.overflow = not math.isfinite(total)
        self.scale.update(self.overflow)
        if self.scale.value != self._used_scale:
            self.begin(self._expected_count)

    def factor(self, correction: float) -> float:
        """Return the factor for the step's gradients; ``correction`` is the factor for the batch's terms."""
        correction /= self._used_scale
        self.norm = self._raw * correction
        if self.clip_norm is None:
            return correction
        return correction * clipping(self.norm, self.clip_norm)


def clipping(norm: float, limit: float) -> float:
    """Return the factor that reduces a gradient of this norm to at most ``limit``; NaN stays NaN."""
    ratio = limit / (norm + _EPSILON)
    return 1.0 if ratio > 1.0 else ratio


def sum_of_squares(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """Sum the squares of the gradients in fp64 on their device; infinity or NaN where an element is."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square().sum()
