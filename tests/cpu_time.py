"""CPU seconds of tests and of the processes that they start, printed at the end by room and by function.

A process counts for the tests during which it runs, also one that outlives them, and a fixture for the test that makes
it. The compiler's work in the tests' own process is left out of a test's time, because kernels are kept on disk. The
total has everything: imports, collection and kernels that are compiled.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from numba.core import event

SHOWN = 15
TABLE = Path(__file__).resolve().parents[1] / "out/cpu-times.tsv"
"""CPU seconds, number of cases and name of each test function."""
KEY = "cpu_s"
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its descendants, whether they run or have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usages) + sum(_running_s("self"))


def _running_s(parent: int | str) -> Iterator[float]:
    """Yield the seconds of each descendant that runs, with what it has waited for; they may end meanwhile."""
    with suppress(OSError):
        for thread in Path(f"/proc/{parent}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                with suppress(OSError):
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    yield sum(map(int, fields[11:15])) / TICKS
                yield from _running_s(child)


class CpuTimes:
    """Measures where tests run, and adds up where their reports arrive.

    With ``limit_s`` tests are named whose calls take longer, unless they are among ``slow``. None fails, because a busy
    machine takes more CPU time for the same.
    """

    def __init__(self, limit_s: float | None = None, slow: Collection[str] = ()) -> None:
        self.calls: dict[str, float] = {}
        self.others: dict[str, float] = {}
        self._limit_s, self._slow = limit_s, slow
        self._of_workers = self._last = 0.0
        self._compiling = event.TimingListener()

    def _measured_s(self) -> float:
        """Return the seconds without the compiler's time, which is nearly all CPU time."""
        return cpu_s() - (self._compiling.duration if self._compiling.done else 0.0)

    def pytest_sessionstart(self) -> None:
        event.register("numba:compile", self._compiling)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._last = self._measured_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        now = self._measured_s()
        report.cpu_s, self._last = max(0.0, now - self._last), now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the number that workers' reports bring with them."""
        times = self.calls if report.when == "call" else self.others
        times[report.nodeid] = times.get(report.nodeid, 0.0) + getattr(report, KEY, 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[KEY] = cpu_s()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._of_workers += getattr(node, "workeroutput", {}).get(KEY, 0.0)

    @property
    def too_slow(self) -> list[str]:
        """Tests above the limit that are not allowed to be."""
        if self._limit_s is None:
            return []
        return [
            name
            for name, seconds in self.calls.items()
            if seconds > self._limit_s and name.partition("[")[0] not in self._slow
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        total = usage.ru_utime + usage.ru_stime + self._of_workers if self._of_workers else cpu_s()
        times = {name: self.calls.get(name, 0.0) + self.others.get(name, 0.0) for name in {*self.calls, *self.others}}
        terminalreporter.section(f"CPU time: {total:.0f} s, of which tests {sum(times.values()):.0f} s")
        for title, part in (("rooms", _room), ("functions", _function)):
            terminalreporter.write_line(f"{title} that take longest, and how many cases they have:")
            for name, seconds, number in _longest(times, part)[:SHOWN]:
                terminalreporter.write_line(f"{seconds:8.1f} s {number:6d}  {name}")
        TABLE.parent.mkdir(exist_ok=True)
        lines = [f"{seconds:.2f}\t{number}\t{name}\n" for name, seconds, number in _longest(times, _function)]
        TABLE.write_text("".join(lines), encoding="utf-8")
        for name in self.too_slow:
            seconds = self.calls[name]
            terminalreporter.write_line(
                f"{name} takes {seconds:.1f} s of CPU time, and tests of the quick tier {self._limit_s} s: "
                "make it smaller, or mark it with pytest.mark.tier",
                yellow=True,
            )


def _longest(times: dict[str, float], part: Callable[[str], str]) -> list[tuple[str, float, int]]:
    """Return the parts of the tests' names that take longest, their seconds and numbers of cases."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for name, seconds in times.items():
        parts[part(name)].append(seconds)
    return sorted(((name, sum(each), len(each)) for name, each in parts.items()), key=lambda one: -one[1])


def _room(name: str) -> str:
    return name.partition("::")[0].rpartition("/")[0]


def _function(name: str) -> str:
    return name.partition("[")[0]
