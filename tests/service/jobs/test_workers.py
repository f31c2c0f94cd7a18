"""Workers in processes of their own, beside a service without one: deaths, pauses, ends, memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from service_process import Server
from worker_process import WorkerProcess

from penstock.examples.tiny import tiny_request
from penstock.schemas.api.jobs import JobOut
from penstock.schemas.errors import PenstockError
from penstock.schemas.request import PlanRequest
from penstock.service.db.database import Database
from penstock.service.db.document_store import Stores
from penstock.service.db.tables import jobs, workers
from penstock.service.jobs.queue import JobQueue
from penstock.service.jobs.submit import Planning
from penstock.service.security.principals import EVERYBODY
from penstock.service.security.sizes import Sizes
from penstock.service.settings import Settings

HANG_FIRST_TIME, ANSWER_LATE, EAT, BE_KILLED = 3, 8, 9, 10
PATIENCE_S = 60


class Floor:
    """A database, whoever asks of it, and its workers."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        self.database.create()
        self.queue = JobQueue(self.database)
        self.planning = Planning(Stores(self.database), self.queue, Sizes(Settings()), max_solve_s=60)
        self.workers: list[WorkerProcess] = []

    def start(self, **settings: Any) -> WorkerProcess:
        """Start another worker."""
        url = self.database.url.render_as_string(hide_password=False)
        self.workers.append(WorkerProcess(url, **settings))
        return self.workers[-1]

    def ask(self, seed: int, **changes: Any) -> str:
        """Submit a new job, and return its id."""
        request = tiny_request() | {"seed": seed, "planner": "dp"} | changes
        return self.planning.submit(EVERYBODY, PlanRequest.parse(request)).job_id

    def job(self, job_id: str) -> JobOut:
        """Return a job as it stands."""
        return self.queue.job(EVERYBODY.tenant, job_id)

    def ended(self, job_id: str) -> JobOut:
        """Return the job once it has ended."""
        wait_for(lambda: self.job(job_id).state not in ("queued", "running"))
        return self.job(job_id)

    def holder(self, job_id: str) -> WorkerProcess:
        """Return the worker that has the job."""
        with self.database.read() as connection:
            owner = connection.scalar(sa.select(jobs.c.lease_owner).where(jobs.c.id == job_id))
        assert owner is not None
        return next(one for one in self.workers if f":{one.process.pid}:" in owner)

    def present(self) -> int:
        """Return the number of workers that have not announced their end."""
        with self.database.read() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(workers)) or 0

    def close(self) -> None:
        """End what still runs."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGCONT)
                worker.stop(signal.SIGKILL)
        self.database.close()


def wait_for(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def pids_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIDS_FILE", str(tmp_path / "pids"))
    return tmp_path / "pids"


@pytest.fixture
def floor(engine_url: str, pids_file: Path) -> Iterator[Floor]:
    floor = Floor(engine_url)
    yield floor
    floor.close()


@pytest.mark.cases(1)
def test_a_killed_worker_and_one_that_ends(floor: Floor, pids_file: Path):
    """kill -9: the solver dies too, and another worker takes the job over; SIGTERM: it is handed back at once."""
    floor.start()
    floor.start()
    wait_for(lambda: floor.present() == 2)
    job_id = floor.ask(HANG_FIRST_TIME)
    wait_for(lambda: pids_file.exists() and len(pids_file.read_text().split()) == 2)
    wait_for(lambda: floor.queue.incumbent(EVERYBODY.tenant, job_id) is not None)
    solvers = [psutil.Process(int(pid)) for pid in pids_file.read_text().split()]
    floor.holder(job_id).stop(signal.SIGKILL)
    assert psutil.wait_procs(solvers, 10)[1] == []
    taken_over = floor.ended(job_id)
    assert (taken_over.state, taken_over.attempt) == ("succeeded", 2)
    pids_file.unlink()
    second = floor.ask(HANG_FIRST_TIME, global_batch_size=8)
    wait_for(pids_file.exists)
    left = floor.holder(second)
    assert left.stop(signal.SIGTERM) == 0
    handed_back = floor.job(second)
    assert (handed_back.state, handed_back.attempt) == ("queued", 1)
    assert floor.present() == 1, "the killed one could not say goodbye"
    assert "Traceback" not in left.text, left.text


@pytest.mark.tier("nightly")
def test_a_worker_that_slept_past_its_lease_writes_nothing(tmp_path: Path, pids_file: Path):
    """Its solver has found an answer meanwhile, and another worker's solver too, which was first to write it."""
    floor = Floor(f"sqlite:///{tmp_path / 'floor.sqlite'}")
    try:
        sleeper = floor.start()
        job_id = floor.ask(ANSWER_LATE)
        wait_for(pids_file.exists)
        sleeper.process.send_signal(signal.SIGSTOP)
        pids_file.with_suffix(".go").touch()
        wait_for(pids_file.with_suffix(".done").exists)
        other = floor.start()
        first = floor.ended(job_id)
        assert first.result is not None
        assert (first.result.sentence, first.attempt) == ("second", 2)
        assert other.stop() == 0
        sleeper.process.send_signal(signal.SIGCONT)
        assert floor.ended(floor.ask(0)).state == "succeeded", "it works on"
        assert floor.job(job_id) == first
        ends = [one.data for one in floor.queue.events(EVERYBODY.tenant, job_id, 0) if one.data.get("status")]
        assert len(ends) == 1
        assert sleeper.stop() == 0
        assert "the lease was lost" in sleeper.text or "was lost after" in sleeper.text, sleeper.text
    finally:
        floor.close()


