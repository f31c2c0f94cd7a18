"""The opening of a rank's device, with a sentence that says why it cannot be used."""

from __future__ import annotations

import torch

from penstock.executor.runtime.cpu import CpuRuntime
from penstock.executor.runtime.cuda import CudaRuntime, gpu_count, set_environment, why_no_gpu
from penstock.executor.runtime.interface import Runtime
from penstock.schemas.errors import UnsupportedRequest


def open_device(name: str) -> Runtime:
    """Return the device called ``name`` (``cpu``, ``cuda:0``), current in this process.

    Raises UnsupportedRequest with the reason why it cannot be used.
    """
    set_environment()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UnsupportedRequest(f"torch has no device {name!r}: {error}", remedy="cpu, or cuda:0") from None
    if device.type == "cpu":
        return CpuRuntime()
    if device.type != "cuda":
        raise UnsupportedRequest(f"device {name!r}: ranks run on CPUs and on CUDA GPUs", remedy="cpu, or cuda:0")
    why = why_no_gpu()
    if why is not None:
        raise UnsupportedRequest(f"device {name!r}: {why}", remedy="offer CPU devices, or see docs/running.md")
    device = torch.device("cuda", device.index or 0)
    if device.index >= gpu_count():
        raise UnsupportedRequest(
            f"device {name!r}: this process sees {gpu_count()} GPUs, numbered from 0",
            remedy="a smaller number, or another CUDA_VISIBLE_DEVICES",
        )
    return CudaRuntime(device)
