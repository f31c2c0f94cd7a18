"""A PostgreSQL server that a soak may kill: a separate cluster in a temporary directory.

It writes a commit to the system before it answers; only ``fsync`` is off, since no soak cuts the power.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from penstock.schemas.errors import MissingExtra, RunFailed, Unreachable
from soaking.processes import Processes, command_of, parent_of

NAME = "database"
_USER = "nobody"
_START_S = 60.0


class Postgres:
    """The server, one of ``processes`` under the name ``database``."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._programs = _programs()
        self._home = Path(tempfile.mkdtemp(prefix="penstock-soak-pg-"))
        if os.getuid() == 0:
            shutil.chown(self._home, _USER)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        where = ["-D", str(self._home / "data"), "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-locale", "-N"]
        done = subprocess.run(
            [*_unprivileged(), str(self._programs / "initdb"), *where],
            capture_output=True,
            text=True,
            cwd=self._home,
            check=False,
        )
        if done.returncode:
            raise RunFailed(f"initdb failed: {done.stderr}")

    @property
    def url(self) -> str:
        """The URL of the database that the soak uses."""
        return f"postgresql://{_USER}@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Start the server, again while a killed process holds its memory; return when it answers."""
        import psycopg

        until = time.monotonic() + _START_S
        while True:
            if self._processes.pid(NAME) is None:
                self._processes.start(NAME, self._command(), {})
            try:
                psycopg.connect(self.url, connect_timeout=5).close()
            except psycopg.OperationalError:
                if time.monotonic() > until:
                    raise Unreachable(f"PostgreSQL does not start; see {self._processes.log(NAME)}") from None
                time.sleep(0.1)
            else:
                return

    def backends(self) -> list[int]:
        """Return the processes of its connections; when one is killed, the server ends all of them and recovers."""
        server = self._processes.pid(NAME)
        places = (place for place in Path("/proc").iterdir() if place.name.isdigit())
        children = [int(place.name) for place in places if parent_of(int(place.name)) == server]
        return sorted(pid for pid in children if "127.0.0.1(" in command_of(pid))

    def remove(self) -> None:
        """Delete the server's files."""
        shutil.rmtree(self._home)

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self._port,
            "unix_socket_directories": "",
            "fsync": "off",
            "shared_buffers": "16MB",
        }
        options = [f"-c{name}={value}" for name, value in settings.items()]
        return [*_unprivileged(), str(self._programs / "postgres"), "-D", str(self._home / "data"), *options]


def _programs() -> Path:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    program = str(versions[-1]) if versions else shutil.which("initdb")
    if program is None:
        raise MissingExtra("this soak needs a PostgreSQL of its own", remedy="apt-get install postgresql")
    return Path(program).resolve().parent


def _unprivileged() -> list[str]:
    """Return the command that runs PostgreSQL without root, which it refuses, and ends it with a killed soak."""
    become = [f"--reuid={_USER}", "--regid=nogroup", "--clear-groups"]
    return ["setpriv", *(become if os.getuid() == 0 else []), "--pdeathsig=KILL"]
