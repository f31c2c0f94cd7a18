"""What layers cost beside their time: against counts by hand, and against the allocator of one whole pass."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from penstock.examples.synthetic import ImageJob
from penstock.executor.job import Job, LayerSpec, load_job
from penstock.executor.profiling.layer_costs import stash_bytes, update_times_ns, weight_shares, workspace_bytes
from penstock.executor.profiling.memory_use import MemoryWatch, held_bytes
from penstock.executor.profiling.profile_rank import MIN_BLOCKS, Passes, _Pass, repeat
from penstock.executor.profiling.profiler import MEASURED_EXPECTED_ERROR, expected_error
from penstock.executor.profiling.share import make_share
from penstock.executor.profiling.stopwatch import Stopwatch
from penstock.executor.stage.precision import Training

CPU = torch.device("cpu")
WIDTH = 192
SAMPLES = 64
WIDE_BYTES = 4 * SAMPLES * WIDTH


class Detour(nn.Module):
    """Makes three tensors at once that nothing keeps, and adds nothing to its input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            apart = [torch.zeros_like(x) for _ in range(3)]
            total = apart[0].add_(apart[1]).add_(apart[2])
        return x + total.sum()


def job(*layers: tuple[str, object]) -> Job:
    specs = [LayerSpec("flat", nn.Flatten), *[LayerSpec(name, build) for name, build in layers]]  # type: ignore[arg-type]
    return ImageJob("costs", lambda: specs, batch_size=SAMPLES, side=8, classes=WIDTH)


def test_workspace_is_what_neither_stash_nor_result_explains() -> None:
    share = make_share(
        job(("fc", partial(nn.Linear, WIDTH, WIDTH)), ("detour", Detour), ("relu", nn.ReLU)), 0, 2, SAMPLES, CPU
    )
    stash = stash_bytes(share)
    flat, fc, detour = workspace_bytes(share, stash)
    assert flat == 0
    assert detour == pytest.approx(3 * WIDE_BYTES, rel=0.05)
    assert fc >= 4 * WIDTH * WIDTH, "its weight gradient, before it is added"


def test_the_weight_half_of_a_backward() -> None:
    share = make_share(
        job(("tanh", nn.Tanh), ("fc", partial(nn.Linear, WIDTH, WIDTH)), ("head", partial(nn.Linear, WIDTH, WIDTH))),
        0,
        3,
        SAMPLES,
        CPU,
    )
    flat, tanh, fc, _ = weight_shares(share, Stopwatch(CPU))
    assert flat == tanh == 0
    assert fc > 0.5, "its input needs no gradient, so nearly all is weight"
    embedding = make_share(load_job("examples.gpt:tiny"), 0, 1, 2, CPU)
    assert all(0 < part <= 1 for part in weight_shares(embedding, Stopwatch(CPU)))


def test_growth_is_counted_to_the_byte() -> None:
    kept: list[Tensor] = []
    with MemoryWatch(CPU) as watch:
        with watch.stretch("temporary"):
            torch.zeros(1000)
        with watch.stretch("kept"):
            kept.append(torch.zeros(1000) + torch.zeros(1000))
        with watch.stretch("nothing"):
            pass
    assert watch.growth("temporary") == (4000 + 32, 0) or watch.growth("temporary") == (4000, 0)
    peak, left = watch.growth("kept")
    assert peak >= 3 * 4000 - 4000
    assert left == held_bytes(kept) == 4000
    assert watch.growth("nothing") == (0, 0)


def test_lower_precision_runs_as_a_rank_does() -> None:
    tiny = load_job("examples.gpt:tiny")
    full, low = (make_share(tiny, 1, 4, 2, CPU, Training(one)) for one in ("fp32", "bf16"))  # type: ignore[arg-type]
    assert {tensor.dtype for tensor in full.env.values() if tensor.requires_grad} == {torch.float32}
    with torch.no_grad():
        _, wide = full.forward(lambda i, results: None), stash_bytes(full)
    assert sum(stash_bytes(low)) != sum(wide)
    assert all(time_ns >= 1 for time_ns in update_times_ns(low, tiny, Stopwatch(CPU)))


def test_passes_are_repeated_until_their_blocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: moment)

    def after(times_ns: list[int]) -> Passes:
        nonlocal moment
        passes = Passes()
        for one in times_ns:
            moment += 0.3
            passes.add(_Pass([one], [0]))
        return passes

    assert not after([100] * (MIN_BLOCKS - 1)).steady
    assert after([100] * MIN_BLOCKS).steady
    growing = after([100 + 10 * k for k in range(MIN_BLOCKS)])
    assert not growing.steady
    assert growing.spread == pytest.approx(20 / (80 + 10 * MIN_BLOCKS - 10))
    fast_at_first = after([50] * MIN_BLOCKS + [100] * 3)
    assert fast_at_first.steady
    assert [one.forward_ns for one in fast_at_first.kept()] == [[100]] * 3


def test_unsteady_measurements_state_a_larger_error() -> None:
    assert expected_error(0.0) == expected_error(0.03) == MEASURED_EXPECTED_ERROR
    assert expected_error(0.5) == pytest.approx(MEASURED_EXPECTED_ERROR + 0.47)
    assert expected_error(1.0) == 1.0


def test_a_share_is_repeated_as_often_as_wanted() -> None:
    share = make_share(load_job("examples.gpt:tiny"), 4, 5, 2, CPU)
    passes = repeat(share, Stopwatch(CPU), lambda passes: passes.count < 3)
    assert passes.count == 3
    assert all(len(one.forward_ns) == len(one.backward_ns) == 2 for one in passes.kept())
