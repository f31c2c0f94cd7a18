"""The end of an instruction that does not end: its limit, and whether the thread waits or computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from types import SimpleNamespace
from typing import Any

import pytest
from assigned import assigned

from penstock.executor.program.watchdog import FACTOR, FIRST_STEP_S, Stuck, Watchdog
from penstock.executor.run.rank_main import Rank, RankStuck
from penstock.schemas.program import Instruction

pytestmark = pytest.mark.tier("quick")

SOON_S = 0.05
TICK_S = 0.16 * SOON_S
"""The time between two looks of a watchdog: 7 of them are beyond a computing rank's limit, 8 beyond a waiting one's."""


class Reports:
    """The calls of a watchdog."""

    def __init__(self) -> None:
        self.stuck: list[Stuck] = []
        self.came = threading.Event()

    def __call__(self, stuck: Stuck) -> None:
        self.stuck.append(stuck)
        self.came.set()


@contextmanager
def busy(function: Callable[[threading.Event], Any]) -> Iterator[int]:
    """Run a thread in ``function``, which is called with an event that ends it; yield the thread's number."""
    end = threading.Event()
    thread = threading.Thread(target=function, args=(end,))
    thread.start()
    assert thread.ident is not None
    try:
        yield thread.ident
    finally:
        end.set()
        thread.join()


def waits(end: threading.Event) -> None:
    """Run innermost code of ``threading``, like a thread that waits for a peer."""
    end.wait()


def computes(end: threading.Event) -> None:
    """Run innermost code of this module, like a layer."""
    while not end._flag:  # type: ignore[attr-defined]  # ``is_set`` is code of ``threading``
        pass


@pytest.mark.parametrize(("function", "waiting", "looks"), [(waits, True, 8), (computes, False, 7)])
def test_a_stuck_thread_waits_or_computes(function: Any, waiting: bool, looks: int) -> None:
    """The rank that waits is the more patient one: the one that it waits for is to report itself first."""
    reports = Reports()
    clock = count(step=TICK_S).__next__
    with busy(function) as thread, Watchdog([7, 2], reports, limit_s=SOON_S, thread=thread, clock=clock).watching():
        reports.came.wait()
    (stuck,) = reports.stuck
    assert (stuck.number, stuck.step, stuck.waits) == (7, 2, waiting)
    assert stuck.for_s == pytest.approx(looks * TICK_S)
    assert any(function.__name__ in line for line in stuck.stack)


def test_instructions_that_end_are_let_go_on() -> None:
    mark, reports, looks, enough = [0, 0], Reports(), count(), threading.Event()

    def clock() -> float:
        """Let an instruction end at every sixth look."""
        look = next(looks)
        mark[0] = look // 6
        if look == 24:
            enough.set()
        return look * TICK_S

    with Watchdog(mark, reports, limit_s=SOON_S, clock=clock).watching():
        enough.wait()
    assert reports.stuck == []


def test_nothing_is_watched_outside_of_steps() -> None:
    """Evaluations, checkpoints and checks take as long as they take; time starts again when steps go on."""
    reports = Reports()
    watchdog = Watchdog([0, 0], reports, limit_s=SOON_S, clock=count(step=TICK_S).__next__)
    assert not reports.came.wait(2 * SOON_S)
    with watchdog.watching():
        reports.came.wait()
    assert reports.stuck[0].for_s == pytest.approx(8 * TICK_S)


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    """As of a job that is suspended: the clock goes on, and the watchdog's thread looks again much later."""
    times = chain([0.0, 0.0], count(1000.0, 0.1))
    reports, enough = Reports(), threading.Event()

    def clock() -> float:
        now = next(times)
        if now > 1000.5:
            enough.set()
        return now

    watchdog = Watchdog([0, 0], reports, limit_s=1.0, clock=clock)
    with watchdog.watching():
        enough.wait()
    watchdog.close()
    assert not reports.stuck


