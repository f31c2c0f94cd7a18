"""Soak of a service: kills its parts at random moments, while a client requests plans without a break.

Services, workers, their fork servers and solvers die, and on PostgreSQL the server and processes of connections. The
soak runs two services without workers, two workers, and a separate PostgreSQL or one SQLite file. It
checks that no accepted job is lost, every one ends, none has two different answers, its events are in order and do not
change once reported, nothing answers 500, and no process is left without its parent.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.schemas.errors import RunFailed
from penstock.workers import forking
from soaking import postgres
from soaking.load import Load
from soaking.processes import Processes, command_of, marked, parent_of, refuse_orphans

SERVICES = ("service0", "service1")
WORKERS = ("worker0", "worker1")
SETTINGS = {
    "PENSTOCK_WARM_UP": "false",
    "PENSTOCK_SOLVE_ENTRY": "soaking.solver:solve",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))),
    "PENSTOCK_SOLVE_WORKERS": "1",
    "PENSTOCK_LEASE_S": "2",
    "PENSTOCK_MAX_ATTEMPTS": "1000",
    "PENSTOCK_UPGRADE_DATABASE": "true",
}
WEIGHTS = {"worker": 4, "service": 3, "solver": 3, "forkserver": 2, "database": 2, "backend": 2}
"""Relative frequency of each victim. A ``backend`` is the process of one connection to PostgreSQL."""

OF_POSTGRESQL = frozenset({"database", "backend"})

KILLED = frozenset({"solver-killed", "out-of-memory"})
"""Error codes of a job whose solver is killed; a kill looks like a lack of memory."""

AWAY_S = 1.0
"""The longest time that a victim stays away, and between two deaths."""


class Soak:
    """One soak; at most ``most_at_once`` deaths before a job that was accepted later has to have ended."""

    def __init__(
        self, directory: Path, kills: int, seed: int, say: Callable[[str], None], most_at_once: int, engine: str
    ) -> None:
        self._kills, self._random, self._say, self._most_at_once = kills, random.Random(seed), say, most_at_once
        self._directory = directory
        self._processes = Processes(directory)
        self._database = postgres.Postgres(self._processes) if engine == "postgresql" else None
        self._ports = {name: _free_port() for name in SERVICES}
        self._load = Load([f"http://127.0.0.1:{port}" for port in self._ports.values()], seed)
        self.killed: dict[str, int] = {}
        self.resumed_s: list[float] = []

    def run(self) -> None:
        """Raise RunFailed where the soak finds a fault."""
        try:
            if self._database is not None:
                self._database.start()
            for name in (*SERVICES, *WORKERS):
                self._start(name)
            self._load.start()
            self._go_on("start")
            while sum(self.killed.values()) < self._kills:
                self._some_deaths()
            self._load.stop()
            self._load.settle(self._say, self._processes.refuse_dead)
        finally:
            self._processes.stop(last=[*SERVICES, postgres.NAME], number=signal.SIGTERM)
            if self._database is not None:
                self._database.remove()
        refuse_orphans()
        self._refuse_unexplained_failures()

    def _start(self, name: str) -> None:
        if name == postgres.NAME:
            assert self._database is not None
            self._database.start()
            return
        url = self._database.url if self._database is not None else str(self._directory / "soak.sqlite")
        command = [sys.executable, "-P", "-m", "penstock.cli.main"]
        if name in SERVICES:
            command += ["serve", "--port", str(self._ports[name]), "--slots", "0", "--database", url]
        else:
            command += ["worker", "--slots", "1", "--database", url]
        self._processes.start(name, command, SETTINGS)

    def _some_deaths(self) -> None:
        number = min(self._random.randint(1, self._most_at_once), self._kills - sum(self.killed.values()))
        kinds = [self._kill_one() for _ in range(number)]
        self._go_on(" + ".join(sorted(kinds)))
        refuse_orphans()

    def _kill_one(self) -> str:
        time.sleep(self._random.uniform(0.0, AWAY_S))
        kinds = [kind for kind in WEIGHTS if kind not in OF_POSTGRESQL or self._database is not None]
        kind = self._random.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if victims := self._unnamed(kind):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(victims), signal.SIGKILL)
        else:
            kind = kind if kind in ("service", "database") else "worker"
            name = self._random.choice({"worker": WORKERS, "service": SERVICES, "database": (postgres.NAME,)}[kind])
            self._processes.kill(name)
            time.sleep(self._random.uniform(0.0, AWAY_S))
            self._start(name)
        self.killed[kind] = self.killed.get(kind, 0) + 1
        return kind

    def _unnamed(self, kind: str) -> list[int]:
        """Return the processes of a kind that were not started by this one, and are not to be started again by it."""
        match kind:
            case "solver":
                return _forked()[1]
            case "forkserver":
                return _forked()[0]
            case "backend" if self._database is not None:
                return self._database.backends()
        return []

    def _go_on(self, what: str) -> None:
        """Wait until a job has ended that was accepted after this call began."""
        began = time.monotonic()
        while not self._load.finished_since(began):
            self._load.refuse_fault()
            self._processes.refuse_dead()
            time.sleep(0.05)
        took_s = time.monotonic() - began
        self.resumed_s.append(took_s)
        self._say(f"{sum(self.killed.values()):4d} deaths; after {what}: a new job was done after {took_s:.1f} s")

    def _refuse_unexplained_failures(self) -> None:
        """Refuse failed jobs whose solver was not killed: a killed solver is the only reason for a failure."""
        failed = [job.code for job in self._load.jobs.values() if job.state != "succeeded"]
        killed = self.killed.get("solver", 0)
        if len(failed) > killed or not KILLED.issuperset(failed):
            raise RunFailed(f"{len(failed)} jobs failed ({failed}), and {killed} solvers were killed")

    def summary(self) -> str:
        """Return a summary of the soak in words."""
        jobs = self._load.jobs.values()
        attempts = [sum(event["data"].get("state") == "running" for event in job.events) for job in jobs]
        failed = sum(job.state == "failed" for job in jobs)
        return (
            f"killed: {self.killed}; {len(jobs)} jobs accepted, all ended ({failed} with the death of their solver), "
            f"{sum(number > 1 for number in attempts)} of them taken over; {self._load.refused} requests refused with "
            f"Retry-After, {self._load.unanswered} unanswered; a new job was done after a median of "
            f"{statistics.median(self.resumed_s):.1f} s, at most {max(self.resumed_s):.1f} s; "
            "no job lost, none with two answers, events in order, no orphan"
        )


def run(directory: Path, kills: int, seed: int, say: Callable[[str], None], most_at_once: int, *, engine: str) -> None:
    """Run one soak on ``engine`` (``postgresql`` or ``sqlite``), and pass its summary to ``say``. Raises RunFailed."""
    soak = Soak(directory, kills, seed, say, most_at_once, engine)
    soak.run()
    say(soak.summary())


def _forked() -> tuple[list[int], list[int]]:
    """Return the fork servers, and the solvers that are their children."""
    alike = {pid for pid in marked() if forking.__name__ in command_of(pid)}
    children = [pid for pid in alike if parent_of(pid) in alike]
    return sorted(alike.difference(children)), sorted(children)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
