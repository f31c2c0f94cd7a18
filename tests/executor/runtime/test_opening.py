"""Opening devices: refusals in words, the environment that CUDA reads, and a CPU behind the same interface."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest
import torch

from penstock.executor.runtime import cuda, opening, process_memory
from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.cuda import QUEUES, set_environment
from penstock.executor.runtime.opening import open_device
from penstock.executor.runtime.process_memory import present_bytes, reset_peak_bytes
from penstock.schemas.errors import UnsupportedRequest

MIB = 2**20


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``open_device`` sets variables of this process, which other tests should not see."""
    for name in ("CUDA_DEVICE_ORDER", *cuda._ENVIRONMENT):
        monkeypatch.setenv(name, "restored afterwards")
        monkeypatch.delenv(name)


# Refusals


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("mps", "device 'mps': ranks run on CPUs and on CUDA GPUs", id="of another maker"),
        pytest.param("meta", "device 'meta': ranks run on CPUs and on CUDA GPUs", id="of no maker"),
        pytest.param("gpu:0", "torch has no device 'gpu:0': ", id="unknown to torch"),
    ],
)
def test_devices_that_ranks_cannot_use(name: str, words: str) -> None:
    with pytest.raises(UnsupportedRequest) as caught:
        open_device(name)
    assert str(caught.value).startswith(words)
    assert caught.value.remedy == "cpu, or cuda:0"


def test_a_gpu_that_no_process_has_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "why_no_gpu", lambda: "torch sees no GPU")
    with pytest.raises(UnsupportedRequest, match=r"^device 'cuda:99': torch sees no GPU\n") as caught:
        open_device("cuda:99")
    assert caught.value.remedy == "offer CPU devices, or see docs/running.md"


def test_a_number_beyond_the_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "why_no_gpu", lambda: None)
    monkeypatch.setattr(opening, "gpu_count", lambda: 2)
    with pytest.raises(UnsupportedRequest, match="'cuda:99': this process sees 2 GPUs, numbered from 0"):
        open_device("cuda:99")


def test_a_cpu_has_no_tensor_float_32() -> None:
    runtime = open_device("cpu")
    with pytest.raises(UnsupportedRequest, match="TensorFloat-32 is a precision of GPUs, not of CPUs") as caught:
        runtime.use_precision("tf32")
    assert caught.value.remedy == "precision fp32"
    for precision in ("fp32", "bf16", "fp16"):
        runtime.use_precision(precision)


# Environment


def test_the_environment_is_set_where_nothing_is_said() -> None:
    environ: dict[str, str] = {}
    set_environment(environ)
    assert environ == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_DEVICE_MAX_CONNECTIONS": str(QUEUES),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    }


@pytest.mark.parametrize("name", ["CUDA_DEVICE_ORDER", *cuda._ENVIRONMENT])
def test_what_the_operator_set_stays(name: str) -> None:
    environ = {name: "the operator's"}
    set_environment(environ)
    assert environ[name] == "the operator's"


def test_the_allocator_s_newer_name_counts_too() -> None:
    environ = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    set_environment(environ)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environ


def test_opening_any_device_sets_this_process_s_environment() -> None:
    open_device("cpu")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == str(QUEUES)


# A CPU


@pytest.mark.tier("quick")
def test_a_timer_has_the_host_s_moments() -> None:
    timer, before = CPU.timer(), time.perf_counter_ns()
    timer.mark()
    timer.mark()
    first, second = timer.read_ns()
    assert before <= first <= second <= time.perf_counter_ns()


def test_what_a_cpu_was_given_has_happened() -> None:
    stream, tensor = CPU.stream(), torch.arange(3)
    host = CPU.host_buffer(tensor)
    event = CPU.download(tensor, host)
    stream.wait(event)
    event.synchronize()
    assert event.is_over()
    assert torch.equal(host, tensor)
    CPU.upload(host + 1, tensor)
    assert tensor.tolist() == [1, 2, 3]
    batch = {"x": [tensor]}
    assert CPU.moved(batch) is batch


@pytest.mark.tier("quick")
def test_a_peak_outlives_what_it_was_of() -> None:
    """Pages of their own, since an allocator would give out freed ones; a quarter is room for counts that come late."""
    start = CPU.memory.reset_peak()
    with mmap.mmap(-1, 64 * MIB) as pages:
        pages.write(b"1" * len(pages))
        assert CPU.memory.now().active - start.active > 48 * MIB
    assert CPU.memory.peak().active - start.active > 48 * MIB
    again = CPU.memory.reset_peak()
    assert again.active == again.reserved < start.active + 16 * MIB
    assert CPU.memory.peak().active - again.active < 16 * MIB, "counted from where it was asked to"


@pytest.mark.tier("quick")
def test_a_machine_has_memory_left() -> None:
    assert CPU.memory.free_bytes() > 0
    assert CPU.memory.total_bytes() > 0


@pytest.mark.tier("quick")
def test_without_the_kernel_s_leave_the_peak_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "_CLEAR", tmp_path)  # a folder cannot be written to
    with mmap.mmap(-1, 64 * MIB) as freed:
        freed.write(b"1" * len(freed))
    assert reset_peak_bytes() > present_bytes() + 48 * MIB
