"""The workers of a solve: this process, or processes that are killed at the limit; and the order of their tasks.

A request of few plans (``SMALL``, a count) is solved here: processes would not be ready before it is done. Any other
request gets worker processes. With a time limit it gets at least one, because only a process can be stopped inside a
search. A process with one thread forks, which takes milliseconds; any other starts fresh interpreters, as forking would
copy locks that are never released.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from penstock.schemas.machine.processors import available_processors
from penstock.solvers.compiled.progress import tell
from penstock.solvers.model.micro_batches import size_of
from penstock.solvers.model.result import Bound, JudgedPlan
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.incumbent import Outcome, State
from penstock.solvers.solve.processes import end_with
from penstock.solvers.solve.tasks import Ask, Prove, Remedy, Task
from penstock.solvers.solve.worker_process import Compiling, Crash, serve

SMALL = 1_500
"""The largest request (``size_of``) that is solved in the calling process."""
MOST_WORKERS = 8
"""Most worker processes by default; with more, each would have little work."""
LAUNCH = """import sys
from penstock.solvers.solve.processes import end_with
end_with(int(sys.argv[2]))
from penstock.solvers.solve.worker_process import main
main(int(sys.argv[1]))
"""
GRACE_S = 0.5
"""Delay between the limit and killing workers, in seconds."""


@dataclass
class Round:
    """The tasks of a round, and what they have announced: outcomes are returned in the order of the tasks.

    The answer depends neither on the number of workers nor on which of them is faster:

    * A task judges as if it ran alone (``judging.Judge``). The best time of all tasks is shared, and rules out only
      plans
      that are *proven* to take longer. The best plan, and every plan that ties with it, is never ruled out.
    * Outcomes are taken in the order of the tasks: of plans that tie, the earlier task's plan stays. When the outcomes
      taken
      are enough (gap or proof), later tasks are dropped, and their results are not used. With a gap above 0 or a number
      of
      plans nothing is shared, and improvements are announced in that order too.

    A time limit is the exception: then the best of all plans counts, and tasks that were cut off are ``unfinished``.
    """

    tasks: Sequence[Task]
    state: State
    _outcomes: dict[int, Outcome] = field(default_factory=dict)
    _best: dict[int, JudgedPlan] = field(default_factory=dict)
    _proven: dict[int, tuple[Bound, ...]] = field(default_factory=dict)
    _working: dict[int, None] = field(default_factory=dict)
    _next: int = 0

    def is_wanted(self, number: int) -> bool:
        """Return whether a task may still matter, by the outcomes taken so far; later outcomes may make it needless."""
        return number not in self._outcomes and not self.state.enough(self.tasks[number].makes)

    def start(self, number: int) -> None:
        """Note that a task has begun."""
        self._working[number] = None
        self._report()

    def announce(self, number: int, news: JudgedPlan | Bound) -> None:
        """Announce a plan at once, if times are shared or it is its task's turn; keep it and bounds for that turn."""
        if isinstance(news, Bound):
            self._proven[number] = (*self._proven.get(number, ()), news)
        else:
            self._best[number] = news
            if self.state.shares_times or number == self._next:
                self.state.announce(news)
        self._report()

    def end(self, number: int, outcome: Outcome) -> Iterator[tuple[Task, Outcome]]:
        """Yield the outcomes whose turn it is, after one more outcome."""
        best, proven = self._best.get(number, outcome.best), self._proven.get(number, outcome.proven)
        self._outcomes[number] = replace(outcome, best=best, proven=proven)
        self._working.pop(number, None)
        while self._next < len(self.tasks):
            task = self.tasks[self._next]
            if self.state.enough(task.makes):
                self._spare(task)
            elif self._next not in self._outcomes:
                break
            else:
                yield task, self._outcomes[self._next]
            self._next += 1
        self._report()

    def lose(self, number: int, how: str) -> Iterator[tuple[Task, Outcome]]:
        """Yield as ``end`` for a task whose process died: its announced plans and bounds count."""
        yield from self.end(number, replace(self._cut_off(number), lost=how))

    def rest(self) -> Iterator[tuple[Task, Outcome]]:
        """Yield the remaining outcomes: tasks that were cut off or never begun count with what they announced."""
        for number in range(self._next, len(self.tasks)):
            if self.state.enough(self.tasks[number].makes):
                self._spare(self.tasks[number])
            else:
                yield self.tasks[number], self._outcomes.get(number) or self._cut_off(number)

    def _spare(self, task: Task) -> None:
        if isinstance(task, Ask):
            self.state.spare(task.name, task.makes)

    def _cut_off(self, number: int) -> Outcome:
        leaves_plans = not isinstance(self.tasks[number], Prove | Remedy)
        return Outcome(self._best.get(number), self._proven.get(number, ()), unfinished=leaves_plans)

    def _report(self) -> None:
        names = tuple(self.tasks[number].name for number in self._working)
        self.state.report(chain.from_iterable(self._proven.values()), names)


class Workforce(Protocol):
    """A worker, or several, for rounds of tasks."""

    def run(self, tasks: Sequence[Task], state: State) -> Iterator[tuple[Task, Outcome]]:
        """Run the tasks; yield outcomes in their order, each to be taken by ``state`` before the next."""

    def __enter__(self) -> Workforce:
        """Start processes, if there are any."""

    def __exit__(self, *_: object) -> None:
        """End all processes."""


