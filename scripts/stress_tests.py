"""Stress of tests: runs them again and again, idle and beside busy processes, and names the failing ones.

Usage: ``scripts/stress-tests``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

from penstock.workers.child import die_with

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
BUSY = "while True: pass"
NOTHING_TO_RUN = 5
"""Pytest's exit code where no test is chosen."""


@dataclass
class Tally:
    """A count of runs and failures by test, each first error, and the tests to run many times."""

    runs: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)

    def read(self, log: Path) -> Counter[str]:
        """Add the reports of a log; return how many tests passed and failed in it."""
        outcomes: Counter[str] = Counter()
        for line in log.read_text().splitlines() if log.exists() else ():
            report = json.loads(line)
            name = report["test"]
            if report["is_busy"]:
                self.busy.add(name)
            if report["outcome"] == "failed":
                self.fail(name, report["error"])
                outcomes["failed"] += 1
            elif report["when"] == "call":
                outcomes[report["outcome"]] += 1
            self.runs[name] += report["when"] == "setup"
        return outcomes

    def fail(self, name: str, error: str) -> None:
        """Count a failure."""
        self.failures[name] += 1
        self.errors.setdefault(name, error)

    def lines(self) -> list[str]:
        """Return a line for each test that failed, the most frequent first."""
        return [
            f"{number:4d} of {max(number, self.runs[name])}  {name}: {self.errors[name]}"
            for name, number in self.failures.most_common()
        ]


@contextmanager
def load(number: int) -> Iterator[None]:
    """Keep processors busy with so many processes, which end with the block and with this process."""
    parent = os.getpid()
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", BUSY], process_group=0, preexec_fn=lambda: die_with(parent))
        for _ in range(number)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


class Sessions:
    """The runner that starts pytest and reads its reports."""

    def __init__(self, tally: Tally, arguments: Sequence[str], folder: Path, root: Path) -> None:
        self._tally, self._arguments, self._folder, self._root = tally, arguments, folder, root
        self._number = 0
        self.cpu_s = 0.0

    def run(self, label: str, *shares: Sequence[str]) -> None:
        """Run a session for each share of arguments, all at once; print their results."""
        begin, cpu = time.monotonic(), _cpu_s()
        started = [self._start(share) for share in shares]
        try:
            for process, _ in started:
                process.wait()
        finally:
            for process, _ in started:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        outcomes: Counter[str] = Counter()
        for process, log in started:
            outcome_counts = self._tally.read(log)
            outcomes += outcome_counts
            if process.returncode not in (0, NOTHING_TO_RUN) and not outcome_counts["failed"]:
                output = log.with_suffix(".txt").read_text(errors="replace").strip().splitlines()
                self._tally.fail(f"pytest, {label}", f"exit code {process.returncode}: {' | '.join(output[-3:])}")
        counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items())) or "no tests"
        self.cpu_s += _cpu_s() - cpu
        print(f"{label}: {counts}; {_duration(begin, _cpu_s() - cpu)}", flush=True)

    def _start(self, share: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
        self._number += 1
        log = self._folder / f"{self._number}.jsonl"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "stress",
            "-p",
            "no:cacheprovider",
            f"--stress-log={log}",
        ]
        paths = [str(TESTS / "ci"), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        parent = os.getpid()
        with log.with_suffix(".txt").open("w") as output:
            process = subprocess.Popen(
                [*command, *self._arguments, *share],
                cwd=self._root,
                env=environment,
                stdout=output,
                stderr=output,
                preexec_fn=lambda: die_with(parent),
            )
        return process, log


def _duration(begin: float, cpu_s: float) -> str:
    return f"{time.monotonic() - begin:.0f} s, {cpu_s:.0f} s of CPU time"


def _cpu_s() -> float:
    """Return the CPU seconds of all processes that ended and of their children; the load counts when it ends."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def many_times(tally: Tally, times: int, workers: int, folder: Path) -> list[list[str]]:
    """Return the arguments of each worker: its share of the tests that were found busy, file by file."""
    shares: list[list[str]] = [[] for _ in range(workers)]
    for name in sorted(tally.busy):
        shares[crc32(name.partition("::")[0].encode()) % workers].append(name)
    shares_of_arguments = []
    for number, names in enumerate(share for share in shares if share):
        only = folder / f"share-{number}.txt"
        only.write_text("\n".join(names))
        files = sorted({name.partition("::")[0] for name in names})
        shares_of_arguments.append([f"--stress-only={only}", f"--stress-times={times}", *files])
    return shares_of_arguments


def main(words: Sequence[str], *, tier: Sequence[str], root: Path = ROOT) -> int:
    """Run the command; return 1 when a test ever failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--idle", type=int, default=3, help="runs of all tests without load")
    parser.add_argument("--loaded", type=int, default=2, help="runs of all tests under load")
    parser.add_argument("--times", type=int, default=50, help="runs of each busy test under load")
    parser.add_argument("--load", type=int, default=8, help="busy processes")
    parser.add_argument("--workers", type=int, default=(os.cpu_count() or 1) + 1, help="processes that run tests")
    chosen, others = parser.parse_known_args(words)
    paths = [word for word in others if not word.startswith("-") and (root / word.partition("::")[0]).exists()]
    options = [word for word in others if word not in paths]
    tally, begin = Tally(), time.monotonic()
    alone = ["-n", str(chosen.workers), "--dist", "loadscope", "--no-loadscope-reorder", *paths]
    with TemporaryDirectory(prefix="penstock-stress-") as place:
        folder = Path(place)
        sessions = Sessions(tally, [*tier, *options], folder, root)
        for number in range(chosen.idle):
            sessions.run(f"idle, {number + 1} of {chosen.idle}", alone)
        with load(chosen.load):
            for number in range(chosen.loaded):
                sessions.run(f"beside {chosen.load} busy processes, {number + 1} of {chosen.loaded}", alone)
            if not chosen.idle + chosen.loaded:
                sessions.run("once, to see which tests are busy", alone)
            if shares := many_times(tally, chosen.times, chosen.workers, folder):
                sessions.run(f"{len(tally.busy)} busy tests, {chosen.times} times each, under load", *shares)
    for line in tally.lines():
        print(line)
    total, failed = tally.runs.total(), tally.failures.total()
    counts = f"{total} runs of {len(tally.runs)} tests, {failed} failures of {len(tally.failures)}"
    print(f"{counts}; {_duration(begin, sessions.cpu_s)}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:], tier=["--tier", "ci"]))