@pytest.mark.tier("nightly")
def test_a_service_without_a_worker_and_solvers_without_memory(
    start_server: Callable[..., Server], tmp_path: Path, pids_file: Path
):
    """The service learns what a worker on the same database does, and the worker learns of requests to the service."""
    server = start_server(slots=0)
    worker = WorkerProcess(str(tmp_path / "service.sqlite"), solve_memory_bytes=256 * 2**20, lease_s=30)
    client = server.client
    try:
        done = client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "dp"}))
        assert done.result is not None
        assert done.result.plan is not None
        for seed, code, attempts, reason in (
            (EAT, "out-of-memory", 1, "its limit of 256 MiB"),
            (BE_KILLED, "solver-killed", 2, "killed by SIGKILL, and not by the service"),
        ):
            with pytest.raises(PenstockError, match=reason):
                client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "gpipe", "seed": seed}))
            failed = client.jobs.page(limit=1).items[0]
            assert failed.error is not None
            assert (failed.error.code, failed.attempt) == (code, attempts)
            assert client.jobs.incumbent(failed.id).prediction is not None
        job = client.plans.create(
            PlanRequest.parse(tiny_request() | {"planner": "gpipe", "seed": HANG_FIRST_TIME}), wait=False
        )
        next(event for event in client.jobs.events(job.id) if event.kind == "progress")
        client.jobs.finish(job.id)  # long before the next heartbeat, which is 10 s away
        finished = client.jobs.get(job.id, wait_s=20)
        assert finished.result is not None
        assert finished.result.status == "feasible"
    finally:
        assert worker.stop() == 0
    assert "Traceback" not in worker.text, worker.text


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group that may have 700 MB: some three times what a worker takes."""
    for root, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(root, f"penstock-test-{os.getpid()}")
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists():
                (group / limit).write_text(str(700 * 2**20))
                break
            group.rmdir()
    else:
        pytest.skip("a limit on memory needs root and control groups")
    yield group
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.tier("nightly")
def test_the_kernel_and_somebody_else_kill_a_solver(tmp_path: Path, control_group: Path, pids_file: Path):
    """Both with SIGKILL; only the kernel counts what it has killed for memory, and each kill explains one death."""
    floor = Floor(f"sqlite:///{tmp_path / 'penstock.sqlite'}")
    around = ["sh", "-c", f'echo $$ > {control_group}/cgroup.procs && exec "$@"', "sh"]
    try:
        worker = WorkerProcess(str(tmp_path / "penstock.sqlite"), around=around)
        floor.workers.append(worker)
        for seed, code, reason in (
            (EAT, "out-of-memory", "the kernel has killed 1 more of its control group for memory"),
            (BE_KILLED, "solver-killed", "killed by SIGKILL, and not by the service"),
            (EAT, "out-of-memory", "the kernel has killed 1 more of its control group for memory"),
        ):
            job = floor.ended(floor.ask(seed))
            assert job.error is not None
            assert (job.error.code, job.attempt) == (code, 2), job.error
            assert reason in job.error.detail
            floor.queue.delete(EVERYBODY.tenant, job.id)
        assert floor.ended(floor.ask(0)).state == "succeeded", "the worker lives"
        assert worker.stop() == 0
    finally:
        floor.close()
