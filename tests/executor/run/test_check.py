"""The tolerance of a run against the reference, and the device of the reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import rule_jobs
import small_jobs
import torch
from assigned import assigned

from penstock.executor.run import rank_main as rank_module
from penstock.executor.run.chain import Chain
from penstock.executor.run.check import (
    _COPIES,
    ACROSS,
    ON_GPUS,
    TOLERANCE,
    _fits,
    _Reference,
    _tolerance,
    _Whole,
    worse,
)
from penstock.executor.run.plain_training import Recipe
from penstock.executor.run.rank_main import Rank
from penstock.executor.runtime.cpu import CPU
from penstock.executor.stage.precision import FULL, Training
from penstock.executor.transport import GlooTransport
from penstock.schemas.errors import UnsupportedRequest

NARROW, WIDE = TOLERANCE[torch.float32], TOLERANCE[torch.float64]
BF16 = 64 * torch.finfo(torch.bfloat16).eps


def run_of(job: Any, *, gpu: str | None, free_bytes: int = 0, training: Training = FULL) -> Any:
    """Return the parts of an interpreter that the check uses, on a CPU or on a device that it takes for a GPU."""
    device = torch.device("cpu" if gpu is None else "cuda")
    runtime = SimpleNamespace(gpu=gpu, device=device, memory=SimpleNamespace(free_bytes=lambda: free_bytes))
    return SimpleNamespace(runtime=runtime, chain=Chain(job), training=training, seed=1, expected_count=60.0)


@pytest.mark.parametrize(
    ("job", "precision", "gpu", "fits", "expected"),
    [
        pytest.param(small_jobs.plain, "fp32", None, True, NARROW, id="a CPU"),
        pytest.param(small_jobs.plain, "fp32", "GPU-a", True, ON_GPUS * NARROW, id="a GPU"),
        pytest.param(small_jobs.plain, "fp32", "GPU-a", False, ACROSS * NARROW, id="a GPU against a CPU"),
        pytest.param(small_jobs.plain64, "fp32", None, True, WIDE, id="fp64"),
        pytest.param(small_jobs.plain64, "fp32", "GPU-a", False, ACROSS * WIDE, id="fp64 against a CPU"),
        pytest.param(small_jobs.plain, "bf16", None, True, BF16, id="bf16"),
        pytest.param(small_jobs.plain, "bf16", "GPU-a", True, ON_GPUS * BF16, id="bf16 on a GPU"),
        pytest.param(small_jobs.plain, "tf32", "GPU-a", True, 64 * 2.0**-11, id="tf32"),
    ],
)
def test_tolerances(job: Any, precision: Any, gpu: str | None, fits: bool, expected: float) -> None:
    assert (ON_GPUS, ACROSS) == (10, 100)
    assert _tolerance(run_of(job, gpu=gpu, training=Training(precision)), fits) == pytest.approx(expected)


class _KernelRequest(Exception):
    """The device was asked for kernels that repeat themselves."""


@pytest.mark.parametrize("check", [True, False])
def test_a_rank_that_is_compared_asks_for_kernels_that_repeat_themselves(
    monkeypatch: pytest.MonkeyPatch, check: bool
) -> None:
    def request() -> None:
        raise _KernelRequest

    runtime = SimpleNamespace(use_precision=lambda precision: None, reproducible=request)
    monkeypatch.setattr(rank_module, "open_device", lambda name: runtime)
    monkeypatch.setattr(rank_module, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    rank = Rank(assigned(check=check), lambda event: None, lambda error: None)
    with pytest.raises(_KernelRequest if check else IndexError):
        rank.run()


@pytest.mark.parametrize(
    ("first", "later", "shares", "expected"),
    [
        pytest.param(2e-6, 3e-6, True, (2e-6, 1e-6), id="before any update rounding is all that ranks may add"),
        pytest.param(1e-7, 3e-6, True, (3e-6, 1e-5), id="after one it is enlarged"),
        pytest.param(1e-7, 2e-5, True, (2e-5, 1e-5), id="not beyond all bounds"),
        pytest.param(1e-7, 3e-6, False, (3e-6, 1e-6), id="ranks that share nothing add in the same order"),
        pytest.param(0.0, 0.0, True, (0.0, 1e-6), id="nothing differs"),
    ],
)
def test_later_updates_may_differ_more_where_ranks_share_layers(
    first: float, later: float, shares: bool, expected: tuple[float, float]
) -> None:
    assert worse(first, later, 1e-6, shares=shares) == pytest.approx(expected)


def test_the_reference_fits_where_memory_is_left_for_its_copies(transport: GlooTransport) -> None:
    chain = Chain(small_jobs.plain)
    modules = chain.build_layers(range(6), device="meta")
    needed = _COPIES * sum(parameter.nbytes for _, parameter in chain.named_parameters(modules))
    assert _fits(run_of(small_jobs.plain, gpu="GPU-a", free_bytes=needed))
    assert not _fits(run_of(small_jobs.plain, gpu="GPU-a", free_bytes=needed - 1))
    assert _fits(run_of(small_jobs.plain, gpu=None)), "a CPU is taken to have room"


@pytest.mark.parametrize(("job", "drawing"), [(rule_jobs.dropped, True), (rule_jobs.sgd, False)])
def test_a_model_that_draws_cannot_be_compared_across_devices(job: Any, drawing: bool) -> None:
    """Dropout on a CPU leaves out other numbers than on a GPU."""
    whole = _Whole(Recipe("synchronous", ((0, 5),), ((4, 3),)), {}, {})
    reference = _Reference(run_of(job, gpu="GPU-a"), whole, 1, CPU)
    if not drawing:
        reference.train()
        assert len(reference.losses) == 1
        return
    words = "does not fit on rank 0's GPU besides its stage, and layer 'block.0' draws other random numbers on the CPU"
    with pytest.raises(UnsupportedRequest, match=words) as caught:
        reference.train()
    assert caught.value.remedy == "check with a smaller model, or without dropout"


def test_ranks_on_a_cpu_compare_models_that_draw() -> None:
    whole = _Whole(Recipe("synchronous", ((0, 5),), ((4, 3),)), {}, {})
    reference = _Reference(run_of(rule_jobs.dropped, gpu=None), whole, 1, CPU)
    reference.train()
    assert len(reference.losses) == 1
