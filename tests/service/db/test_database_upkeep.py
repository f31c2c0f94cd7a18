"""``penstock db`` on both engines: check, backup while others write, restore, upgrade, prune; and what each refuses."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from penstock.cli.main import main
from penstock.examples.tiny import tiny_plan_file
from penstock.schemas.plan import PlanFile
from penstock.service.db.database import Database
from penstock.service.db.document_store import Filed, Stores
from penstock.service.db.tables import DEFAULT_TENANT, documents, job_events, jobs, workers
from penstock.service.jobs.queue import JobQueue, NewJob

Penstock = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def penstock(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Penstock:
    """The command line in this process: exit code, what it printed as JSON, what it said of an error."""
    monkeypatch.delenv("PENSTOCK_DATABASE", raising=False)

    def run(command: str, *arguments: str, database: str) -> tuple[int, Any, str]:
        code = main(["db", command, *arguments, "--database", database, "--json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else None, printed.err

    return run


@pytest.fixture
def filled(database: Database) -> Database:
    """A database with a plan, its documents and a job."""
    file = PlanFile.parse(tiny_plan_file())
    store = Stores(database).of(DEFAULT_TENANT)
    store.keep(Filed.of(file.request))
    store.put(file.plan)
    add_job(database, "first")
    return database


def add_job(database: Database, key: str) -> None:
    job = NewJob(request_hash="sha256:" + "0" * 64, cache_key=key, limit_ms=1000)
    JobQueue(database).enqueue(DEFAULT_TENANT, job)


@contextmanager
def a_writer(url: str) -> Iterator[list[int]]:
    """Write jobs all the time, as a service does; the list grows with each job."""
    ending, written = threading.Event(), [0]

    def write() -> None:
        database = Database(url)
        for number in count(1):
            if ending.is_set():
                break
            add_job(database, f"meanwhile{number}")
            written.append(number)
        database.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield written
    finally:
        ending.set()
        thread.join()


@pytest.fixture
def other_url(engine_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Another, empty database of the same engine."""
    if engine_url.startswith("sqlite"):
        yield str(tmp_path / "other.sqlite")
        return
    postgres = request.getfixturevalue("postgres")
    url = postgres.new_database()
    yield url
    postgres.drop(url)


@pytest.mark.cases(1)
def test_a_backup_made_while_somebody_writes_is_whole(
    filled: Database, engine_url: str, other_url: str, tmp_path: Path, penstock: Penstock
):
    file = tmp_path / "backup"
    with a_writer(engine_url) as written:
        while len(written) < 20:
            pass
        code, report, _ = penstock("backup", str(file), database=engine_url)
        assert code == 0
        assert report["size_bytes"] == file.stat().st_size
        after = len(written)
    assert file.stat().st_mode & 0o077 == 0, "it holds the hashes of keys"
    assert penstock("restore", str(file), database=other_url)[0] == 0
    code, report, _ = penstock("check", database=other_url)
    assert (code, report["ok"], report["faults"]) == (0, True, [])
    assert report["rows"]["documents"] == report["documents"] == 4
    assert 20 <= report["rows"]["jobs"] <= after + 2
    copy = Database(other_url if "://" in other_url else f"sqlite:///{other_url}")
    with copy.read() as connection:
        told_of = connection.scalar(sa.select(sa.func.count(job_events.c.job_id.distinct())))
    assert told_of == report["rows"]["jobs"], "a job and its first event are one transaction"
    store = Stores(copy).of(DEFAULT_TENANT)
    address = PlanFile.parse(tiny_plan_file()).plan.content_hash()
    assert store.plan_file(address).plan.content_hash() == address
    add_job(copy, "after")
    copy.close()
    assert list(tmp_path.glob(".*.part")) == []


@pytest.mark.cases(1)
def test_what_is_there_is_replaced_only_when_that_is_said_and_nobody_works(
    filled: Database, engine_url: str, tmp_path: Path, penstock: Penstock
):
    file = tmp_path / "backup"
    assert penstock("backup", str(file), database=engine_url)[0] == 0
    assert "already exists" in penstock("backup", str(file), database=engine_url)[2]
    add_job(filled, "later")
    assert "--replace" in penstock("restore", str(file), database=engine_url)[2]
    now = int(time.time() * 1000)
    with filled.write() as connection:
        row = {"id": "w", "host": "far", "pid": 7, "slots": 1, "started_ms": now, "seen_ms": now, "version": "0"}
        connection.execute(workers.insert().values(**row))
    assert "process 7 on far" in penstock("restore", str(file), "--replace", database=engine_url)[2]
    with filled.write() as connection:
        connection.execute(workers.delete())
    filled.close()
    assert penstock("restore", str(file), "--replace", database=engine_url)[0] == 0
    with filled.read() as connection:
        assert connection.scalars(sa.select(jobs.c.cache_key)).all() == ["first"]


