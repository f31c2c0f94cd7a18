"""The calls of torch by the runtime of GPUs, recorded by a stand-in for ``torch.cuda``: no machine needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.executor.runtime import cuda as module
from penstock.executor.runtime.cuda import MESSAGE_CTAS, CudaRuntime
from penstock.executor.runtime.opening import open_device
from penstock.schemas.errors import UnsupportedRequest

GIB = 2**30
DEVICE = torch.device("cuda", 1)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver\nby downloading"
)


class Stream:
    """A stream by name; ``cuda.calls`` has the work that it is given."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: Event) -> None:
        self.cuda.calls.append(f"{self.name} waits for {event.name}")


class Event:
    """An event; it is over at once, 2 ms after the one before."""

    def __init__(self, cuda: Cuda, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.cuda, self.timed, self.blocking = cuda, enable_timing, blocking
        self.name, cuda.events = f"event {cuda.events}", cuda.events + 1

    def record(self, stream: Stream | None = None) -> None:
        where = "the current device's stream" if stream is None else stream.name
        assert self.blocking, "the host is to sleep, not to turn in a loop"
        self.cuda.calls.append(f"{self.name} in {where}{', timed' if self.timed else ''}")

    def synchronize(self) -> None:
        self.cuda.calls.append(f"the host waits for {self.name}")

    def elapsed_time(self, other: Event) -> float:
        return 2.0 * (int(other.name[6:]) - int(self.name[6:]))


class Cuda:
    """``torch.cuda`` of a process that sees two H100. ``calls``: the calls in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events = self.streams = 0
        self.capability = (9, 0)
        self.has_bf16 = True
        self.init_error: str | None = None
        self.default_generators = [torch.Generator() for _ in range(2)]

    def init(self) -> None:
        if self.init_error is not None:
            raise RuntimeError(self.init_error)

    def device_count(self) -> int:
        return 2

    def set_device(self, device: Any) -> None:
        self.calls.append(f"{device} is current")

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="3053e585", total_memory=80 * GIB)

    def current_stream(self, device: Any) -> Stream:
        return Stream(self, f"the stream of {device}")

    def Stream(self, device: Any) -> Stream:
        self.streams += 1
        return Stream(self, f"stream {self.streams} of {device}")

    def Event(self, **options: Any) -> Event:
        return Event(self, **options)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.calls.append(f"into {stream.name}")
        yield
        self.calls.append(f"out of {stream.name}")

    def synchronize(self, device: Any) -> None:
        self.calls.append(f"the host waits for {device}")

    def memory_allocated(self, device: Any) -> int:
        return 3 * GIB

    def memory_reserved(self, device: Any) -> int:
        return 5 * GIB

    def max_memory_allocated(self, device: Any) -> int:
        return 7 * GIB

    def max_memory_reserved(self, device: Any) -> int:
        return 9 * GIB

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 60 * GIB, 80 * GIB

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self.has_bf16

    def get_device_capability(self, device: Any) -> tuple[int, int]:
        return self.capability


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch, "cuda", fake)
    for name in ("CUDA_DEVICE_ORDER", *module._ENVIRONMENT, "NCCL_HOSTID"):
        monkeypatch.setenv(name, "restored afterwards")
        monkeypatch.delenv(name)
    return fake


# The right device and stream


def test_moments_are_events_in_the_stream_of_the_own_gpu(cuda: Cuda) -> None:
    """An event without a stream is recorded on the current device's, which need not be the one that computes."""
    runtime = CudaRuntime(DEVICE)
    assert cuda.calls == ["cuda:1 is current"]
    timer = runtime.timer()
    timer.mark()
    timer.mark()
    moments = timer.read_ns()
    assert cuda.calls[1:] == [
        "the host waits for cuda:1",
        "event 0 in the stream of cuda:1, timed",
        "the host waits for event 0",
        "event 1 in the stream of cuda:1, timed",
        "event 2 in the stream of cuda:1, timed",
        "the host waits for event 2",
    ], "marking does not wait"
    assert moments[1] - moments[0] == 2_000_000


def test_a_batch_is_copied_from_pinned_memory_beside_the_computation(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pinned(tensor: Tensor) -> Tensor:
        cuda.calls.append("pinned")
        return tensor

    def moved(tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        cuda.calls.append(f"to {device}{', the host goes on' if non_blocking else ''}")
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "to", moved)
    runtime = CudaRuntime(DEVICE)
    batch = runtime.moved({"x": [torch.ones(2)], "name": "a batch"})
    assert batch["name"] == "a batch"
    assert cuda.calls[1:] == [
        "into stream 1 of cuda:1",
        "pinned",
        "to cuda:1, the host goes on",
        "out of stream 1 of cuda:1",
        "event 0 in stream 1 of cuda:1",
        "the stream of cuda:1 waits for event 0",
    ]


def test_kinds_and_places_are_those_of_topologies(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime(DEVICE)
    assert (runtime.kind, runtime.gpu) == ("H100", "3053e585")
    monkeypatch.setenv("NCCL_HOSTID", "rank-1")
    assert CudaRuntime(DEVICE).gpu != runtime.gpu, "as if on another host"


def test_queues_are_those_that_cuda_was_asked_for(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CudaRuntime(DEVICE).hardware_queues == 8, "CUDA's own number"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert CudaRuntime(DEVICE).hardware_queues == 32


def test_what_the_allocator_keeps_counts_as_free_and_as_reserved(cuda: Cuda) -> None:
    memory = CudaRuntime(DEVICE).memory
    assert memory.now() == (3 * GIB, 5 * GIB)
    assert memory.peak() == (7 * GIB, 9 * GIB)
    assert memory.free_bytes() == 62 * GIB
    assert memory.total_bytes() == 80 * GIB


# Communicators


@pytest.mark.parametrize(
    ("for_messages", "ctas"), [pytest.param(True, MESSAGE_CTAS, id="edge"), pytest.param(False, None, id="group")]
)
def test_kernels_of_edges_take_few_blocks(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, for_messages: bool, ctas: int | None
) -> None:
    calls: list[Any] = []

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(min_ctas=None, max_ctas=None)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda *all_, **more: calls.append((all_, more)))
    CudaRuntime(DEVICE).new_group((0, 1), timedelta(hours=1), "edge (0, 1)", for_messages=for_messages)
    (((ranks, timeout, backend, options), more),) = calls
    assert (ranks, timeout, backend, more["device_id"]) == ([0, 1], timedelta(hours=1), "nccl", DEVICE)
    assert options._timeout == timeout, "torch warns of another"
    assert options.config.max_ctas == ctas


# Numbers


def test_bf16_that_would_be_emulated_is_refused(cuda: Cuda) -> None:
    runtime = CudaRuntime(DEVICE)
    runtime.use_precision("bf16")
    cuda.has_bf16 = False
    with pytest.raises(UnsupportedRequest, match="the H100 has no bfloat16: torch would emulate it"):
        runtime.use_precision("bf16")


@pytest.fixture
def _own_precision() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    debug = torch.get_deterministic_debug_mode()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.set_deterministic_debug_mode(debug)


@pytest.mark.usefixtures("_own_precision")
def test_tf32_is_used_where_it_is_asked_for_alone(cuda: Cuda) -> None:
    """cuDNN's convolutions use it by default."""
    runtime = CudaRuntime(DEVICE)
    for precision, used in (("fp32", False), ("tf32", True), ("bf16", False)):
        runtime.use_precision(precision)  # type: ignore[arg-type]
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is used
    cuda.capability = (7, 0)
    with pytest.raises(UnsupportedRequest, match="the H100 has no TensorFloat-32"):
        runtime.use_precision("tf32")


@pytest.mark.usefixtures("_own_precision")
def test_a_check_asks_for_kernels_that_repeat_themselves(cuda: Cuda) -> None:
    CudaRuntime(DEVICE).reproducible()
    assert torch.get_deterministic_debug_mode() == 1
    assert not torch.backends.cudnn.benchmark


def test_weights_of_recurrent_layers_are_laid_out_side_by_side(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *all_: calls.append(all_))
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", {"LSTM": 2}.get)
    runtime, lstm = CudaRuntime(DEVICE), nn.LSTM(3, 5, num_layers=2)
    assert runtime.flatten(nn.Linear(3, 5)) is None
    lay_out = runtime.flatten(lstm)
    assert lay_out is not None
    lay_out(lstm._flat_weights)
    ((weights, stride, *sizes, mode, hidden, projected, layers, batch_first, both),) = calls
    assert (len(weights), stride, sizes, hidden, projected, layers) == (8, 4, [3], 5, 0, 2)
    assert (mode, batch_first, both) == (2, False, False)


# Refusals


@pytest.mark.parametrize(
    ("built_for", "error", "words"),
    [
        pytest.param(None, None, r"is built without CUDA\n", id="a CPU build"),
        pytest.param("13.0", OLD_DRIVER, r"for CUDA 13.0 cannot start: The NVIDIA driver .* too old", id="old driver"),
        pytest.param("13.0", "No CUDA GPUs are available", r"for CUDA 13.0 cannot start: No CUDA GPUs", id="no GPU"),
    ],
)
def test_why_there_is_no_gpu_is_one_sentence(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, built_for: str | None, error: str | None, words: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    cuda.init_error = error
    with pytest.raises(UnsupportedRequest, match=rf"^device 'cuda:0': torch \S+ {words}") as caught:
        open_device("cuda:0")
    assert caught.value.detail.count("\n") == 0
    assert "by downloading" not in caught.value.detail, "the first line of torch's words"


def test_a_number_that_is_not_there(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert open_device("cuda:1").kind == "H100"
    with pytest.raises(UnsupportedRequest, match="'cuda:2': this process sees 2 GPUs, numbered from 0"):
        open_device("cuda:2")
