"""The product's interpreter, transport over NCCL, trace, memory and profiler on simulated GPUs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import rule_jobs
import small_jobs
import torch
from pipelines import Part, periodic_programs_of, problem_of, programs_of
from rank_pool import RankPool, differences
from simulated_cuda.engine import H100, run
from simulated_cuda.entries import Awaits, Joins, Records
from simulated_cuda.ranks import Logged, log_alone, logged_at
from simulated_cuda.runtime import SimulatedCuda
from simulated_cuda.watch import Watch

from penstock.executor.profiling.peak import DevicePeak
from penstock.executor.profiling.profile_rank import Passes
from penstock.executor.profiling.share import make_shares
from penstock.executor.profiling.stopwatch import DeviceWatch, stopwatch
from penstock.executor.program.interpreter import InstructionFailed, Interpreter
from penstock.schemas.program import Program
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.schedules.chimera import chimera
from penstock.solvers.schedules.interleaved import interleaved
from penstock.solvers.schedules.zero_bubble import zb_h1

TWO = [Part(3, (0,)), Part(3, (1,))]
LOOP = [Part(2, (0,)), Part(1, (1,)), Part(1, (0,)), Part(2, (1,))]
UNEVEN = [Part(2, (0,)), Part(2, (1, 2, 3)), Part(2, (4,))]


class Case(NamedTuple):
    """Programs of all ranks, and the job that they train."""

    programs: list[Program]
    job: str


def flushed(job: str, parts: list[Part], count: int, **more: Any) -> Case:
    module, _, name = job.partition(":")
    case_job = getattr(rule_jobs if module == "rule_jobs" else small_jobs, name)
    return Case(programs_of(case_job, parts, count, transport="nccl", **more), job)


def periodic(parts: list[Part], rule: Any, batches: int = 4) -> Case:
    (programs,) = periodic_programs_of(rule_jobs.adam, parts, 3, rule, (batches,), transport="nccl")
    return Case(programs, "rule_jobs:adam")


def crossing() -> Case:
    """Build Chimera: two pipelines over the same devices in opposite directions."""
    stages = Stage(0, 2, (0,)), Stage(3, 5, (1,)), Stage(0, 2, (1,)), Stage(3, 5, (0,))
    allocation = Allocation((Pipeline(stages[:2], (0, 1)), Pipeline(stages[2:], (2, 3))), 4)
    problem = problem_of(small_jobs.plain, 2, bucket_bytes=2000)
    return Case(lower(problem, allocation, chimera(problem, allocation), transport="nccl"), "small_jobs:plain")


def other_partitions() -> Case:
    """Build HetPipe: one pipeline's only stage has the layers of two stages of the other; states are shared out."""
    stages = Stage(0, 7, (0,)), Stage(0, 4, (1, 2)), Stage(5, 7, (1, 2))
    allocation = Allocation((Pipeline(stages[:1], (0, 1)), Pipeline(stages[1:], (2, 3))), 4)
    problem = problem_of(small_jobs.residual, 3, shard_states=True)
    rows = [[(0, 0, m) for m in (0, 1)] + [(1, 0, m) for m in (0, 1)]]
    rows.append([(kind, s, m) for m in (2, 3) for kind, s in ((0, 1), (0, 2), (1, 2), (1, 1))])
    table = tuple(Row(ranks, np.asarray(row, dtype=np.int32)) for ranks, row in zip(((0,), (1, 2)), rows, strict=True))
    return Case(lower(problem, allocation, Orders("test", table), transport="nccl"), "small_jobs:residual")


def steps_apart() -> Case:
    """Build two replicas with the last gradients of two stages in different orders; states are shared out."""
    parts = [Part(2, (0, 1)), Part(2, (2,)), Part(2, (0, 1))]
    rows = ["0F0 0F1 2F0 2B0 0B0 2F1 2B1 0B1", "0F0 0F1 2F0 2B0 0B0 2F1 2I1 0B1 2W1", "1F0 1B0 1F1 1B1"]
    return flushed("small_jobs:plain", parts, 2, rows=rows, shard_states=True)


