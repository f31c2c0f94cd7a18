"""What a rank does differently on a GPU: opening the device, random state, inputs.

Everything else is the same: computation is queued on the device's current stream, and the host waits for the device
where it reads a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.executor.devices import number_by_bus
from penstock.schemas.errors import UnsupportedRequest


def open_device(name: str) -> torch.device:
    """The device of this rank, made current. Raises UnsupportedRequest saying why it cannot be used."""
    number_by_bus()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnsupportedRequest(f"torch has no device {name!r}: {error}", remedy="cpu, or cuda:0") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UnsupportedRequest(f"device {name!r}: ranks run on CPUs and on CUDA GPUs", remedy="cpu, or cuda:0")
    why = why_no_gpu()
    if why is not None:
        raise UnsupportedRequest(f"device {name!r}: {why}", remedy="offer CPU devices, or see docs/gpu.md")
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        raise UnsupportedRequest(
            f"device {name!r}: this process sees {torch.cuda.device_count()} GPUs, numbered from 0",
            remedy="a smaller number, or another CUDA_VISIBLE_DEVICES",
        )
    torch.cuda.set_device(device)
    return device


def why_no_gpu() -> str | None:
    """Why no GPU can be used here; None where one can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU, or no driver for CUDA {torch.version.cuda}"
    return None


def reseeder(device: torch.device) -> Callable[[int], object]:
    """What sets every random state that a layer on ``device`` may draw from."""
    host = torch.default_generator.manual_seed
    if device.type != "cuda":
        return host
    on_gpu = torch.cuda.default_generators[device.index].manual_seed

    def reseed(seed: int) -> None:
        host(seed)
        on_gpu(seed)

    return reseed


def random_state(device: torch.device) -> Tensor:
    """The states that ``reseeder`` sets, as one tensor to compare."""
    host = torch.default_generator.get_state()
    return host if device.type != "cuda" else torch.cat((host, torch.cuda.get_rng_state(device)))


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``: tensors, and tuples, lists and mappings of them; the rest as it is."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: moved(one, device) for key, one in value.items()}
    if isinstance(value, list):
        return [moved(one, device) for one in value]
    if isinstance(value, tuple):
        parts = [moved(one, device) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
