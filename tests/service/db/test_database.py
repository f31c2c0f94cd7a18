"""Transactions on both engines: what writes is alone, what is away says so and comes back, and where files may lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from postgres import Cluster, running_cluster

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.service.db.database import Database, DatabaseAway
from penstock.service.db.disks import refuse_shared_disk
from penstock.service.db.relay import Relay
from penstock.service.db.tables import DEFAULT_TENANT, documents, jobs
from penstock.service.jobs.leases import Leases
from penstock.service.jobs.queue import JobQueue, NewJob

HASH = "sha256:" + "0" * 64


def add_job(database: Database, key: str) -> str:
    queue = JobQueue(database)
    return queue.enqueue(DEFAULT_TENANT, NewJob(request_hash=HASH, cache_key=key, limit_ms=1000))[0]


class Heard(list[str | None]):
    """The topics that a relay has delivered so far."""

    def __init__(self) -> None:
        self._news = threading.Condition()

    def __call__(self, topic: str | None) -> None:
        with self._news:
            self.append(topic)
            self._news.notify_all()

    def wait_for(self, topic: str | None, times: int = 1) -> None:
        with self._news:
            assert self._news.wait_for(lambda: self.count(topic) >= times, 60), (topic, list(self))


def test_what_is_read_and_written_by_many_at_once_adds_up(database: Database):
    """Each reads a number and writes the next one: without being alone, some would be lost."""
    job_id = add_job(database, "counted")

    def count_up(_: int) -> None:
        with database.write() as connection:
            seen = connection.scalar(sa.select(jobs.c.priority).where(jobs.c.id == job_id))
            connection.execute(jobs.update().values(priority=seen + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count_up, range(40)))
    with database.read() as connection:
        assert connection.scalar(sa.select(jobs.c.priority)) == 40


def test_a_reader_sees_one_state_while_others_write(database: Database):
    add_job(database, "a")
    number = sa.select(sa.func.count()).select_from(jobs)
    with database.read() as connection:
        before = connection.scalar(number)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(add_job, database, "b").result()
        assert connection.scalar(number) == before == 1
    with database.read() as connection:
        assert connection.scalar(number) == 2


def test_a_connection_in_use_while_all_are_closed_is_closed_afterwards(database: Database, engine_url: str):
    other = Database(engine_url)
    with other.read() as connection:
        used = connection.connection.driver_connection
        other.close()
        assert connection.scalar(sa.select(1)) == 1
    with pytest.raises(Exception, match="closed"):
        used.execute("SELECT 1")


def test_a_value_that_no_column_takes_is_the_callers_fault(database: Database):
    with pytest.raises(InvalidDocument, match="cannot store such a value"):
        _keep_limit(database, 2**70)


def _keep_limit(database: Database, limit_ms: int) -> None:
    with database.write() as connection:
        connection.execute(jobs.update().values(limit_ms=limit_ms))


def test_changes_of_other_processes_are_heard(database: Database, engine_url: str):
    heard, other = Heard(), Database(engine_url)
    relay = Relay(database, heard)
    relay.start()
    heard.wait_for(None)
    job_id = add_job(other, "told")
    heard.wait_for("jobs")
    heard.wait_for(f"job:{job_id}")
    claim = Leases(other, lease_s=30, max_attempts=2).claim("me")
    assert claim is not None
    JobQueue(other).stop(DEFAULT_TENANT, job_id, "finish")
    heard.wait_for(f"stop:{job_id}")
    with other.write() as connection:
        connection.execute(jobs.update().values(lease_until_ms=1))
    Leases(other, lease_s=30, max_attempts=2).claim("me")
    heard.wait_for("jobs", 2)
    relay.stop()
    other.close()


@pytest.mark.tier("quick")
def test_more_changes_than_are_kept_mean_that_anything_may_have_changed(tmp_path: Path):
    heard, database = Heard(), Database(f"sqlite:///{tmp_path / 'q.sqlite'}")
    database.create()
    relay = Relay(database, heard)
    relay.start()
    heard.wait_for(None)
    rows = [
        {"id": f"{i:036}", "tenant": "t", "state": "succeeded", "request_hash": HASH, "cache_key": str(i)}
        | dict.fromkeys(("priority", "created_ms", "attempt", "lost", "limit_ms"), 1)
        for i in range(2500)
    ]
    with database.write() as connection:
        connection.execute(jobs.insert(), rows)
    heard.wait_for(None, 2)
    with database.read() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM changes")) == 1000
    relay.stop()
    database.close()


@pytest.fixture(scope="module")
def mortal() -> Iterator[Cluster]:
    """A PostgreSQL server that tests may kill."""
    with running_cluster() as cluster:
        yield cluster


def test_a_server_that_was_killed_is_away_and_comes_back(mortal: Cluster):
    database = Database(mortal.new_database())
    database.create()
    heard = Heard()
    relay = Relay(database, heard)
    relay.start()
    heard.wait_for(None)
    with pytest.raises(DatabaseAway) as away:
        _write(database, meanwhile=mortal.kill)
    assert (away.value.status, away.value.retry_after_s) == (503, 5)
    with pytest.raises(DatabaseAway):
        _write(database)
    with pytest.raises(DatabaseAway):
        database.revision()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(database.create, wait_s=60)
        with pytest.raises(TimeoutError):
            starting.result(0.2)
        mortal.start()
        starting.result(60)
    job_id = add_job(database, "after")
    heard.wait_for(None, 2)
    JobQueue(database).stop(DEFAULT_TENANT, job_id, "cancel")
    heard.wait_for(f"job:{job_id}")
    relay.stop()
    database.close()


def test_what_somebody_has_to_mend_is_not_waited_for(mortal: Cluster, tmp_path: Path):
    url = sa.make_url(mortal.new_database()).set(database="nowhere").render_as_string(hide_password=False)
    for name, reason in (
        (url, 'database "nowhere" does not exist'),
        (f"sqlite:///{tmp_path}/no/file", "unable to open"),
    ):
        database = Database(name)
        with pytest.raises(DatabaseAway, match=reason):
            database.create(wait_s=600)
        database.close()


def _write(database: Database, meanwhile: Callable[[], None] = lambda: None) -> None:
    with database.write() as connection:
        connection.execute(documents.delete())
        meanwhile()
        connection.execute(documents.delete())


@pytest.mark.tier("quick")
def test_a_pool_that_is_empty_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.service.db.database.LOCK_WAIT_MS", 50)
    database = Database(f"sqlite:///{tmp_path / 'q.sqlite'}", connections=1)
    with database.read(), pytest.raises(DatabaseAway) as away, database.read():
        pass
    assert "database_connections" in str(away.value)
    database.close()


@pytest.mark.tier("quick")
@pytest.mark.parametrize("url", ["mysql://host/name", "no url", "postgresql+asyncpg://host/name"])
def test_other_databases_are_refused(url: str):
    with pytest.raises(UnsupportedRequest, match="SQLite and PostgreSQL"):
        Database(url)


@pytest.mark.tier("quick")
def test_passwords_are_not_shown():
    assert "secret" not in Database("postgresql://user:secret@host/name").name


MOUNTED = """\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
30 21 0:40 / /home/a\\040b rw shared:1 - nfs4 server:/home rw
31 21 0:41 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw
32 31 8:2 / /scratch/local rw - xfs /dev/sdb1 rw
"""


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("/var/penstock.sqlite", None),
        ("/home/a b/penstock.sqlite", "nfs4"),
        ("/scratch/me/penstock.sqlite", "lustre"),
        ("/scratch/local/penstock.sqlite", None),
    ],
)
def test_a_file_lies_on_a_disk_of_its_host(file: str, kind: str | None):
    if kind is None:
        refuse_shared_disk(Path(file), MOUNTED)
        return
    with pytest.raises(UnsupportedRequest, match=kind) as refused:
        refuse_shared_disk(Path(file), MOUNTED)
    assert "postgresql://" in str(refused.value)
