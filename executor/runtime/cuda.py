"""An NVIDIA GPU as a device, by torch.cuda and NCCL.

Figures are measured on an H100 80GB HBM3 (driver 580.159, torch 2.11, NCCL 2.28): benchmarks/RESULTS.md.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from penstock.executor.devices import device_kind, number_by_bus
from penstock.executor.runtime.interface import MemoryUse, Precision, Stream
from penstock.executor.runtime.nested import on_tensors
from penstock.schemas.errors import UnsupportedRequest

QUEUES = 32
"""Streams that progress concurrently: the most that CUDA allows, and the number that torch creates."""
MESSAGE_CTAS = 2
"""Blocks of a kernel that carries a message. A posted receive occupies them until its sender comes. With NCCL's default
a
communicator of two ranks takes 48 MiB of each GPU, with this number 17."""

_FIRST_WITH_TF32 = (8, 0)

_ENVIRONMENT = {
    # A receive that waits for its sender blocks all streams of its queue (8 queues by default).
    "CUDA_DEVICE_MAX_CONNECTIONS": str(QUEUES),
    # cuBLAS adds in one order only with a separate workspace for each stream.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Blocks that a stream may still read then do not split the memory that others need.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Ranks watch their peers themselves, and name the silent ones; NCCL's watchdog would abort the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Each directed edge has a separate communicator, which is what this warning asks for.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}


def set_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that CUDA and NCCL read when they start, unless the environment has them."""
    number_by_bus(environ)
    for name, value in _ENVIRONMENT.items():
        if name == "PYTORCH_CUDA_ALLOC_CONF" and "PYTORCH_ALLOC_CONF" in environ:
            continue
        environ.setdefault(name, value)


def why_no_gpu() -> str | None:
    """Return why no GPU can be used here, in torch's words where it has some; None where one can be used."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, one that is too old, or no GPU: torch says which
        return f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot start: {error}".splitlines()[0]
    return None if torch.cuda.device_count() else f"torch {torch.__version__} sees no GPU"


def gpu_count() -> int:
    """Return how many GPUs this process sees; 0 where none can be used."""
    return 0 if why_no_gpu() else torch.cuda.device_count()


def nccl_version() -> str | None:
    """Return NCCL's version; None where torch is built without it."""
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None


class CudaEvent:
    """A point in a stream. The host sleeps until it is reached, instead of polling."""

    def __init__(self, stream: torch.cuda.Stream, *, timed: bool = False) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=timed, blocking=True)
        self.event.record(stream)

    def is_over(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A stream of a GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record(self) -> CudaEvent:
        return CudaEvent(self.stream)

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.record().synchronize()


class CudaTimer:
    """Events in the compute stream; the first one is placed on the host's clock."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._stream = runtime.compute.stream
        runtime.synchronize()
        self._first = CudaEvent(self._stream, timed=True)
        self._first.synchronize()
        self._first_ns = time.perf_counter_ns()
        self._events: list[CudaEvent] = []

    def mark(self) -> None:
        self._events.append(CudaEvent(self._stream, timed=True))

    def read_ns(self) -> list[int]:
        if not self._events:
            return []
        self._events[-1].synchronize()
        first = self._first.event
        return [self._first_ns + round(float(first.elapsed_time(one.event)) * 1e6) for one in self._events]


class CudaMemory:
    """The memory of a GPU as torch's allocator counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset_peak(self) -> MemoryUse:
        torch.cuda.reset_peak_memory_stats(self._device)
        return self.now()

    def now(self) -> MemoryUse:
        return MemoryUse(torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device))

    def peak(self) -> MemoryUse:
        return MemoryUse(torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device))

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        now = self.now()
        return int(free) + now.reserved - now.active

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).total_memory)


