"""The lease queue on SQLite: order, leases, fencing, equal requests, several processes at once."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from penstock.schemas.errors import Conflict, NotFound, Unreachable
from penstock.schemas.jobs import ResultOut
from penstock.service.database import Database
from penstock.service.jobs import Claim, JobQueue, new_id

RESULT = ResultOut(status="infeasible", why="too big", seconds=0.1)
HASH = "sha256:" + "0" * 64


class Told(list[str]):
    """The topics that were published."""

    __call__ = list.append


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def queue(database: Database, told: Told) -> JobQueue:
    return JobQueue(database, told, lease_s=30, max_attempts=2)


def add(queue: JobQueue, key: str, priority: int = 0) -> str:
    job_id, is_new = queue.enqueue(HASH, key, 1000, priority)
    assert is_new
    return job_id


def claim(queue: JobQueue) -> Claim:
    found = queue.claim("me")
    assert found is not None
    return found


def expired(database: Database, queue: JobQueue) -> JobQueue:
    """The same queue, whose leases are over as soon as they begin."""
    return JobQueue(database, lambda topic: None, lease_s=-1, max_attempts=2)


def test_ids_sort_by_the_time_they_were_made(monkeypatch: pytest.MonkeyPatch):
    made = []
    for milliseconds in (1, 2, 1_700_000_000_000, 1_700_000_000_001):
        monkeypatch.setattr("time.time_ns", lambda at=milliseconds: at * 1_000_000)
        made.append(new_id())
    assert made == sorted(made)
    assert {uuid.UUID(one).version for one in made} == {7}


def test_higher_priority_first_then_older_first(queue: JobQueue):
    low = add(queue, "a")
    high = add(queue, "b", priority=5)
    assert claim(queue).job_id == high
    assert claim(queue).job_id == low
    assert queue.claim("me") is None


def test_equal_requests_share_a_job_while_it_is_active(queue: JobQueue):
    first = add(queue, "same")
    assert queue.enqueue(HASH, "same", 1000) == (first, False)
    running = claim(queue)
    assert queue.enqueue(HASH, "same", 1000) == (first, False)
    queue.finish(running, "succeeded", result=RESULT)
    assert queue.enqueue(HASH, "same", 1000)[1]


def test_a_finished_job_tells_its_story(queue: JobQueue, told: Told):
    job_id = add(queue, "a")
    queue.finish(claim(queue), "succeeded", result=RESULT)
    job = queue.job(job_id)
    assert (job.state, job.attempt, job.result) == ("succeeded", 1, RESULT)
    assert [(event.sequence, event.data["state"]) for event in queue.events(job_id, 0)] == [
        (1, "queued"),
        (2, "running"),
        (3, "succeeded"),
    ]
    assert [event.sequence for event in queue.events(job_id, 2)] == [3]
    assert told.count(f"job:{job_id}") == 3


def test_a_silent_worker_loses_its_job_and_its_right_to_write(database: Database, queue: JobQueue):
    job_id = add(queue, "a")
    silent = claim(expired(database, queue))
    second = claim(queue)
    assert (second.job_id, second.attempt) == (job_id, 2)
    assert queue.heartbeat(silent) == "lost"
    assert not queue.finish(silent, "succeeded", result=RESULT)
    assert queue.job(job_id).state == "running"
    assert queue.heartbeat(second) is None
    assert queue.finish(second, "succeeded", result=RESULT)


def test_a_job_that_is_lost_too_often_fails(database: Database, queue: JobQueue):
    job_id = add(queue, "a")
    losing = expired(database, queue)
    assert claim(losing).attempt == 1
    assert claim(losing).attempt == 2
    assert losing.claim("me") is None
    job = queue.job(job_id)
    assert job.state == "failed"
    assert job.error is not None
    assert job.error.code == "worker-lost"
    assert "2 times" in job.error.detail


def test_a_job_handed_back_does_not_count_as_lost(queue: JobQueue):
    job_id = add(queue, "a")
    for attempt in (1, 2, 3):
        running = claim(queue)
        assert running.attempt == attempt
        queue.hand_back(running)
        assert queue.job(job_id).state == "queued"


def test_a_job_given_up_twice_fails(queue: JobQueue):
    job_id = add(queue, "a")
    queue.give_up(claim(queue))
    assert queue.job(job_id).state == "queued"
    queue.give_up(claim(queue))
    assert queue.job(job_id).state == "failed"


def test_cancelling(queue: JobQueue):
    waiting = add(queue, "waiting")
    assert queue.stop(waiting, "cancel").state == "cancelled"
    assert queue.claim("me") is None
    assert queue.stop(waiting, "cancel").state == "cancelled"
    running_id = add(queue, "running")
    running = claim(queue)
    assert queue.stop(running_id, "cancel").state == "running"
    assert queue.heartbeat(running) == "cancel"
    queue.finish(running, "cancelled")
    with pytest.raises(Conflict, match="has cancelled already; it cannot finish"):
        queue.stop(running_id, "finish")
    with pytest.raises(NotFound, match="nothing-like-this"):
        queue.stop("nothing-like-this", "cancel")


def test_pages_go_from_the_newest_to_the_oldest(queue: JobQueue):
    made = sorted(add(queue, f"key{i}") for i in range(5))
    first = queue.recent(None, 3)
    second = queue.recent(first[-1].id, 3)
    assert [job.id for job in (*first, *second)] == made[::-1]
    claim(queue)
    assert [job.state for job in queue.recent(None, 9, "running")] == ["running"]


CLAIM_ALL = """
import sys
from penstock.service.database import Database
from penstock.service.jobs import JobQueue
queue = JobQueue(Database(sys.argv[1]), lambda topic: None, lease_s=30, max_attempts=2)
sys.stdin.readline()
while (claim := queue.claim(sys.argv[2])) is not None:
    print(claim.job_id, claim.attempt)
"""


def test_two_processes_never_claim_the_same_job(database: Database, queue: JobQueue):
    made = {add(queue, f"key{i}") for i in range(60)}
    url = database.engine.url.render_as_string()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIM_ALL, url, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("one", "two")
    ]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    claimed = [line.split() for worker in workers for line in worker.communicate(timeout=60)[0].splitlines()]
    assert {job_id for job_id, _ in claimed} == made
    assert len(claimed) == 60
    assert {attempt for _, attempt in claimed} == {"1"}


def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(Unreachable, match=r"no-such-directory/x\.sqlite does not answer: unable to open"):
        Database(f"sqlite:///{tmp_path}/no-such-directory/x.sqlite").create()