CASES = {
    "gpipe": lambda: flushed("small_jobs:plain", TWO, 4, warmup=[4, 4]),
    "1f1b": lambda: flushed("small_jobs:dropout", TWO, 4),
    "interleaved": lambda: flushed("small_jobs:plain", LOOP, 4, schedule=interleaved),
    "zero-bubble": lambda: flushed("small_jobs:plain", TWO, 4, schedule=zb_h1),
    "chimera": crossing,
    "uneven-rows": lambda: flushed("small_jobs:uneven64", UNEVEN, 4, bucket_bytes=2000),
    "round-robin": lambda: flushed("small_jobs:plain64", [Part(3, (0, 1), "round_robin"), Part(3, (2,))], 4),
    "recompute": lambda: flushed("small_jobs:dropout64", [Part(3, (0,), recompute=((1, 2),)), Part(3, (1,))], 3),
    "several-tensors": lambda: flushed("small_jobs:residual64", [Part(2, (0, 1)), Part(6, (2,))], 3),
    "shared-states": lambda: flushed("rule_jobs:adam", [Part(3, (0, 1)), Part(3, (2,))], 3, shard_states=True),
    "other-partitions": other_partitions,
    "steps-apart": steps_apart,
    "ties": lambda: flushed("rule_jobs:tied", [Part(1, (0,)), Part(len(rule_jobs.tied.layers()) - 1, (1,))], 3),
    "norm": lambda: flushed("small_jobs:plain", [Part(3, (0, 1)), Part(3, (2,))], 3, norm=True),
    "weight-stashing": lambda: periodic([Part(2, (0,)), Part(4, (1, 2))], "weight_stashing"),
    "2bw": lambda: periodic([Part(2, (0,)), Part(4, (1, 2))], "double_buffered"),
    "wpipe": lambda: periodic([Part(2, (0,)), Part(1, (1,)), Part(1, (0,)), Part(2, (1,))], "double_grouped"),
}


def trained(pool: RankPool, case: Case, directory: Path, **more: Any) -> tuple[list[dict[str, Any]], list[Logged]]:
    """Train; return the ranks' last events, and their logs."""
    batches = case.programs[0].batches
    if batches > 1:
        more |= {"segments": [0]}
    results = pool.train(case.programs, case.job, steps=batches, simulated=str(directory / "log"), **more)
    assert [one["kind"] for one in results] == ["done"] * len(results), results
    return results, logged_at(directory / "log", len(results))


def faults(logged: list[Logged]) -> list[str]:
    return [*run([one.log for one in logged]).faults, *(race for one in logged for race in one.races)]


def test_losses_stay_on_the_device_until_the_step_ends() -> None:
    """With each micro-batch the last stage's host waits once: this job's loss reads its number of terms."""
    waits = []
    for count in (3, 6):
        programs = flushed("small_jobs:plain", TWO, count).programs
        logged = log_alone(programs, small_jobs.plain, steps=2)
        waits.append([sum(isinstance(entry, Awaits) for entry in each.log) for each in logged])
    few, more = waits
    assert [b - a for a, b in zip(few, more, strict=True)] == [0, 2 * 3]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CASES)
def test_ranks_on_simulated_gpus_train_what_one_process_trains(pool: RankPool, tmp_path: Path, name: str) -> None:
    results, logged = trained(pool, CASES[name](), tmp_path)
    difference, loss = differences(results)
    assert difference <= results[0]["gradient_tolerance"]
    assert loss <= 1e-6
    assert faults(logged) == []
    assert all(any(isinstance(one, Joins) for one in each.log) for each in logged), "over simulated communicators"


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CASES)
def test_a_rank_asks_for_the_same_with_peers_and_without(pool: RankPool, tmp_path: Path, name: str) -> None:
    """What is found on logs of lone ranks holds for ranks that have peers: bytes included."""
    case = CASES[name]()
    _, with_peers = trained(pool, case, tmp_path, check=False)
    module, _, attribute = case.job.partition(":")
    job = getattr(rule_jobs if module == "rule_jobs" else small_jobs, attribute)
    batches = case.programs[0].batches
    alone = log_alone(case.programs, job, steps=batches, **({"segments": [0]} if batches > 1 else {}))
    assert alone == with_peers


