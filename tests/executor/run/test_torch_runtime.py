"""PyTorch's own runtime as an oracle: a plan's order, exported as CSV, trains the same numbers there as here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import small_jobs
from forked import Forked, ForkedProcesses
from pipelines import problem_of
from torch._C._distributed_c10d import TCPStore

from penstock.convert.torch_csv import to_csv
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.interleaved import interleaved, looped_bfs
from penstock.solvers.schedules.v_shape import v_half, zb_v
from penstock.solvers.schedules.zero_bubble import zb_h1

LAYERS = 6


@pytest.fixture(scope="module")
def workers(forked_processes: ForkedProcesses) -> Iterator[list[Forked]]:
    started = [forked_processes.start("torch_runtime_worker") for _ in range(3)]
    yield started
    for worker in started:
        worker.kill()


def looped(devices: int, chunks: int) -> Allocation:
    """Put stage s on device s mod D: Megatron's interleaving."""
    count = devices * chunks
    return stages_on([s % devices for s in range(count)])


def v_shaped(devices: int) -> Allocation:
    """Put stages d and 2 D - 1 - d on device d, down and back up."""
    return stages_on([*range(devices), *reversed(range(devices))])


def stages_on(devices: list[int]) -> Allocation:
    count = len(devices)
    bounds = [LAYERS * s // count for s in range(count + 1)]
    return single_pipeline(tuple(Stage(bounds[s], bounds[s + 1] - 1, (devices[s],)) for s in range(count)), 6)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("schedule", "allocation"),
    [
        pytest.param(early_backward, stages_on([0, 1, 2]), id="1F1B"),
        pytest.param(gpipe, stages_on([0, 1]), id="GPipe"),
        pytest.param(interleaved, looped(2, 2), id="Interleaved1F1B"),
        pytest.param(interleaved, looped(3, 2), id="Interleaved1F1B-three-ranks"),
        pytest.param(looped_bfs, looped(2, 3), id="LoopedBFS"),
        pytest.param(zb_h1, stages_on([0, 1, 2]), id="ZB-H1"),
        pytest.param(zb_v, v_shaped(2), id="ZBV"),
        pytest.param(zb_v, v_shaped(3), id="ZBV-three-ranks"),
        pytest.param(v_half, v_shaped(2), id="V-half"),
    ],
)
def test_losses_and_gradients_are_those_of_pytorch_s_runtime(
    workers: list[Forked],
    tmp_path: Path,
    schedule: Callable[[Problem, Allocation], Orders],
    allocation: Allocation,
) -> None:
    """Every loss and every gradient, 0.0 apart."""
    devices = len({d for stage in allocation.stages for d in stage.devices})
    problem = problem_of(small_jobs.plain, devices)
    orders = schedule(problem, allocation)
    csv = tmp_path / "schedule.csv"
    csv.write_text(to_csv(allocation, orders))
    programs = lower(problem, allocation, orders)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for program, worker in zip(programs, workers, strict=False):
        request = {
            "rank": program.rank,
            "world_size": devices,
            "store": f"127.0.0.1:{store.port}",
            "prefix": "run",
            "program": program.to_json(),
            "csv": str(csv),
            "stages": [(stage.first, stage.last) for stage in allocation.stages],
            "job": "plain",
        }
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
    answers = [json.loads(worker.stdout.readline()) for worker in workers[:devices]]
    assert [one["apart"] for one in answers] == [0.0] * devices
    assert sum(one["compared"] for one in answers) == 6 * LAYERS
    assert {one["torch"] for one in answers} - {None} == {answers[0]["own"]}
    assert len({one["own"] for one in answers}) == 1
