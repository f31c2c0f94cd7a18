"""Sweeps without a service: cases, the table, local processes and a Dask cluster whose solvers can be ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor
from pathlib import Path
from typing import Any

import psutil
import pytest
from repository import ROOT

from penstock.examples.tiny import tiny_request
from penstock.planning.pareto import front
from penstock.planning.sweep import cases
from penstock.questions.by_name import sweep
from penstock.schemas.api.sweep import SweepRequest, SweepRow
from penstock.schemas.errors import InvalidDocument, Unreachable
from penstock.schemas.request import PlanRequest
from penstock.workers.executors import executor_of
from penstock.workers.solving import SolveLimits, solve_case

ENTRIES = ROOT / "tests/service"
HANG, HANG_WITHOUT_PLAN, HANG_FIRST_TIME = 1, 2, 3
PATIENCE_S = 60


def request(**over: Any) -> SweepRequest:
    return SweepRequest.parse({"request": tiny_request(), "over": over})


def test_cases_are_the_product_and_what_is_not_varied_stays():
    combinations = cases(request(planners=["dp", "gpipe"], update_rules=["synchronous", "weight_stashing"]))
    shown = [(one.request.planner, one.request.update_rules, one.request.global_batch_size) for one in combinations]
    assert shown == [
        ("dp", ("synchronous",), 16),
        ("dp", ("weight_stashing",), 16),
        ("gpipe", ("synchronous",), 16),
        ("gpipe", ("weight_stashing",), 16),
    ]
    assert [one.request for one in cases(request())] == [request().request]


def test_too_many_cases_are_counted_and_a_contradiction_is_named():
    with pytest.raises(InvalidDocument, match=r"has 6 cases \(3 global_batch_size × 2 planner\); the limit is 5"):
        cases(request(global_batch_sizes=[8, 16, 32], planners=["dp", "gpipe"]), max_cases=5)
    with pytest.raises(InvalidDocument) as caught:
        request(planners=["dp", "dp"])
    assert "occurs twice" in caught.value.faults[0].detail
    narrow = SweepRequest.parse(
        {"request": tiny_request() | {"micro_batch_sizes": [16]}, "over": {"global_batch_sizes": [8, 16]}}
    )
    with pytest.raises(
        InvalidDocument, match=r"the case \{'global_batch_size': 8\} is not a valid plan request"
    ) as caught:
        cases(narrow)
    assert "exceed the global batch of 8" in caught.value.faults[0].detail


@pytest.fixture(scope="module")
def pids(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file to which misbehaving solvers write the ids of their processes."""
    path = tmp_path_factory.mktemp("solvers") / "pids"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIDS_FILE", str(path))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ENTRIES), os.environ.get("PYTHONPATH", "")])))
        yield path