@pytest.mark.cases(1)
def test_a_torn_backup_is_refused_by_name_and_nothing_changes(
    filled: Database, engine_url: str, other_url: str, tmp_path: Path, penstock: Penstock
):
    whole, torn = tmp_path / "backup", tmp_path / "torn?.backup"
    assert penstock("backup", str(whole), database=engine_url)[0] == 0
    add_job(filled, "later")
    filled.close()
    content = whole.read_bytes()
    for part in (20, 300, len(content) // 2, len(content) - 1000):
        torn.write_bytes(content[:part])
        for options, url in ((["--replace"], engine_url), ([], other_url)):
            code, _, words = penstock("restore", str(torn), *options, database=url)
            assert code == 65, words
            assert f"the backup {str(torn)!r} is damaged or not complete" in words
            assert "nothing was changed" in words
    with filled.read() as connection:
        assert set(connection.scalars(sa.select(jobs.c.cache_key))) == {"first", "later"}
    if filled.is_sqlite:
        assert not Path(other_url).exists()
        with closing(sqlite3.connect(tmp_path / "another's.sqlite")) as file:
            file.execute("CREATE TABLE songs (name text)")
        code, _, words = penstock("restore", str(tmp_path / "another's.sqlite"), "--replace", database=engine_url)
        assert (code, "not a database of Penstock" in words) == (65, True)


def test_a_check_names_what_is_wrong(filled: Database, engine_url: str, penstock: Penstock):
    code, report, _ = penstock("check", database=engine_url)
    assert (code, report["revision"], report["rows"]["jobs"]) == (0, report["head"], 1)
    assert report["engine"].startswith("SQLite 3" if filled.is_sqlite else "PostgreSQL 1")
    assert report["size_bytes"] > 10_000
    kinds = documents.c.kind
    with filled.write() as connection:
        connection.execute(documents.update().where(kinds == "plan").values(body=b'{"name": "another"}'))
        connection.execute(documents.delete().where(kinds == "profile"))
    code, report, _ = penstock("check", database=engine_url)
    assert (code, report["ok"]) == (1, False)
    assert len(report["faults"]) == 2
    assert "has another content than its address says" in " ".join(report["faults"])
    assert "names profile sha256:" in " ".join(report["faults"])


def test_an_upgrade_makes_tables_and_does_nothing_the_next_time(engine_url: str, penstock: Penstock):
    if not engine_url.startswith("sqlite"):
        code, report, _ = penstock("check", database=engine_url)
        assert code == 1
        assert "it is empty" in report["faults"][0]
    first = penstock("upgrade", database=engine_url)[1]
    second = penstock("upgrade", database=engine_url)[1]
    assert (first["before"], second["before"]) == (None, first["revision"])
    assert penstock("check", database=engine_url)[0] == 0


def test_pruning_says_what_has_gone(filled: Database, engine_url: str, penstock: Penstock):
    long_ago = {"created_ms": 1, "finished_ms": 1, "state": "cancelled"}
    with filled.write() as connection:
        connection.execute(jobs.update().values(**long_ago))
    code, report, _ = penstock("prune", "--older-than", "90d", database=engine_url)
    assert (code, report) == (0, {"jobs": 1, "answers": 0, "sweeps": 0, "idempotency": 0, "documents": 0})
    assert "at least 2 days" in penstock("prune", "--older-than", "1h", database=engine_url)[2]


def test_what_cannot_be_is_refused_in_words(filled: Database, engine_url: str, tmp_path: Path, penstock: Penstock):
    absent = str(tmp_path / "absent.sqlite")
    for command in (["check"], ["backup", str(tmp_path / "b")]):
        code, _, message = penstock(*command, database=absent)
        assert (code, "there is no database" in message) == (1, True)
    assert not os.path.exists(absent)
    wrong = tmp_path / "wrong"
    wrong.write_text("no backup")
    code, _, message = penstock("restore", str(wrong), "--replace", database=engine_url)
    assert code == 65
    assert "is not a backup of a" in message
    code, _, message = penstock("check", database="mysql://user:secret@host/name")
    assert code == 65
    assert "SQLite and PostgreSQL" in message
    assert "secret" not in message


def test_a_database_that_cannot_be_written_says_so(filled: Database, engine_url: str, penstock: Penstock):
    if filled.is_sqlite:
        engine_url += "?mode=ro&uri=true"
        engine_url = engine_url.replace("sqlite:///", "sqlite:///file:")
    else:
        name = filled.url.database
        with filled.write() as connection:
            connection.execute(sa.text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
        filled.close()
    code, report, message = penstock("check", database=engine_url)
    assert code == 1
    assert "cannot be written" in " ".join(report["faults"]) if report else message
