"""Sweeps without a service, each case in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, as_completed
from contextlib import nullcontext
from functools import partial

from penstock.planning.sweep import MAX_CASES, answered, cases, refused, with_front
from penstock.schemas.api.jobs import ProblemDetails, ResultOut
from penstock.schemas.api.sweep import SweepRequest, SweepRow
from penstock.workers.executors import executor_of
from penstock.workers.protocol import crashed
from penstock.workers.solving import SolveLimits, solve_case


def sweep_rows(
    request: SweepRequest,
    *,
    executor: Executor | None = None,
    on_row: Callable[[SweepRow], None] | None = None,
    limits: SolveLimits | None = None,
    max_cases: int = MAX_CASES,
) -> tuple[SweepRow, ...]:
    """Answer every case; the rows are in the order of the cases, with the Pareto front marked.

    Each case is solved in a separate process, by default on this machine; ``executor`` as ``executor_of`` makes it.
    ``on_row`` is called with each answer as it comes. Whatever ends this call ends the solvers as well.
    Raises InvalidDocument for too many cases or one that contradicts itself; a case that fails is a row that says so.
    """
    sweep_cases = cases(request, max_cases)
    with executor_of("local") if executor is None else nullcontext(executor) as pool:
        task = partial(solve_case, limits=limits or SolveLimits())
        futures = {pool.submit(task, case.request): n for n, case in enumerate(sweep_cases)}
        rows: dict[int, SweepRow] = {}
        try:
            for number, answer in _answers(futures):
                case = sweep_cases[number]
                rows[number] = answered(case, answer) if isinstance(answer, ResultOut) else refused(case, answer)
                if on_row is not None:
                    on_row(rows[number])
        finally:
            for future in futures:
                future.cancel()
    return with_front([rows[number] for number in range(len(sweep_cases))])


def _answers(
    futures: dict[Future[ResultOut | ProblemDetails], int],
) -> Iterator[tuple[int, ResultOut | ProblemDetails]]:
    for future in as_completed(futures):
        error = future.exception()
        lost = None if error is None else crashed(f"the executor lost it: {type(error).__name__}: {error}")
        yield futures[future], lost or future.result()
