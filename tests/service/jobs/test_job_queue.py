"""The queue on both engines: order, leases, fencing, equal requests, tenants, keys' limits, several processes."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import sqlalchemy as sa

from penstock.examples.tiny import tiny_request
from penstock.questions.solve import solve
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.errors import Conflict, InvalidDocument, NotFound, QuotaExceeded, Unreachable
from penstock.schemas.request import PlanRequest
from penstock.service.db.database import Database
from penstock.service.db.document_store import Filed, Stores, cache_key
from penstock.service.db.tables import answers, api_keys, documents, job_events, jobs, now_ms
from penstock.service.jobs.duties import do_hourly
from penstock.service.jobs.leases import Claim, Leases
from penstock.service.jobs.queue import JobQueue, NewJob, new_id
from penstock.service.jobs.worker_registry import WorkerRegistry
from penstock.service.settings import Settings
from penstock.workers.protocol import Outcome

RESULT = ResultOut(status="infeasible", why=("too big",), seconds=0.1)
ENDED = Outcome.of(RESULT), RESULT.model_dump_json().encode()
HASH = "sha256:" + "0" * 64
OURS, THEIRS = "ours", "theirs"


@pytest.fixture
def queue(database: Database) -> JobQueue:
    return JobQueue(database)


@pytest.fixture
def leases(database: Database) -> Leases:
    return Leases(database, lease_s=30, max_attempts=2)


@pytest.fixture
def losing(database: Database) -> Leases:
    """Leases that are over as soon as they begin."""
    return Leases(database, lease_s=-1, max_attempts=3)


def job(key: str, **more: object) -> NewJob:
    return NewJob(**{"request_hash": HASH, "cache_key": key, "limit_ms": 1000, **more})  # type: ignore[arg-type]


def add(queue: JobQueue, key: str, tenant: str = OURS, **more: object) -> str:
    job_id, is_new = queue.enqueue(tenant, job(key, **more))
    assert is_new
    return job_id


@pytest.mark.parametrize("ends", [False, True])
def test_the_json_of_a_job_is_that_of_its_document(leases: Leases, queue: JobQueue, ends: bool) -> None:
    """Its result is taken over as it is stored, wherever a text of a client's looks like the place for it."""
    job_id = add(queue, "k", tag='"result":null')
    if ends:
        leases.finish(claim(leases), "succeeded", result=ENDED)
    state, body = queue.answer(OURS, job_id)
    job = queue.job(OURS, job_id)
    assert (state, job.result) == (("succeeded", RESULT) if ends else ("queued", None))
    assert body == job.model_dump_json().encode()
    with pytest.raises(NotFound):
        queue.answer(THEIRS, job_id)


def test_a_job_and_what_it_refers_to_are_stored_together_or_not_at_all(database: Database, queue: JobQueue) -> None:
    """A job that was answered with 202 is on disk with all that a worker needs; of a refused one nothing is."""
    filed = Filed.of(PlanRequest.parse(tiny_request()))
    store = Stores(database).of(OURS)

    def broken(connection: sa.Connection) -> None:
        store.keep_in(filed, connection)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.enqueue(OURS, job("k", keep=broken))
    with database.read() as connection:
        assert not connection.execute(sa.select(jobs)).all()
        assert not connection.execute(sa.select(documents)).all()
    job_id, is_new = queue.enqueue(OURS, job("k", keep=lambda connection: store.keep_in(filed, connection)))
    assert is_new
    assert store.request(filed.address) == PlanRequest.parse(tiny_request())
    assert [(event.sequence, event.data) for event in queue.events(OURS, job_id, 0)] == [(1, {"state": "queued"})]


def claim(leases: Leases) -> Claim:
    claimed = leases.claim("me")
    assert claimed is not None
    return claimed


def add_key(database: Database, name: str, tenant: str = OURS, **limits: int) -> str:
    values = {"id": name, "tenant": tenant, "name": name, "hash": name, "scopes": ["solve"]}
    with database.write() as connection:
        connection.execute(api_keys.insert().values(**values, created_ms=now_ms(), **limits))
    return name