def is_small(setting: Setting) -> bool:
    """Return whether a request is solved before processes would be ready, or soon after its limit."""
    return size_of(setting.problem) <= SMALL


def workers_for(state: State, workers: int | None, *, one_planner: bool) -> Workforce:
    """Return the workforce of a solve.

    ``workers``: the number of processes, 0: this process; None: as many as processors.
    """
    if workers == 0 or not sys.executable:
        return Here(state.setting)
    number = min(available_processors() if workers is None else workers, 1 if one_planner else MOST_WORKERS)
    if number == 1 and not state.setting.deadline.limited:
        return Here(state.setting)
    return Workers(replace(state.setting, whole=state.proofs.every_plan), number)


@dataclass
class Here:
    """This process, which does one task after the other."""

    setting: Setting

    def run(self, tasks: Sequence[Task], state: State) -> Iterator[tuple[Task, Outcome]]:
        """Do the tasks in their order, until the limit."""
        round_ = Round(tasks, state)
        for number, task in enumerate(tasks):
            if self.setting.deadline.passed:
                break
            if round_.is_wanted(number):
                round_.start(number)
                yield from round_.end(number, task.run(self.setting, _CallLink(round_, number)))
        yield from round_.rest()

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no process to end."""


@dataclass(frozen=True)
class _CallLink:
    round_: Round
    number: int

    def best_ns(self) -> int | None:
        return self.round_.state.shared_ns

    def announce(self, plan: JudgedPlan) -> None:
        self.round_.announce(self.number, plan)

    def proven(self, bound: Bound) -> None:
        self.round_.announce(self.number, bound)


@dataclass
class _Worker:
    """A worker process: its pipe, the function that kills it, its task, and the kernel that the task compiles."""

    pipe: Connection
    kill: Callable[[], int]
    task: int | None = None
    best_ns: int | None = None
    kernel: str | None = None


@dataclass
class Workers:
    """A workforce of ``number`` processes; dead processes are replaced while there is work."""

    setting: Setting
    number: int
    _staff: list[_Worker] = field(default_factory=list)

    def __enter__(self) -> Workers:
        for _ in range(self.number):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self._staff):
            self._dismiss(worker)

    def run(self, tasks: Sequence[Task], state: State) -> Iterator[tuple[Task, Outcome]]:
        """Run the tasks, tasks with a bound first; at the limit kill the processes that still work."""
        round_ = Round(tasks, state)
        waiting = sorted(range(len(tasks)), key=lambda number: not _early(tasks[number]))
        while True:
            for worker in [w for w in self._staff if w.task is not None and not round_.is_wanted(w.task)]:
                self._dismiss(worker)
            waiting = [number for number in waiting if round_.is_wanted(number)]
            while waiting and not self.setting.deadline.passed and self._idle() is not None:
                self._assign(round_, waiting.pop(0))
            busy = {worker.pipe: worker for worker in self._staff if worker.task is not None}
            if not busy:
                break
            left_s = self.setting.deadline.left_s
            ready = wait(list(busy), None if left_s is None else max(0.0, left_s + GRACE_S))
            if not ready:
                for worker in busy.values():
                    self._dismiss(worker)
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                yield from self._read(round_, busy[pipe])
            self._share(state.shared_ns)
        yield from round_.rest()

    def _idle(self) -> _Worker | None:
        idle = next((worker for worker in self._staff if worker.task is None), None)
        if idle is None and len(self._staff) < self.number:
            idle = self._start()
        return idle

    def _assign(self, round_: Round, number: int) -> None:
        worker = self._idle()
        assert worker is not None
        worker.task, worker.best_ns = number, round_.state.shared_ns
        with suppress(BrokenPipeError):  # its end is noticed when it is read
            worker.pipe.send((number, round_.tasks[number], worker.best_ns))
        round_.start(number)

    def _read(self, round_: Round, worker: _Worker) -> Iterator[tuple[Task, Outcome]]:
        """Read all that a worker has written; yield the outcomes whose turn it is."""
        number = worker.task
        assert number is not None
        try:
            while worker.task is not None and worker.pipe.poll():
                _, message = worker.pipe.recv()
                if isinstance(message, Crash):
                    raise RuntimeError(f"{round_.tasks[number].name} met an error of its own:\n{message.traceback}")
                if isinstance(message, Outcome):
                    worker.task = None
                    yield from round_.end(number, message)
                elif isinstance(message, Compiling):
                    worker.kernel = message.kernel
                    self._tell_kernels()
                else:
                    round_.announce(number, message)
        except (EOFError, ConnectionResetError):
            yield from round_.lose(number, _ending(self._dismiss(worker)))

    def _tell_kernels(self) -> None:
        """Report the kernels that all workers compile to the listeners in this process."""
        tell(", ".join(sorted({worker.kernel for worker in self._staff if worker.kernel is not None})) or None)

    def _share(self, best_ns: int | None) -> None:
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
        """Kill a process; return how it ended."""
        self._staff.remove(worker)
        status = worker.kill()
        worker.pipe.close()
        if worker.kernel is not None:
            self._tell_kernels()
        return status


def _early(task: Task) -> bool:
    """Return whether processes begin a task first: others need its bound to stop."""
    return task.early if isinstance(task, Ask) else isinstance(task, Prove) and not task.split


def one_thread() -> bool:
    """Return whether this process may fork without copying locks that another thread holds."""
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