@pytest.mark.parametrize(
    ("limit_s", "took_s", "first_s", "later_s"),
    [
        pytest.param(5.0, 40.0, 5.0, 5.0, id="known"),
        pytest.param(None, 1.0, FIRST_STEP_S, 60.0, id="a short first step"),
        pytest.param(None, 40.0, FIRST_STEP_S, FACTOR * 40.0, id="a long first step"),
    ],
)
def test_the_first_step_measures_later_ones(
    limit_s: float | None, took_s: float, first_s: float, later_s: float
) -> None:
    watchdog = Watchdog([0, 0], Reports(), limit_s=limit_s, least_s=60.0)
    assert watchdog._limit_s == first_s
    watchdog.first_step_took(took_s)
    assert watchdog._limit_s == later_s


def test_a_later_step_is_caught_by_the_measure_of_the_first() -> None:
    reports = Reports()
    watchdog = Watchdog([0, 0], reports, least_s=SOON_S)
    watchdog.first_step_took(SOON_S / FACTOR / 2)
    with watchdog.watching():
        reports.came.wait()


# What a rank says of it


def rank() -> tuple[Rank, list[Exception]]:
    """Build a rank in step 4, and the list of errors for which it gives up."""
    given_up: list[Exception] = []
    stuck_rank = Rank(assigned(rank=1), say=lambda event: None, give_up=given_up.append)
    program = SimpleNamespace(rank=1, channels=(SimpleNamespace(peer=4),))
    interpreter = SimpleNamespace(instruction=lambda number: Instruction("RECV_F", 0, number, 0), program=program)
    stuck_rank._trainer = SimpleNamespace(interpreter=interpreter, step=4)  # type: ignore[assignment]
    return stuck_rank, given_up


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("waiting", "words"),
    [
        (True, "timed out: rank 4 sent nothing for 61 s"),
        (False, "has computed for 61 s, and waits for no peer"),
    ],
)
def test_a_stuck_rank_names_instruction_and_stack(waiting: bool, words: str) -> None:
    stuck_rank, given_up = rank()
    stuck_rank._stuck(Stuck(3, 4, 61.2, waiting, ("line 1", "line 2")))
    (error,) = given_up
    assert isinstance(error, RankStuck)
    event = stuck_rank.failure(error)
    assert event["reason"] == words
    assert (event["instruction"], event["index"], event["step"]) == ("0RECV_F3@0", 3, 4)
    assert event["traceback"] == ["line 1", "line 2"]


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("error", "hinted"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("cuBLAS failure: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (ValueError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_errors_of_a_gpu_come_with_a_hint_that_they_are_late(error: Exception, hinted: bool) -> None:
    reason = rank()[0].failure(error)["reason"]
    assert reason.startswith(f"{type(error).__name__}: {error}")
    assert ("CUDA_LAUNCH_BLOCKING=1" in reason) == hinted


def test_what_is_not_watched_in_between_does_not_count() -> None:
    """An evaluation longer than the limit lies between two segments, and the mark is as it was before it."""
    reports, looked = Reports(), threading.Semaphore(0)
    now_s = 0.0

    def clock() -> float:
        looked.release()
        return now_s

    dog = Watchdog([7, 2], reports, limit_s=SOON_S, clock=clock)
    with dog.watching():
        looked.acquire()
    now_s = 2 * SOON_S
    with dog.watching():
        for _ in range(4):
            looked.acquire()
    dog.close()
    dog.join()
    assert not reports.stuck


@pytest.mark.parametrize("read_s", [0.0, 2 * SOON_S])
def test_a_watchdog_that_is_held_up_between_two_segments_reports_nothing(read_s: float) -> None:
    """One ends and the other begins just after the clock is read, or just before."""
    reports, segments = Reports(), ExitStack()
    looks, moments = count(), [0.0, read_s, 2 * SOON_S, 2 * SOON_S]

    def clock() -> float:
        look = min(next(looks), 3)
        if look == 1:
            segments.close()
            segments.enter_context(dog.watching())
        elif look == 3:
            reports.came.set()  # it goes on
        return moments[look]

    dog = Watchdog([7, 2], reports, limit_s=SOON_S, clock=clock)
    segments.enter_context(dog.watching())
    reports.came.wait()
    dog.close()
    dog.join()
    assert not reports.stuck