class Cluster:
    """A Dask scheduler and its workers, each in a separate process; the scheduler writes its address to a file."""

    def __init__(self, file: Path) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        place = ("--host", "127.0.0.1", "--scheduler-file", str(file))
        self._run("dask_scheduler", *place, "--port", "0", "--no-show")
        self.workers = [self._run("dask_worker", *place, "--no-nanny", "--nthreads", "1") for _ in range(2)]
        wait_for(lambda: file.exists() and file.stat().st_size)
        self.address = json.loads(file.read_text())["address"].removeprefix("tcp://")

    def _run(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.{module}", "--no-dashboard", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._started.append(process)
        return process

    def stop(self) -> None:
        """End all of it."""
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(pids: Path) -> Iterator[Cluster]:
    cluster = Cluster(pids.with_name("scheduler.json"))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module", params=["local", "dask"])
def executor(request: pytest.FixtureRequest, pids: Path) -> Iterator[Executor]:
    """Each kind of executor, with two processes."""
    address = "local:2"
    if request.param == "dask":
        address = f"dask://{request.getfixturevalue('cluster').address}"
    with executor_of(address) as pool:
        yield pool


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def ask(executor: Executor, seed: int, **more: Any) -> Any:
    limits = SolveLimits(entry="solver_entries:entry", **more)
    request = PlanRequest.parse(tiny_request() | {"seed": seed, "planner": "dp"})
    return executor.submit(solve_case, request, limits)


def begun(pids: Path) -> bool:
    """Return whether a solver hangs."""
    return pids.exists() and len(pids.read_text().split()) == 2


def solvers(pids: Path) -> list[psutil.Process]:
    """Return the solver that has begun, and the process that it has started."""
    wait_for(lambda: begun(pids))
    processes = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    pids.unlink()
    return processes


@pytest.mark.cases(1)
def test_a_table_with_its_front(executor: Executor):
    heard: list[SweepRow] = []
    rows = sweep(request(planners=["dp", "nobody"], global_batch_sizes=[8, 16]), executor=executor, on_row=heard.append)
    assert [(row.global_batch_size, row.planner, row.state) for row in rows] == [
        (8, "dp", "succeeded"),
        (8, "nobody", "unsupported"),
        (16, "dp", "succeeded"),
        (16, "nobody", "unsupported"),
    ]
    assert len(heard) == 4
    assert "no planner 'nobody'" in rows[1].why
    planned = [row for row in rows if row.samples_per_s is not None]
    for row in planned:
        assert row.time_per_global_batch_ns is not None
        assert row.samples_per_s == pytest.approx(1e9 * row.global_batch_size / row.time_per_global_batch_ns)
        assert row.devices == 2
    points = [(-(row.samples_per_s or 0), row.peak_memory_bytes or 0, row.devices or 0) for row in planned]
    assert [row.pareto for row in planned] == front(points)


@pytest.mark.cases(1)
def test_cancelling_a_future_ends_its_solver(executor: Executor, pids: Path):
    future = ask(executor, HANG)
    running = solvers(pids)
    assert future.cancel()
    assert psutil.wait_procs(running, PATIENCE_S)[1] == []
    with pytest.raises(CancelledError):
        future.result(PATIENCE_S)


@pytest.mark.tier("nightly")
def test_a_solver_past_its_limit_is_ended_and_its_best_plan_is_the_answer(pids: Path):
    with executor_of("local:1") as pool:
        future = ask(pool, HANG, solve_s=4.0)
        running = solvers(pids)
        result = future.result(PATIENCE_S)
    assert result.status == "feasible"
    assert "its limit of 4 s was over" in result.why[0]
    assert psutil.wait_procs(running, PATIENCE_S)[1] == []


@pytest.mark.tier("nightly")
def test_a_solver_past_its_limit_is_ended_on_a_dask_worker(cluster: Cluster, pids: Path):
    """Before it has found anything, perhaps before it is loaded: a task starts an interpreter."""
    with executor_of(f"dask://{cluster.address}") as pool:
        result = ask(pool, HANG_WITHOUT_PLAN, solve_s=0.5).result(PATIENCE_S)
    assert (result.status, result.plan) == ("time_limit", None)
    assert [child for worker in cluster.workers for child in psutil.Process(worker.pid).children()] == []
    pids.unlink(missing_ok=True)


@pytest.mark.cases(1)
def test_a_solver_that_dies_is_a_problem_in_words(executor: Executor):
    problem = ask(executor, 4).result(PATIENCE_S)
    assert "was killed by SIGSEGV" in problem.detail


HANGING_SWEEP = """
import json, sys
from penstock.workers.solving import SolveLimits
from penstock.schemas.api.sweep import SweepRequest
from penstock.questions.by_name import sweep
sweep(SweepRequest.parse(json.loads(sys.argv[1])), limits=SolveLimits(entry="solver_entries:entry"))
"""


@pytest.mark.tier("nightly")
def test_a_sweep_that_is_broken_off_leaves_no_solver(pids: Path):
    sweep_json = json.dumps({"request": tiny_request() | {"seed": HANG}})
    command = [sys.executable, "-c", HANGING_SWEEP, sweep_json]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        running = solvers(pids)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert "KeyboardInterrupt" in errors
    assert psutil.wait_procs(running, PATIENCE_S)[1] == []


@pytest.mark.tier("nightly")
def test_a_killed_dask_worker_takes_its_solver_along_and_the_other_one_solves(cluster: Cluster, pids: Path):
    with executor_of(f"dask://{cluster.address}") as pool:
        future = ask(pool, HANG_FIRST_TIME)
        wait_for(lambda: begun(pids))
        running = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        parent = running[0].ppid()
        next(worker for worker in cluster.workers if worker.pid == parent).kill()
        assert psutil.wait_procs(running[:1], PATIENCE_S)[1] == []
        assert future.result(PATIENCE_S).plan is not None
        running[1].kill()


def test_an_executor_that_is_none_is_refused():
    for address in ("local:0", "dask://nowhere", "slurm:4", "dask:127.0.0.1:1"):
        with pytest.raises(InvalidDocument, match="is not an executor"):
            executor_of(address)


def test_a_scheduler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.workers.cluster.CONNECT_S", 0.3)
    with (
        pytest.raises(Unreachable, match=r"no Dask scheduler answers at 127\.0\.0\.1:1"),
        executor_of("dask://127.0.0.1:1"),
    ):
        pass