class CudaRuntime:
    """A GPU, made current in this process; see `Runtime`.

    NCCL refuses two ranks on one GPU of one host. Where NCCL_HOSTID claims that they are on different hosts, it sends
    over its sockets: slow, but with all of its code, for tests on a single GPU.
    """

    direct: str | None = "nccl"

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        host = os.environ.get("NCCL_HOSTID")
        self.gpu: str | None = str(properties.uuid) if host is None else f"{properties.uuid} of {host}"
        self.model = str(properties.name)
        self.kind = device_kind(self.model)
        self.hardware_queues = min(QUEUES, int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")))
        self.compute = CudaStream(torch.cuda.current_stream(device))
        self.memory = CudaMemory(device)
        self._copies = CudaStream(torch.cuda.Stream(device))
        self._generator = torch.cuda.default_generators[device.index]

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self._generator.manual_seed(seed)

    def random_state(self) -> Tensor:
        return torch.cat((torch.default_generator.get_state(), torch.cuda.get_rng_state(self.device)))

    def stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.device))

    def inside(self, stream: Stream) -> AbstractContextManager[Any]:
        assert isinstance(stream, CudaStream)
        return torch.cuda.stream(stream.stream)

    def timer(self) -> CudaTimer:
        return CudaTimer(self)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def download(self, tensor: Tensor, host: Tensor) -> CudaEvent:
        self._copies.wait(self.compute.record())
        with self.inside(self._copies):
            host.copy_(tensor, non_blocking=True)
        self.keep(tensor, self._copies)
        return self._copies.record()

    def upload(self, host: Tensor, tensor: Tensor) -> None:
        with self.inside(self.compute):
            tensor.copy_(host, non_blocking=True)

    def moved(self, value: Any) -> Any:
        with self.inside(self._copies):
            result = on_tensors(self._started, value)
        self.compute.wait(self._copies.record())
        return result

    def _started(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor to the GPU, through memory from which the GPU can read by itself; return the copy."""
        if tensor.is_cuda:
            return tensor
        copy = tensor.pin_memory().to(self.device, non_blocking=True)
        self.keep(copy, self.compute)
        return copy

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        if tensor.is_cuda:
            tensor.record_stream(stream.stream)

    def new_group(self, ranks: Sequence[int], timeout: timedelta, name: str, *, for_messages: bool) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # torch warns where it differs from the group's
        if for_messages:
            options.config.min_ctas = 1
            options.config.max_ctas = MESSAGE_CTAS
        group: Any = dist.new_group(list(ranks), timeout, "nccl", options, group_desc=name, device_id=self.device)
        return None if group is dist.GroupMember.NON_GROUP_MEMBER else group

    def use_precision(self, precision: Precision) -> None:
        if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise UnsupportedRequest(
                f"the {self.kind} has no bfloat16: torch would emulate it", remedy="run with precision fp16 or fp32"
            )
        if precision == "tf32" and torch.cuda.get_device_capability(self.device) < _FIRST_WITH_TF32:
            raise UnsupportedRequest(f"the {self.kind} has no TensorFloat-32", remedy="run with precision fp32 or fp16")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"

    def reproducible(self) -> None:
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms also loads the compiler, for seconds
        torch.backends.cudnn.benchmark = False

    def prepare(self, optimizer: Optimizer) -> None:
        if inspect.unwrap(type(optimizer).step) not in _STEPS:
            return
        for group in optimizer.param_groups:
            is_open = group.get("fused") is None and group.get("foreach") is None
            if is_open and not group.get("differentiable") and all(p.is_floating_point() for p in group["params"]):
                group["fused"] = True

    def flatten(self, module: nn.Module) -> Callable[[Sequence[Tensor]], None] | None:
        if not isinstance(module, nn.RNNBase) or not module._flat_weights:
            return None
        mode = torch.backends.cudnn.rnn.get_cudnn_mode(module.mode)
        sizes = (module.input_size, mode, module.hidden_size, module.proj_size, module.num_layers)
        stride = 4 if module.bias else 2

        def lay_out(weights: Sequence[Tensor]) -> None:
            with torch.no_grad():
                torch._cudnn_rnn_flatten_weight(list(weights), stride, *sizes, module.batch_first, module.bidirectional)

        return lay_out


_STEPS = {inspect.unwrap(optimizer.step) for optimizer in (Adam, AdamW, SGD)}
"""The steps of torch's optimizers that have a fused form; a subclass that overrides its step is left alone.

Torch wraps the step of a class when its first object is created.
"""
