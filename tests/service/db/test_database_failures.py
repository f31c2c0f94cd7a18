"""A database that is full, read-only or away: 503 with the reason, nothing lost, and all is well when it is back."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from postgres import Cluster
from service_process import Server

from penstock.examples.tiny import tiny_profile, tiny_request

pytestmark = pytest.mark.tier("nightly")

get = partial(httpx.get, timeout=None)
post = partial(httpx.post, timeout=None)
LINES_AT_ONCE, LINES_PER_S = 10, 3
"""The most lines, without requests: for what changes, each try of a worker (2/s) and of a listener (1/s)."""


def refused(answer: httpx.Response, *words: str) -> None:
    """Check that an answer is a refusal with its reason and the time to retry, without the place of the database."""
    assert answer.status_code == 503, answer.text
    assert answer.headers["Retry-After"]
    assert answer.headers["content-type"] == "application/problem+json"
    assert any(word in answer.json()["detail"] for word in words), answer.text
    assert "sqlite" not in answer.text
    assert "127.0.0.1" not in answer.text


def profile(number: int, size: int = 0) -> dict[str, Any]:
    """Return a profile unlike any other."""
    source = tiny_profile()["source"] | {"description": secrets.token_hex(size // 2)}
    return tiny_profile() | {"name": f"profile {number}", "source": source}


def solved(url: str, seed: int) -> dict[str, Any]:
    """Request a plan and wait for it."""
    request = tiny_request() | {"seed": seed, "planner": "gpipe"}
    answer = post(f"{url}/v1/plans", json=request, headers={"Prefer": "wait=300"})
    job: dict[str, Any] = answer.raise_for_status().json()
    return job


def until(what: Callable[[], bool]) -> None:
    """Wait for something."""
    while not what():
        time.sleep(0.05)


def fill(path: Path) -> None:
    """Write until there is no room."""
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(b"x" * 4096)


def quiet(server: Server, since: int) -> None:
    """Check that a server has logged its troubles, without a traceback and without a flood."""
    lines = [line for line in server.log[since:] if '"method"' not in line]
    assert "Traceback" not in "".join(lines)
    moments = [datetime.fromisoformat(json.loads(line)["timestamp"]).timestamp() for line in lines] or [0.0]
    assert len(lines) <= LINES_AT_ONCE + LINES_PER_S * (moments[-1] - moments[0]), "".join(lines)


def test_postgresql_is_a_standby_for_a_while_then_away_for_a_while(postgres: Cluster, postgresql_url: str):
    name = psycopg.conninfo.conninfo_to_dict(postgresql_url)["dbname"]
    postgres._execute(f"ALTER DATABASE {name} SET synchronous_commit = on")  # as where nobody only tests
    server = Server(postgresql_url, slots=1, lease_s=3)
    try:
        first = solved(server.url, 1)
        assert first["state"] == "succeeded"
        since = len(server.log)
        postgres.stop()
        (postgres.home / "data" / "standby.signal").touch()
        postgres.start()
        until(lambda: get(f"{server.url}/v1/jobs/{first['id']}").status_code == 200)
        refused(post(f"{server.url}/v1/profiles", json=profile(2)), "read-only", "recovery")
        postgres._execute("SELECT pg_promote()")
        until(lambda: post(f"{server.url}/v1/profiles", json=profile(2)).status_code < 300)
        accepted = post(f"{server.url}/v1/plans", json=tiny_request() | {"seed": 2, "planner": "gpipe"})
        postgres.stop(signal.SIGKILL)
        refused(get(f"{server.url}/v1/jobs/{first['id']}"), "does not answer")
        refused(post(f"{server.url}/v1/plans", json=tiny_request() | {"seed": 3}), "does not answer")
        not_ready = get(f"{server.url}/readyz")
        assert (not_ready.status_code, not_ready.json()["errors"][0]["pointer"]) == (503, "/database")
        assert get(f"{server.url}/healthz").status_code == 200
        time.sleep(2)  # for a flood, if there is one
        quiet(server, since)
        postgres.start()
        until(lambda: get(f"{server.url}/readyz").status_code == 200)
        job = f"{server.url}/v1/jobs/{accepted.json()['id']}"  # it outlives its database's death
        until(lambda: get(job).json()["state"] == "succeeded")
        assert solved(server.url, 3)["state"] == "succeeded"
        assert get(f"{server.url}/v1/jobs/{first['id']}").json() == first
    finally:
        assert server.stop() == 0


def test_a_sqlite_file_that_is_read_only(tmp_path: Path):
    path = tmp_path / "penstock.sqlite"
    server = Server(path, slots=1)
    first = solved(server.url, 1)
    assert server.stop() == 0
    server = Server(f"sqlite:///file:{path}?mode=ro&uri=true", slots=0)
    try:
        refused(post(f"{server.url}/v1/profiles", json=profile(1)), "readonly")
        assert get(f"{server.url}/v1/jobs/{first['id']}").json() == first
        quiet(server, 0)
    finally:
        assert server.stop() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A service whose database lies on a disk of 4 MB, in a separate mount namespace; and the disk as seen here."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a small disk of its own needs root and util-linux")
    inside = tmp_path / "disk"
    inside.mkdir()
    mount = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=4m none {inside} && exec "$@"', "sh"]
    server = Server(inside / "penstock.sqlite", around=mount, slots=1, lease_s=3)
    yield server, Path(f"/proc/{server.process.pid}/root{inside}")
    assert server.stop() == 0


def test_a_disk_that_is_full_for_a_while(small_disk: tuple[Server, Path]):
    server, disk = small_disk
    first = solved(server.url, 1)
    accepted = []
    since = len(server.log)
    fill(disk / "filler")
    number = 0
    while True:
        number += 1
        answer = post(f"{server.url}/v1/profiles", json=profile(number, 4000))
        if answer.status_code == 503:
            break
        accepted.append(answer.json()["hash"])
        assert number < 2000
    refused(answer, "full")
    assert get(f"{server.url}/v1/jobs/{first['id']}").json() == first
    assert get(f"{server.url}/healthz").status_code == 200
    quiet(server, since)
    (disk / "filler").unlink()
    until(lambda: post(f"{server.url}/v1/profiles", json=profile(number, 4000)).status_code < 300)
    assert solved(server.url, 2)["state"] == "succeeded"
    for address in accepted:
        assert get(f"{server.url}/v1/profiles/{address}").status_code == 200, "what was accepted is kept"


class Disk:
    """An ext4 file system in a file, mounted where a service keeps its database, in the service's mount namespace."""

    def __init__(self, directory: Path) -> None:
        self.image, self.mounted = directory / "image", directory / "disk"
        self.mounted.mkdir()
        with self.image.open("wb") as image:
            image.truncate(32 * 2**20)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)

    def serve(self, **settings: Any) -> Server:
        """Start a service on it."""
        command = f'mount -o loop,errors=remount-ro {self.image} {self.mounted} && exec "$@"'
        around = ["unshare", "-m", "sh", "-c", command, "sh"]
        return Server(self.mounted / "penstock.sqlite", around=around, **settings)

    def fail(self, server: Server) -> None:
        """Have the kernel find an error, and make it read-only, as it does with a disk that is broken."""
        os.sync()
        mounts = Path(f"/proc/{server.process.pid}/mountinfo").read_text().splitlines()
        device = next(line for line in mounts if line.split()[4] == str(self.mounted)).split(" - ")[1].split()[1]
        Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("a test")

    def repair(self) -> None:
        """Check it and mend it, as an administrator does before it can be mounted again."""
        done = subprocess.run(["e2fsck", "-fy", self.image], capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout


def test_a_disk_that_becomes_read_only_in_use(tmp_path: Path):
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None or not Path("/dev/loop-control").exists():
        pytest.skip("a broken disk needs root, e2fsprogs and loop devices")
    disk = Disk(tmp_path)
    server = disk.serve(slots=1, lease_s=3)
    try:
        first = solved(server.url, 1)
        since = len(server.log)
        accepted = post(f"{server.url}/v1/plans", json=tiny_request() | {"seed": 2}).json()
        disk.fail(server)
        for number in range(3):
            refused(post(f"{server.url}/v1/profiles", json=profile(number)), "disk I/O error")
            refused(post(f"{server.url}/v1/plans", json=tiny_request() | {"seed": 3}), "disk I/O error")
            assert get(f"{server.url}/v1/jobs/{first['id']}").json() == first
            assert get(f"{server.url}/v1/jobs/{accepted['id']}").status_code == 200
        until(lambda: get(f"{server.url}/readyz").status_code == 503)  # its worker cannot renew its row
        assert get(f"{server.url}/healthz").status_code == 200
        quiet(server, since)
    finally:
        assert server.stop() == 0
    disk.repair()
    server = disk.serve(slots=1, lease_s=3)
    try:
        assert server.client.jobs.get(accepted["id"], wait_s=30).state == "succeeded"
        assert get(f"{server.url}/v1/jobs/{first['id']}").json() == first
        assert solved(server.url, 4)["state"] == "succeeded"
    finally:
        assert server.stop() == 0


def test_postgresql_takes_no_writes_for_a_while(postgres: Cluster, postgresql_url: str):
    server = Server(postgresql_url, slots=1, lease_s=3)
    try:
        first = solved(server.url, 1)
        since = len(server.log)
        postgres._execute("ALTER SYSTEM SET default_transaction_read_only = on")
        postgres._execute("SELECT pg_reload_conf()")
        until(lambda: post(f"{server.url}/v1/profiles", json=profile(1)).status_code == 503)
        refused(post(f"{server.url}/v1/profiles", json=profile(1)), "read-only")
        refused(post(f"{server.url}/v1/plans", json=tiny_request() | {"seed": 3}), "read-only")
        assert get(f"{server.url}/v1/jobs/{first['id']}").json() == first
        assert get(f"{server.url}/healthz").status_code == 200
        quiet(server, since)
        postgres.restore()
        until(lambda: post(f"{server.url}/v1/profiles", json=profile(2)).status_code < 300)
        assert solved(server.url, 3)["state"] == "succeeded"
    finally:
        assert server.stop() == 0
