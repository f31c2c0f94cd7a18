"""Who does the tasks of a solve: this process, or worker processes that are killed at the limit.

A request of few plans (``SMALL``, a count) is solved here: processes would not be ready before it is done. A larger one
gets workers, also a single one where there is a limit, because only a process can be stopped inside a search. A process
with one thread forks, which takes milliseconds; any other starts fresh interpreters, as forking would copy locks that
nobody unlocks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound
from penstock.solvers.solve.outcome import Found, Outcome
from penstock.solvers.solve.processors import available_processors
from penstock.solvers.solve.tasks import Setting, Task
from penstock.solvers.solve.worker_process import Crash, end_with, serve

SMALL = 1_500
"""Layers × devices × numbers of micro-batches of a request that is solved in the calling process."""
LAUNCH = "import sys; from penstock.solvers.solve.worker_process import main; main(int(sys.argv[1]), int(sys.argv[2]))"
GRACE_S = 0.5
"""From the limit until workers are killed."""


class Round(Protocol):
    """Tasks, and what becomes of what they tell."""

    @property
    def tasks(self) -> Sequence[Task]:
        """By number."""

    @property
    def urgent(self) -> Sequence[int]:
        """All tasks, in the order in which processes begin them."""

    def wanted(self, number: int) -> bool:
        """Whether a task should be done at all; it may cease to be."""

    def started(self, number: int) -> None:
        """A task has begun."""

    def hear(self, number: int, message: Found | Bound | Outcome) -> None:
        """A task has found or proven something, or has ended."""

    def best_ns(self) -> int | None:
        """What tasks may know of the others."""


class Crew(Protocol):
    """Does rounds of tasks."""

    @property
    def parallel(self) -> bool:
        """Whether there are processes."""

    def work(self, round_: Round) -> None:
        """Until all tasks that are wanted have ended, or the limit."""

    def __enter__(self) -> Crew:
        """Ready."""

    def __exit__(self, *_: object) -> None:
        """End all processes."""


def is_small(problem: Problem) -> bool:
    """Whether a request is solved before processes would be ready."""
    return problem.num_layers * problem.num_devices * len(candidates(problem)) <= SMALL


def crew_of(setting: Setting, workers: int | None, most: int) -> Crew:
    """For so many tasks at a time at most; ``workers``: processes, by default as many as processors."""
    number = min(available_processors() if workers is None else workers, most)
    if is_small(setting.problem) or not sys.executable or (number == 1 and not setting.deadline.limited):
        return Here(setting)
    return Workers(setting, number)


@dataclass
class Here:
    """In this process, one task after the other."""

    setting: Setting
    parallel: bool = False

    def work(self, round_: Round) -> None:
        """In their order."""
        for number, task in enumerate(round_.tasks):
            if self.setting.deadline.passed:
                return
            if round_.wanted(number):
                round_.started(number)
                round_.hear(number, task.run(self.setting, _CallLink(round_, number)))

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


@dataclass(frozen=True)
class _CallLink:
    round_: Round
    number: int

    def best_ns(self) -> int | None:
        return self.round_.best_ns()

    def found(self, found: Found) -> None:
        self.round_.hear(self.number, found)

    def proven(self, bound: Bound) -> None:
        self.round_.hear(self.number, bound)


@dataclass
class _Worker:
    """A process: its pipe, how to kill it, and the task that it does."""

    pipe: Connection
    kill: Callable[[], int]
    task: int | None = None
    best_ns: int | None = None


@dataclass
class Workers:
    """``number`` processes; those that are killed or die are replaced while there is work."""

    setting: Setting
    number: int
    parallel: bool = True
    _staff: list[_Worker] = field(default_factory=list)

    def __enter__(self) -> Workers:
        for _ in range(self.number):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self._staff):
            self._dismiss(worker)

    def work(self, round_: Round) -> None:
        """The urgent ones first; at the limit what still works is killed."""
        waiting = list(round_.urgent)
        while True:
            for worker in [w for w in self._staff if w.task is not None and not round_.wanted(w.task)]:
                self._dismiss(worker)
            waiting = [number for number in waiting if round_.wanted(number)]
            while waiting and not self.setting.deadline.passed and self._idle() is not None:
                self._assign(round_, waiting.pop(0))
            busy = {worker.pipe: worker for worker in self._staff if worker.task is not None}
            if not busy:
                return
            left_s = self.setting.deadline.left_s
            ready = wait(list(busy), None if left_s is None else max(0.0, left_s + GRACE_S))
            if not ready:
                for worker in busy.values():
                    self._dismiss(worker)
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                self._read(round_, busy[pipe])
            self._share(round_)

    def _idle(self) -> _Worker | None:
        idle = next((worker for worker in self._staff if worker.task is None), None)
        if idle is None and len(self._staff) < self.number:
            idle = self._start()
        return idle

    def _assign(self, round_: Round, number: int) -> None:
        worker = self._idle()
        assert worker is not None
        worker.task, worker.best_ns = number, round_.best_ns()
        with suppress(BrokenPipeError):  # its end is noticed when it is read
            worker.pipe.send((number, round_.tasks[number], worker.best_ns))
        round_.started(number)

    def _read(self, round_: Round, worker: _Worker) -> None:
        """All that a worker has written."""
        number = worker.task
        assert number is not None
        try:
            while worker.task is not None and worker.pipe.poll():
                _, message = worker.pipe.recv()
                if isinstance(message, Crash):
                    raise RuntimeError(f"{round_.tasks[number].name} met an error of its own:\n{message.traceback}")
                if isinstance(message, Outcome):
                    worker.task = None
                round_.hear(number, message)
        except (EOFError, ConnectionResetError):
            round_.hear(number, Outcome(unfinished=True, lost=_ending(self._dismiss(worker))))

    def _share(self, round_: Round) -> None:
        best_ns = round_.best_ns()
        for worker in self._staff:
            if worker.task is not None and best_ns is not None and worker.best_ns != best_ns:
                worker.best_ns = best_ns
                with suppress(BrokenPipeError):
                    worker.pipe.send(best_ns)

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        if one_thread():
            worker = _Worker(ours, _forked(ours, theirs, [w.pipe for w in self._staff], self.setting))
        else:
            worker = _Worker(ours, _launched(theirs))
            ours.send(self.setting)
        self._staff.append(worker)
        return worker

    def _dismiss(self, worker: _Worker) -> int:
        """Kill a process; how it ended."""
        self._staff.remove(worker)
        status = worker.kill()
        worker.pipe.close()
        return status


def one_thread() -> bool:
    """Whether this process may fork without taking along locks that another thread holds."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return False


def _forked(ours: Connection, theirs: Connection, others: Sequence[Connection], setting: Setting) -> Callable[[], int]:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            end_with(parent)
            for pipe in (ours, *others):
                pipe.close()
            serve(theirs, setting)
        finally:
            os._exit(0)
    theirs.close()

    def kill() -> int:
        os.kill(pid, 9)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return kill


def _launched(theirs: Connection) -> Callable[[], int]:
    with theirs:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", LAUNCH, str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        )

    def kill() -> int:
        process.kill()
        return process.wait()

    return kill


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"
