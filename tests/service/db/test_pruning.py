"""Retention: what ended long ago goes, with all that only it had named; what anything names stays. On both engines."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from penstock.examples.tiny import tiny_plan_file, tiny_topology
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.errors import NotFound, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.service.db.database import Database
from penstock.service.db.document_store import Filed, Store, Stores, cache_key
from penstock.service.db.tables import DEFAULT_TENANT, answers, documents, job_events, jobs, runs, sweeps
from penstock.service.db.upkeep.pruning import Pruned, prune
from penstock.service.jobs.leases import Leases
from penstock.service.jobs.queue import JobQueue, NewJob
from penstock.workers.protocol import Outcome

DAY_MS = 86_400_000
OTHER = "other"


@pytest.fixture
def store(database: Database) -> Store:
    return Stores(database).of(DEFAULT_TENANT)


def ended_job(database: Database, file: PlanFile) -> tuple[str, str]:
    """Store a succeeded job with the plan of a file and its answer; return the job's id and the plan's hash."""
    store = Stores(database).of(DEFAULT_TENANT)
    request_hash = file.request.content_hash()
    store.keep(Filed.of(file.request))
    plan_hash = store.put(file.plan)
    queue = JobQueue(database)
    leases = Leases(database, lease_s=30, max_attempts=2)
    job_id, _ = queue.enqueue(
        DEFAULT_TENANT, NewJob(request_hash=request_hash, cache_key=cache_key(request_hash), limit_ms=1000)
    )
    claim = leases.claim("me")
    assert claim is not None
    result = ResultOut(status="feasible", why=("the best found",), seconds=0.1, plan_hash=plan_hash, plan=file.plan)
    assert leases.finish(claim, "succeeded", result=(Outcome.of(result), result.model_dump_json().encode()), keep=True)
    return job_id, plan_hash


def file_with_seed(seed: int) -> PlanFile:
    """Return the tiny plan for a separate request; profile and topology are the same for all."""
    file = PlanFile.parse(tiny_plan_file())
    request = file.request.model_copy(update={"seed": seed})
    plan = file.plan.model_copy(update={"request_hash": request.content_hash()})
    return file.model_copy(update={"request": request, "plan": plan})


def age(database: Database, days: int) -> None:
    """Move everything in the database ``days`` into the past."""
    moved = {
        documents: ("created_ms", "used_ms"),
        answers: ("created_ms",),
        jobs: ("created_ms", "finished_ms"),
        sweeps: ("created_ms", "finished_ms"),
    }
    with database.write() as connection:
        for table, columns in moved.items():
            earlier = {name: table.c[name] - days * DAY_MS for name in columns}
            connection.execute(table.update().values(**earlier))


def kept(database: Database) -> dict[str, int]:
    with database.read() as connection:
        counts = connection.execute(sa.select(documents.c.kind, sa.func.count()).group_by(documents.c.kind)).all()
    return dict(map(tuple, counts))


def test_what_is_over_and_named_by_nothing_goes(database: Database, store: Store):
    ended_job(database, file_with_seed(1))
    age(database, 60)
    young, _ = ended_job(database, file_with_seed(2))
    age(database, 40)
    assert prune(database, 90) == Pruned(jobs=1, answers=1, sweeps=0, idempotency=0, documents=2)
    assert kept(database) == {"plan": 1, "plan request": 1, "profile": 1, "topology": 1}
    assert store.answer(cache_key(file_with_seed(1).request.content_hash())) is None
    assert store.answer(cache_key(file_with_seed(2).request.content_hash())) is not None
    JobQueue(database).job(DEFAULT_TENANT, young)
    assert not prune(database, 90)
    age(database, 60)
    assert prune(database, 90).documents == 3
    assert kept(database) == {"topology": 1}, "the newest topologies may have the links of living agents"
    with database.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(job_events)) == 0


def test_a_running_job_keeps_what_it_was_asked_with(database: Database, store: Store):
    file = file_with_seed(1)
    address = file.request.content_hash()
    store.keep(Filed.of(file.request))
    JobQueue(database).enqueue(DEFAULT_TENANT, NewJob(request_hash=address, cache_key="k", limit_ms=1000))
    age(database, 100)
    assert not prune(database, 90)
    assert store.request(address) == file.request


def test_the_plan_of_a_run_and_what_it_was_made_for_stay(database: Database, store: Store):
    _, plan_hash = ended_job(database, file_with_seed(1))
    run = dict.fromkeys(("generation", "world_size", "steps", "seed", "trace_steps", "predicted_ns"), 1)
    run |= dict.fromkeys(("created_ms", "max_restarts", "restarts"), 1)
    lists: dict[str, object] = {"layers": [], "segments": [], "replans": [], "options": {}}
    with database.write() as connection:
        connection.execute(
            runs.insert().values(
                id="run",
                tenant=DEFAULT_TENANT,
                state="succeeded",
                plan_hash=plan_hash,
                model="gpt",
                gradient_check_wanted=False,
                **run,
                **lists,
            )
        )
    age(database, 100)
    assert prune(database, 90) == Pruned(jobs=1, answers=1, sweeps=0, idempotency=0, documents=0)
    assert store.plan_file(plan_hash).plan == file_with_seed(1).plan


def test_a_sweep_keeps_its_jobs_and_plans_until_it_goes_itself(database: Database):
    job_id, plan_hash = ended_job(database, file_with_seed(1))
    with database.write() as connection:
        connection.execute(jobs.update().values(parent_id="sweep"))
        connection.execute(
            sweeps.insert().values(
                id="sweep",
                tenant=DEFAULT_TENANT,
                request_hash="sha256:" + "1" * 64,
                body=f'[{{"plan": "{plan_hash}"}}]'.encode(),
                state="done",
                created_ms=sa.select(jobs.c.created_ms).where(jobs.c.id == job_id).scalar_subquery(),
                finished_ms=sa.select(jobs.c.finished_ms + 80 * DAY_MS).where(jobs.c.id == job_id).scalar_subquery(),
            )
        )
    age(database, 100)
    assert prune(database, 90).jobs == 0
    assert kept(database)["plan"] == 1
    age(database, 90)
    assert prune(database, 90) == Pruned(jobs=1, answers=1, sweeps=1, idempotency=0, documents=3)


def test_a_document_that_is_stored_again_is_young_again(database: Database, store: Store):
    file = file_with_seed(1)
    address = file.request.content_hash()
    store.keep(Filed.of(file.request))
    age(database, 100)
    store.keep(Filed.of(file.request))
    assert not prune(database, 90)
    assert store.request(address) == file.request


def test_tenants_see_and_keep_only_their_own(database: Database, store: Store):
    file = file_with_seed(1)
    store.keep(Filed.of(file.request))
    address = store.put(file.plan)
    other = Stores(database).of(OTHER)
    for ask in (lambda: other.plan(address), lambda: other.plan_file(address), lambda: other.body("plan", address)):
        with pytest.raises(NotFound):
            ask()
    assert list(other.newest_topologies()) == []
    assert other.put(file.plan) == address
    assert other.plan(address) == file.plan
    with pytest.raises(NotFound, match="no plan request is stored"):
        other.plan_file(address)
    assert [one.name for one in store.newest_topologies()] == [tiny_topology()["name"]]


def test_large_documents_are_deflated_and_small_ones_are_not(database: Database, store: Store):
    file = file_with_seed(1)
    small = store.put(file.request.topology)  # type: ignore[arg-type]
    large = store.put(file.request.profile.model_copy(update={"name": "x" * 500 + str(list(range(500)))[:12]}))  # type: ignore[union-attr]
    sizes = {}
    with database.read() as connection:
        for address, size, whole in connection.execute(
            sa.select(documents.c.hash, sa.func.length(documents.c.body), documents.c.size_bytes)
        ):
            sizes[address] = size / whole
    assert sizes[small] == 1
    assert sizes[large] < 0.7
    assert len(store.profile(large).name) == 512


def test_too_short_a_time_is_refused(database: Database):
    with pytest.raises(UnsupportedRequest, match="keep at least 2 days"):
        prune(database, 1)