def test_an_answer_is_of_the_code_that_made_it(
    database: Database, queue: JobQueue, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with other code than the service keeps its answer for services that have the same."""
    ours = cache_key(HASH)
    add(queue, ours)
    monkeypatch.setattr("penstock.service.db.document_store.code_digest", lambda: "other code")
    leases.finish(claim(leases), "succeeded", result=ENDED, keep=True)
    store = Stores(database).of(OURS)
    assert store.answer(cache_key(HASH)) is not None
    assert store.answer(ours) is None


def test_higher_priority_first_then_older_first(queue: JobQueue, leases: Leases):
    low, high, middle = add(queue, "a", priority=-7), add(queue, "b", priority=5), add(queue, "c")
    assert [claim(leases).job_id for _ in range(3)] == [high, middle, low]
    assert leases.claim("me") is None


@pytest.mark.tier("quick")
def test_ids_sort_by_the_time_they_were_made():
    ids = [new_id() for _ in range(1000)]
    assert ids == sorted(ids)
    assert {uuid.UUID(each).version for each in ids} == {7}
    assert {uuid.UUID(each).variant for each in ids} == {uuid.RFC_4122}


def test_the_tenant_with_fewer_running_jobs_goes_first(queue: JobQueue, leases: Leases):
    """Its queue is younger, and yet it need not wait for all that the other tenant has asked before."""
    ours = [add(queue, f"ours{i}") for i in range(3)]
    theirs = [add(queue, f"theirs{i}", THEIRS) for i in range(2)]
    order = [claim(leases).job_id for _ in range(5)]
    assert order == [ours[0], theirs[0], ours[1], theirs[1], ours[2]]
    urgent = add(queue, "urgent", priority=1)
    add(queue, "free", "third")
    assert claim(leases).job_id == urgent, "fairness is within a priority"


def test_with_one_slot_tenants_take_turns(queue: JobQueue, leases: Leases) -> None:
    """One that asks twelve times first has one job started before the other's only one."""
    for number in range(12):
        add(queue, f"ours{number}")
    leases.finish(claim(leases), "succeeded", result=ENDED)
    theirs = add(queue, "theirs", THEIRS)
    second = claim(leases)
    assert second.job_id == theirs
    leases.finish(second, "succeeded", result=ENDED)
    later = add(queue, "later", THEIRS)
    assert [claim(leases).tenant, leases.claim("me").tenant] == [OURS, THEIRS]  # type: ignore[union-attr]
    assert queue.job(THEIRS, later).state == "running"


def test_a_clock_that_is_set_back_holds_up_no_job(database: Database, queue: JobQueue, leases: Leases) -> None:
    """What was written an hour ahead is over: a lease of a dead worker, and the time of another try."""
    hour_ms = 3_600_000
    stale, waiting = add(queue, "stale"), add(queue, "waiting")
    assert claim(leases).job_id == stale
    with database.write() as connection:
        connection.execute(jobs.update().where(jobs.c.id == stale).values(lease_until_ms=now_ms() + hour_ms))
        connection.execute(jobs.update().where(jobs.c.id == waiting).values(not_before_ms=now_ms() + hour_ms))
    claims = [claim(leases), claim(leases)]
    assert {(one.job_id, one.attempt) for one in claims} == {(stale, 2), (waiting, 1)}
    assert [leases.heartbeat(one) for one in claims] == [None, None]
    assert leases.claim("me") is None, "a lease that was just given is not over"


def test_a_job_whose_process_was_killed_is_tried_once_more(queue: JobQueue, leases: Leases) -> None:
    job_id = add(queue, "a")
    assert leases.try_again(claim(leases))
    again = claim(leases)
    assert (again.job_id, again.attempt) == (job_id, 2)
    assert not leases.try_again(again)
    assert leases.heartbeat(again) is None, "it is still this worker's, which ends it"


def test_a_key_has_no_more_jobs_running_than_it_may(database: Database, queue: JobQueue, leases: Leases):
    key = add_key(database, "small", max_running=1)
    first, second = add(queue, "a", key_id=key), add(queue, "b", key_id=key)
    other = add(queue, "c")
    one, two = claim(leases), claim(leases)
    assert [one.job_id, two.job_id] == [first, other]
    assert leases.claim("me") is None
    leases.finish(one, "succeeded", result=ENDED)
    assert claim(leases).job_id == second


def test_a_key_queues_no_more_jobs_than_it_may(queue: JobQueue, leases: Leases):
    first = add(queue, "a", key_id="k", max_queued=1)
    with pytest.raises(QuotaExceeded, match="1 jobs of this key are waiting already; the limit is 1") as caught:
        queue.enqueue(OURS, job("b", key_id="k", max_queued=1))
    assert caught.value.retry_after_s > 0
    assert queue.enqueue(OURS, job("a", key_id="k", max_queued=1)) == (first, False)
    claim(leases)
    add(queue, "b", key_id="k", max_queued=1)


def test_equal_requests_share_a_job_while_it_is_active(queue: JobQueue, leases: Leases):
    first = add(queue, "same")
    theirs = add(queue, "same", THEIRS)
    assert queue.enqueue(OURS, job("same", priority=9)) == (first, False)
    assert queue.job(OURS, first).priority == 9
    running = claim(leases)
    assert running.job_id == first, "the more urgent of equal requests counts"
    assert queue.enqueue(OURS, job("same")) == (first, False)
    leases.finish(running, "succeeded", result=ENDED)
    assert queue.enqueue(OURS, job("same"))[1]
    assert queue.enqueue(THEIRS, job("same")) == (theirs, False)


def test_a_finished_job_tells_its_story(queue: JobQueue, leases: Leases):
    job_id = add(queue, "a", planner="dp", tag="night", parent_id="sweep")
    leases.finish(claim(leases), "succeeded", result=ENDED)
    job = queue.job(OURS, job_id)
    assert (job.state, job.attempt, job.result) == ("succeeded", 1, RESULT)
    assert (job.planner, job.tag, job.parent_id) == ("dp", "night", "sweep")
    assert [(event.sequence, event.data["state"]) for event in queue.events(OURS, job_id, 0)] == [
        (1, "queued"),
        (2, "running"),
        (3, "succeeded"),
    ]
    assert [event.sequence for event in queue.events(OURS, job_id, 2)] == [3]


def test_another_tenants_job_is_not_there(queue: JobQueue, leases: Leases):
    job_id = add(queue, "a")
    asks = [
        lambda: queue.job(THEIRS, job_id),
        lambda: queue.events(THEIRS, job_id, 0),
        lambda: queue.incumbent(THEIRS, job_id),
        lambda: queue.stop(THEIRS, job_id, "cancel"),
        lambda: queue.retry(THEIRS, job_id),
        lambda: queue.delete(THEIRS, job_id),
    ]
    for ask in asks:
        with pytest.raises(NotFound, match=job_id):
            ask()
    assert queue.recent(THEIRS, None, 9) == []
    assert queue.job(OURS, job_id).state == "queued"
    leases.finish(claim(leases), "succeeded", result=ENDED, keep=True)


def test_a_silent_worker_loses_its_job_and_its_right_to_write(queue: JobQueue, leases: Leases, losing: Leases):
    job_id = add(queue, "a")
    silent = claim(losing)
    second = claim(leases)
    assert (second.job_id, second.attempt) == (job_id, 2)
    assert leases.heartbeat(silent) == "lost"
    assert not leases.finish(silent, "succeeded", result=ENDED)
    assert queue.job(OURS, job_id).state == "running"
    assert leases.heartbeat(second) is None
    assert leases.finish(second, "succeeded", result=ENDED)
    assert not leases.finish(silent, "failed")


def test_a_job_that_is_lost_again_waits_and_then_fails(database: Database, queue: JobQueue, losing: Leases):
    job_id = add(queue, "a")
    assert [claim(losing).attempt, claim(losing).attempt] == [1, 2]
    assert losing.claim("me") is None, "it has been lost twice, and waits"
    assert queue.job(OURS, job_id).state == "queued"
    with database.write() as connection:
        waits_ms = connection.scalar(sa.select(jobs.c.not_before_ms - now_ms()))
        assert 0 < waits_ms <= 2000
        connection.execute(jobs.update().values(not_before_ms=now_ms() - 1))
    assert claim(losing).attempt == 3
    assert losing.claim("me") is None
    ended = queue.job(OURS, job_id)
    assert ended.state == "failed"
    assert ended.error is not None
    assert ended.error.code == "worker-lost"
    assert "3 times" in ended.error.detail


def test_the_wait_before_another_try_is_a_minute_at_most(database: Database, queue: JobQueue):
    stubborn = Leases(database, lease_s=-1, max_attempts=100)
    add(queue, "a")
    claim(stubborn)
    with database.write() as connection:
        connection.execute(jobs.update().values(lost=50))
    assert stubborn.claim("me") is None
    with database.read() as connection:
        assert 55_000 < connection.scalar(sa.select(jobs.c.not_before_ms - now_ms())) <= 60_000


def test_a_lost_job_that_was_to_be_cancelled_is_cancelled(queue: JobQueue, leases: Leases, losing: Leases):
    lost, returned = add(queue, "a"), add(queue, "b")
    claim(losing)
    queue.stop(OURS, lost, "cancel")
    running = claim(leases)
    assert running.job_id == returned
    queue.stop(OURS, returned, "cancel")
    leases.hand_back(running)
    assert leases.claim("me") is None
    assert {one.state for one in queue.recent(OURS, None, 9)} == {"cancelled"}


def test_a_job_handed_back_does_not_count_as_lost(queue: JobQueue, leases: Leases):
    job_id = add(queue, "a")
    for attempt in (1, 2, 3):
        running = claim(leases)
        assert running.attempt == attempt
        leases.hand_back(running)
        assert queue.job(OURS, job_id).state == "queued"


def test_a_job_given_up_too_often_fails(queue: JobQueue, leases: Leases):
    job_id = add(queue, "a")
    leases.give_up(claim(leases))
    assert queue.job(OURS, job_id).state == "queued"
    leases.give_up(claim(leases))
    assert queue.job(OURS, job_id).state == "failed"


def test_cancelling(queue: JobQueue, leases: Leases):
    waiting = add(queue, "waiting")
    assert queue.stop(OURS, waiting, "cancel").state == "cancelled"
    assert leases.claim("me") is None
    assert queue.stop(OURS, waiting, "cancel").state == "cancelled"
    running_id = add(queue, "running")
    running = claim(leases)
    assert queue.stop(OURS, running_id, "cancel").state == "running"
    assert leases.heartbeat(running) == "cancel"
    leases.finish(running, "cancelled")
    with pytest.raises(Conflict, match=r"has already ended \(cancelled\); cannot finish it"):
        queue.stop(OURS, running_id, "finish")
    with pytest.raises(NotFound, match="nothing-like-this"):
        queue.stop(OURS, "nothing-like-this", "cancel")


def test_a_job_is_tried_again_under_its_own_id(queue: JobQueue, leases: Leases):
    job_id = add(queue, "a")
    with pytest.raises(Conflict, match="is queued; only jobs that failed or were cancelled"):
        queue.retry(OURS, job_id)
    queue.stop(OURS, job_id, "cancel")
    equal = add(queue, "a")
    with pytest.raises(Conflict, match=f"job '{equal}' has the same request and is not finished"):
        queue.retry(OURS, job_id)
    queue.stop(OURS, equal, "cancel")
    again = queue.retry(OURS, job_id)
    assert (again.id, again.state, again.finished_at) == (job_id, "queued", None)
    running = claim(leases)
    assert leases.heartbeat(running) is None, "the old wish to cancel is forgotten"
    assert leases.finish(running, "succeeded", result=ENDED)
    assert queue.job(OURS, job_id).attempt == running.attempt


def test_deleting_forgets_job_story_and_answer(database: Database, queue: JobQueue, leases: Leases):
    job_id, other = add(queue, "a"), add(queue, "b", request_hash="sha256:" + "1" * 64)
    with pytest.raises(Conflict, match="is queued"):
        queue.delete(OURS, job_id)
    for _ in range(2):
        leases.finish(claim(leases), "succeeded", result=ENDED, keep=True)
    queue.delete(OURS, job_id)
    with pytest.raises(NotFound):
        queue.job(OURS, job_id)
    with database.read() as connection:
        assert connection.scalars(sa.select(answers.c.job_id)).all() == [other]
        assert set(connection.scalars(sa.select(job_events.c.job_id))) == {other}


def test_pages_go_from_the_newest_to_the_oldest(queue: JobQueue, leases: Leases):
    job_ids = sorted(add(queue, f"key{i}", planner="dp" if i else "auto", tag=f"tag{i % 2}") for i in range(5))
    first = queue.recent(OURS, None, 3)
    second = queue.recent(OURS, first[-1].id, 3)
    assert [one.id for one in (*first, *second)] == job_ids[::-1]
    claim(leases)
    assert [one.state for one in queue.recent(OURS, None, 9, "running")] == ["running"]
    assert len(queue.recent(OURS, None, 9, tag="tag1")) == 2
    assert [one.planner for one in queue.recent(OURS, None, 9, planner="auto")] == ["auto"]
    assert queue.recent(OURS, None, 9, parent_id="none") == []


def test_the_best_plan_survives_its_worker_and_is_never_replaced_by_a_worse_one(
    queue: JobQueue, leases: Leases, losing: Leases
):
    plans = [(name, solve(PlanRequest.parse(tiny_request() | {"planner": name})).plan) for name in ("dp", "gpipe")]
    worse, better = (
        (plan.prediction.time_per_global_batch_ns, plan.canonical_json(), {"planner": name})
        for name, plan in plans
        if plan is not None and plan.prediction is not None
    )
    assert better[0] < worse[0]
    job_id = add(queue, "a")
    first = claim(losing)
    assert losing.best_of_earlier_attempts(first) is None
    losing.report(first, *better)
    second = claim(leases)
    assert leases.best_of_earlier_attempts(second) == better[:2]
    leases.report(second, *worse)
    losing.report(first, *worse)
    assert queue.incumbent(OURS, job_id) == plans[1][1]
    planners = [event.data["planner"] for event in queue.events(OURS, job_id, 0) if event.kind == "progress"]
    assert planners == ["gpipe"]


def test_workers_say_that_they_live_and_the_eldest_does_what_is_common(database: Database):
    first, second = (WorkerRegistry(database, name, 2, lease_s=30) for name in ("first", "second"))
    assert first.beat()
    assert not second.beat()
    first.leave()
    assert second.beat()
    hasty = WorkerRegistry(database, "third", 1, lease_s=-1)
    assert not hasty.beat(), "whoever is silent for a lease is not alive"


CLAIM_ALL = """
import sys
from penstock.service.db.database import Database
from penstock.service.jobs.leases import Leases
leases = Leases(Database(sys.argv[1]), lease_s=30, max_attempts=2)
sys.stdin.readline()
while (claim := leases.claim(sys.argv[2])) is not None:
    print(claim.job_id, claim.attempt)
"""


@pytest.mark.cases(1)
def test_two_processes_never_claim_the_same_job(database: Database, queue: JobQueue):
    job_ids = {add(queue, f"key{i}") for i in range(60)}
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
    assert {job_id for job_id, _ in claimed} == job_ids
    assert len(claimed) == 60
    assert {attempt for _, attempt in claimed} == {"1"}


@pytest.mark.tier("quick")
def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path):
    with pytest.raises(Unreachable, match=r"no-such-directory/x\.sqlite does not answer: unable to open"):
        Database(f"sqlite:///{tmp_path}/no-such-directory/x.sqlite").create()


def test_once_an_hour_what_is_over_for_long_goes(database: Database, queue: JobQueue, leases: Leases):
    old, young, waiting = (add(queue, name, priority=-number) for number, name in enumerate("abc"))
    for _ in range(2):
        leases.finish(claim(leases), "succeeded", result=ENDED, keep=True)
    with database.write() as connection:
        connection.execute(jobs.update().where(jobs.c.id == old).values(finished_ms=now_ms() - 3 * 86_400_000))
    do_hourly(database, Settings())
    assert len(queue.recent(OURS, None, 9)) == 3, "by default everything is kept"
    do_hourly(database, Settings(keep_jobs_days=2))
    assert {one.id for one in queue.recent(OURS, None, 9)} == {young, waiting}


@pytest.mark.tier("quick")
def test_what_may_still_be_in_use_is_never_removed():
    with pytest.raises(InvalidDocument) as caught:
        Settings.load(keep_jobs_days=1)
    assert "keep at least 2 days" in caught.value.faults[0].detail