@pytest.mark.tier("nightly")
def test_a_trace_is_in_the_order_of_the_devices(pool: RankPool, tmp_path: Path) -> None:
    """The simulated timer has moments of every instruction; the engine knows when the devices came to them."""
    case = CASES["uneven-rows"]()
    results, logged = trained(pool, case, tmp_path, check=False, trace_steps=1)
    assert faults(logged) == []
    done = run([one.log for one in logged]).done_ns
    ends: dict[tuple[int, str], int] = {}
    starts: dict[tuple[int, str], int] = {}
    for rank, (result, program, each) in enumerate(zip(results, case.programs, logged, strict=True)):
        (document,) = [event["rank_trace"] for event in result["events"] if event["kind"] == "trace"]
        host_ns = [moment for event in document["events"] for moment in (event["start_ns"], event["end_ns"])]
        assert host_ns == sorted(host_ns)
        place = {one.event: k for k, one in enumerate(each.log) if isinstance(one, Records)}
        moments = [done[rank][place[event]] for event in each.timed]
        names = [str(one).partition("@")[0] for one in program.instructions()]
        assert len(moments) == 2 * len(names)
        assert all(one <= other for one, other in pairwise(moments))
        for k, name in enumerate(names):
            starts[rank, name], ends[rank, name] = moments[2 * k : 2 * k + 2]
    for m in range(4):
        for replica in (1, 2, 3):
            assert ends[0, f"0F{m}"] < starts[replica, f"1F{m}"] < ends[replica, f"1F{m}"] < starts[4, f"2F{m}"]
            assert ends[4, f"2B{m}"] < starts[replica, f"1B{m}"] < ends[replica, f"1B{m}"] < starts[0, f"0B{m}"]


def test_memory_is_what_the_simulated_allocator_had(pool: RankPool, tmp_path: Path) -> None:
    """More forwards ahead, more bytes; ``DevicePeak`` sees what the rank did not hold before."""
    peaks = {}
    for ahead in (1, 6):
        case = flushed("small_jobs:plain64", TWO, 6, warmup=[ahead, 1])
        results, logged = trained(pool, case, tmp_path, check=False)
        assert [one["peak_memory_bytes"] for one in results] == [one.peak_bytes for one in logged]
        peaks[ahead] = logged[0].peak_bytes
        assert all(one.peak_bytes < one.peak_reserved_bytes for one in logged)
    assert peaks[6] > peaks[1] + 5 * 2 * small_jobs.LENGTH * small_jobs.WIDTH * 8


def test_the_profiler_runs_on_a_simulated_gpu() -> None:
    runtime = SimulatedCuda(0)
    (share,) = make_shares(small_jobs.plain, 0, 5, [2], runtime)
    with Watch(runtime.recorder):
        watch = stopwatch(runtime)
        assert isinstance(watch, DeviceWatch)
        one = Passes(share, watch).one()
    assert len(one.forward_ns) == len(one.backward_ns) == 6
    assert min(one.forward_ns) > 0
    assert runtime.recorder.ordering.races == []
    assert run([runtime.recorder.log]).faults == ()


def test_device_peak_counts_beyond_its_beginning() -> None:
    runtime = SimulatedCuda(0)
    with Watch(runtime.recorder):
        (tensor,) = runtime.moved([torch.zeros(1000)])
        peak = DevicePeak(runtime)
        more = tensor * 2
        assert peak.bytes == 4096
        del more
        tensor = tensor.repeat(100)
    assert peak.bytes == 400384
    assert peak.reserved_bytes >= peak.bytes


class Failing(SimulatedCuda):
    """A device to which copies fail."""

    def moved(self, value: Any) -> Any:
        self.recorder.fail_next("an illegal memory access was encountered")
        return super().moved(value)


@pytest.mark.parametrize(
    ("norm", "instruction"), [pytest.param(False, None, id="at-the-end"), pytest.param(True, "0WAIT_NORM0", id="norm")]
)
def test_what_fails_on_the_device_is_told_where_the_host_waits(norm: bool, instruction: str | None) -> None:
    """As CUDA tells: not by the instruction that failed, but by the first that asks the device for something."""
    programs = programs_of(small_jobs.plain, TWO, 2, norm=norm, transport="nccl")
    unrehearsed = mock.patch.object(Interpreter, "rehearse")
    with unrehearsed, pytest.raises((RuntimeError, InstructionFailed)) as caught:
        log_alone(programs, small_jobs.plain, make_runtime=lambda rank: Failing(rank, connected=False))
    error = caught.value
    assert (str(error.instruction) if isinstance(error, InstructionFailed) else None) == instruction
    assert "CUDA error: an illegal memory access" in str(error.__cause__ if norm else error)


def test_waiting_costs_what_the_peer_takes() -> None:
    """The engine's times: a message is there after it was made, and takes longer the longer it is."""
    case = flushed("small_jobs:plain", TWO, 2)
    logged = log_alone(case.programs, small_jobs.plain)
    quick = run([one.log for one in logged]).done_ns
    slow = run([one.log for one in logged], H100._replace(bytes_per_us=1)).done_ns
    assert max(slow[1]) > max(quick[1])
