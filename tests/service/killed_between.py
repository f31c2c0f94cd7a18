"""Kills services between commit and the keeping of the answer: ``python tests/service/killed_between.py --times 50``.

A child is forked for each kill, so that it dies as a process does: at a function that the child has replaced.
"""

# ruff: noqa: T201  (it is a command as well)

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
from in_process import in_process

from penstock.examples.tiny import tiny_plan_file, tiny_request, tiny_sweep
from penstock.planning.programs.lowered import lower
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.plan import PlanFile
from penstock.service.db.database import Database
from penstock.service.db.tables import jobs, runs, sweeps
from penstock.service.http.routes.agents import SYNC_EXAMPLE
from penstock.service.idempotency import Doing, Idempotency
from penstock.workers.forkserver import Forkserver

REQUESTS: dict[str, tuple[dict[str, Any], sa.Table]] = {
    "/v1/sweeps": (tiny_sweep(), sweeps),
    "/v1/runs": ({"schema_version": 1, "plan": tiny_plan_file(), "model": "gpt", "steps": 3}, runs),
    "/v1/plans": (tiny_request() | {"planner": "gpipe"}, jobs),
}
"""Requests, and the table whose rows each creates. No job is solved, and each is cancelled before the next try."""

AFTER_COMMIT, BEFORE_COMMIT = (Idempotency, "keep"), (Doing, "note")


@asynccontextmanager
async def service(directory: Path, url: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a service on a database, with the agents of the tiny plan; it starts no process."""
    async with in_process(directory, database=url, **settings) as client:
        for node in ("node0", "node1"):
            device = {"id": f"{node}/0", "kind": "cpu", "memory_bytes": 4 * 10**9}
            body = SYNC_EXAMPLE | {"incarnation": node, "devices": [device], "models": ["gpt"]}
            assert (await client.post(f"/v1/agents/{node}:sync", json=body)).is_success
        yield client


async def post(directory: Path, url: str, path: str, key: str, **settings: Any) -> httpx.Response:
    """Send a request to a new service."""
    async with service(directory, url, **settings) as client:
        return await client.post(path, json=REQUESTS[path][0], headers={"Idempotency-Key": key})


def post_and_die(directory: Path, url: str, path: str, key: str, at: tuple[type, str], **settings: Any) -> None:
    """Send a request to a new service in a child, which is killed when it comes to a function."""

    lower(PlanFile.parse(tiny_plan_file()), RunOptions(), 3)  # loads the judge, before an agent can grow old

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            setattr(*at, die)
            asyncio.run(post(directory, url, path, key, **settings))
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "it was not killed"


def created_ids(url: str, path: str) -> list[str]:
    """Return the ids of the objects that requests to a path have created."""
    database = Database(url)
    database.create()
    table = REQUESTS[path][1]
    with database.read() as connection:
        query = sa.select(table.c.id).order_by(table.c.id)
        if path == "/v1/plans":
            query = query.where(jobs.c.parent_id.is_(None))
        ids = list(connection.scalars(query))
    database.close()
    return ids


def end_all(url: str) -> None:
    """End all jobs and runs, so that nothing hides a second one: equal jobs are shared, devices are in one run."""
    database = Database(url)
    with database.write() as connection:
        connection.execute(jobs.update().values(state="cancelled"))
        connection.execute(runs.update().values(state="cancelled"))
    database.close()


def doubled(directory: Path, url: str, path: str, times: int) -> tuple[int, int]:
    """Return how many of ``times`` requests to killed services were done twice, and how many lost their answer."""
    twice = lost = 0
    for number in range(times):
        before = set(created_ids(url, path))
        post_and_die(directory, url, path, f"{path}-{number}", AFTER_COMMIT)
        first = set(created_ids(url, path)) - before
        assert len(first) == 1, "it was killed before it had made anything"
        end_all(url)
        again = asyncio.run(post(directory, url, path, f"{path}-{number}"))
        twice += len(set(created_ids(url, path)) - before) != 1
        lost += not again.is_success or {again.json()["id"]} != first
    return twice, lost


def without_processes() -> Callable[[], None]:
    """Have no service of this process start a forkserver; call what is returned to have them again."""
    start, Forkserver.start = Forkserver.start, lambda self: None  # type: ignore[method-assign]

    def again() -> None:
        Forkserver.start = start  # type: ignore[method-assign]

    return again


def main() -> int:
    """Print the results; return the number of requests that were done twice or lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    times = parser.parse_args().times
    from postgres import running_cluster

    without_processes()
    wrong = 0
    with running_cluster() as cluster, tempfile.TemporaryDirectory() as directory:
        for url in (f"sqlite:///{directory}/killed.sqlite", cluster.new_database()):
            for path in REQUESTS:
                twice, lost = doubled(Path(directory), url, path, times)
                print(f"{url.split(':')[0]} {path}: {times} kills, {twice} doubled, {lost} lost", flush=True)
                wrong += twice + lost
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
