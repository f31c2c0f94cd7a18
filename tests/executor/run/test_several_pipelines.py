"""Synchronous pipelines beside each other on real ranks: their losses equal a plain loop's over whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import small_jobs
import torch
from pipelines import problem_of
from rank_pool import SEED, RankPool

from penstock.executor.run.chain import Chain
from penstock.schemas.program import parse_row
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.schedules.chimera import chimera
from penstock.solvers.schedules.early_backward import early_backward

STEPS = 4


def stages(cuts: Sequence[int], devices: Sequence[tuple[int, ...]]) -> tuple[Stage, ...]:
    bounds = [0, *cuts, 6]
    return tuple(Stage(a, b - 1, group) for a, b, group in zip(bounds, bounds[1:], devices, strict=False))


def apart(problem: Problem, allocation: Allocation) -> Orders:
    return early_backward(problem, allocation)


HETPIPE = Allocation(
    (Pipeline(stages([3], [(0,), (1,)]), (0, 1)), Pipeline(stages([4, 5], [(2,), (3,), (4,)]), (2, 3))), 4
)
"""Two virtual workers that cut six layers after 3, and after 4 and 5 (HetPipe)."""
REPLICATED = Allocation((Pipeline(stages([2], [(0, 1), (2,)]), (0, 0)), Pipeline(stages([4], [(3,), (4,)]), (1, 2))), 3)
DIRECTIONS = Allocation((Pipeline(stages([3], [(0,), (1,)]), (0, 1)), Pipeline(stages([3], [(1,), (0,)]), (2, 3))), 4)
"""Chimera: down over devices 0 and 1, up over 1 and 0, so that each holds all layers."""

OVERLAPPING = Allocation((Pipeline(stages([3], [(0,), (1,)]), (0, 1)), Pipeline(stages([4], [(0,), (1,)]), (2, 3))), 4)
"""Both over devices 0 and 1, cut in different places: layers 0 to 2 are twice on one, layer 3 is on both."""
TEXTS = "0F0 0F1 2F2 2F3 0B0 0B1 2B2 2B3", "1F0 1B0 1F1 1B1 3F2 3B2 3F3 3B3"


def one_after_the_other(problem: Problem, allocation: Allocation) -> Orders:
    return Orders("by hand", tuple(Row((d,), np.asarray(parse_row(text))) for d, text in enumerate(TEXTS)))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("allocation", "schedule"),
    [
        pytest.param(HETPIPE, apart, id="hetpipe"),
        pytest.param(REPLICATED, apart, id="hetpipe-with-replicas"),
        pytest.param(DIRECTIONS, chimera, id="chimera"),
        pytest.param(OVERLAPPING, one_after_the_other, id="layers-twice-on-a-device"),
    ],
)
def test_pipelines_train_what_one_process_trains(
    pool: RankPool, allocation: Allocation, schedule: Callable[[Problem, Allocation], Orders]
) -> None:
    job = small_jobs.uneven64
    devices = {device for stage in allocation.stages for device in stage.devices}
    problem = problem_of(job, len(devices), bucket_bytes=2000)
    programs = lower(problem, allocation, schedule(problem, allocation))
    results = pool.train(programs, "uneven64", steps=STEPS)
    assert [one["kind"] for one in results] == ["done"] * len(programs), results
    assert max(one["gradient_check"] for one in results) <= 1e-8
    for one in results:
        assert one["losses"] == pytest.approx(plain_losses(), rel=1e-11)


def plain_losses() -> list[float]:
    """Train whole batches with the mean loss and the job's optimizer; only the layers are the executor's."""
    job = small_jobs.uneven64
    chain = Chain(job)
    modules = [chain.build_layer(i, SEED) for i in range(len(chain.specs))]
    optimizer = job.optimizer([p for module in modules for p in module.parameters()])
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        env, targets = job.batch(step, range(job.batch_size))
        for spec, module in zip(chain.specs, modules, strict=True):
            results = module(*[env[name] for name in spec.reads])
            env |= dict(zip(spec.writes, results if isinstance(results, tuple) else (results,), strict=True))
        total, count = job.loss({name: env[name] for name in job.outputs}, targets)
        mean: torch.Tensor = total / count
        mean.backward()
        optimizer.step()
        losses.append(float(mean.detach()))
    return losses
