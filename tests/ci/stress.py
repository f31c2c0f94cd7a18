"""A plugin for ``scripts/stress-tests``: notes which tests use processes, ports, sleep or browsers, and repeats tests.

It is loaded with ``-p stress``. Each report goes to ``--stress-log`` as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EVENTS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind"))
"""Audit events of what takes longer, or comes out otherwise, on a busy machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress-log", type=Path, help="the file that gets a line for each report")
    parser.addoption("--stress-only", type=Path, help="a file with the names of the tests to run, a line each")
    parser.addoption("--stress-times", type=int, default=1, help="how often all tests run, one time after the other")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Stress(config), "stress tests")


class Stress:
    """A plugin that notes busy tests of a session and runs its tests several times."""

    def __init__(self, config: pytest.Config) -> None:
        is_worker = hasattr(config, "workerinput")
        self._log: Path | None = None if is_worker else config.getoption("--stress-log")
        self._only: Path | None = config.getoption("--stress-only")
        self._times: int = config.getoption("--stress-times")
        self._has_met = False
        self._busy: set[Any] = set()
        """Fixtures that start a process, bind a socket or sleep when they are set up."""
        sys.addaudithook(self._note)
        self._sleep, time.sleep = time.sleep, self._noted_sleep  # it has no audit event in Python 3.11

    def _note(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            self._has_met = True

    def _noted_sleep(self, seconds: float) -> None:
        self._has_met = True
        self._sleep(seconds)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._only is not None:
            names = set(self._only.read_text().splitlines())
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
            items[:] = [item for item in items if item.nodeid in names]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests so many times; a session that runs them once does so as always."""
        if self._times == 1 or session.testsfailed or session.config.option.collectonly:
            return None
        turns = session.items * self._times
        for number, item in enumerate(turns):
            following = turns[number + 1] if number + 1 < len(turns) and turns[number + 1] is not item else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Forget what happened between two tests."""
        self._has_met = False

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        before, self._has_met = self._has_met, False
        try:
            return (yield)
        finally:
            if self._has_met:
                self._busy.add(fixturedef)
            self._has_met |= before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any) -> Iterator[None]:
        """Mark a busy test in its report, which a worker sends along."""
        report: Any = yield
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        report.is_busy = self._has_met or any(one in self._busy for several in fixtures for one in several)
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self._log is None:
            return
        line = {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "is_busy": getattr(report, "is_busy", False),
            "error": _error(report) if report.failed else "",
        }
        with self._log.open("a") as log:
            log.write(json.dumps(line) + "\n")


def _error(report: Any) -> str:
    """Return what went wrong, in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(report.longrepr if crash is None else crash.message).strip().splitlines()
    return "" if not lines else lines[0] if crash is not None else lines[-1]
