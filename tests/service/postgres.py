"""A PostgreSQL server of the tests' own: a new cluster in a temporary directory, gone when they end."""

from __future__ import annotations

import glob
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest

USER = "postgres"
START_S = 60
OPTIONS = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "16MB"}
"""Safe against the death of its processes, not of the machine."""


def binaries() -> Path | None:
    """Return the directory of ``initdb`` and ``postgres``; None where PostgreSQL is not installed."""
    versions = glob.glob("/usr/lib/postgresql/*/bin/initdb")
    program = max(versions, key=lambda path: int(path.split("/")[4])) if versions else shutil.which("initdb")
    return None if program is None else Path(program).resolve().parent


class Cluster:
    """A running server that listens on a socket in its own directory, and its databases."""

    def __init__(self, home: Path, programs: Path) -> None:
        self.home, self._programs = home, programs
        self._numbers = itertools.count(1)
        self._server: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", str(home / "data"), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        self.start()

    def url(self, database: str) -> str:
        """Return the URL of a database, as Penstock takes it."""
        return f"postgresql://{USER}@/{database}?host={self.home}"

    def new_database(self) -> str:
        """Make an empty database; its URL."""
        name = f"penstock_{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return self.url(name)

    def drop(self, url: str) -> None:
        """Remove a database, whoever is connected to it."""
        self._execute(f"DROP DATABASE {psycopg.conninfo.conninfo_to_dict(url)['dbname']} WITH (FORCE)")

    def start(self) -> None:
        """Start the server and wait until it answers."""
        settings = [f"-c{name}={value}" for name, value in OPTIONS.items()]
        where = ["-D", str(self.home / "data"), "-k", str(self.home), "-clisten_addresses="]
        with (self.home / "log").open("ab") as log:
            command = [*_unprivileged(), str(self._programs / "postgres"), *where, *settings]
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                return self._execute("SELECT 1")
            except psycopg.OperationalError:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError("PostgreSQL did not start:\n" + (self.home / "log").read_text()) from None
                time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """End the server and its connections, which outlive one that is killed for a moment."""
        assert self._server is not None
        connections = psutil.Process(self._server.pid).children(recursive=True)
        self._server.send_signal(number)
        self._server.wait(30)
        assert psutil.wait_procs(connections, 30)[1] == []

    def restore(self) -> None:
        """Make it a running primary with its own settings again, whatever a test that failed has left."""
        assert self._server is not None
        if self._server.poll() is not None:
            self.start()
        if (self.home / "data" / "standby.signal").exists():
            self._execute("SELECT pg_promote()")
        self._execute("ALTER SYSTEM RESET ALL")
        self._execute("SELECT pg_reload_conf()")

    def kill(self) -> None:
        """End the server's processes as a crash would: at once, nothing is written down."""
        self.stop(signal.SIGQUIT)

    def _execute(self, statement: str) -> None:
        with psycopg.connect(host=str(self.home), user=USER, dbname="postgres", autocommit=True) as connection:
            connection.execute(statement)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*_unprivileged(), str(self._programs / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.home, check=False)
        assert done.returncode == 0, done.stderr


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Run a cluster that lives as long as the context; skip where PostgreSQL is not installed."""
    programs = binaries()
    if programs is None:
        pytest.skip("install Debian's postgresql")
    home = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    try:
        if os.getuid() == 0:
            shutil.chown(home, USER)
        cluster = Cluster(home, programs)
        try:
            yield cluster
        finally:
            cluster.kill()
    finally:
        shutil.rmtree(home)


def _unprivileged() -> list[str]:
    """Return the command that runs PostgreSQL without root, which it refuses, and ends it with a killed test run."""
    become = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups"] if os.getuid() == 0 else []
    return ["setpriv", *become, "--pdeathsig=INT"]
