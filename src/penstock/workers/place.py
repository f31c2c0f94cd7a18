"""The surroundings of a submitted call: how it starts a process, and whether its answer is still needed.

Our own executors set it around each call; on a Dask worker the worker does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from penstock.workers.child import Child, InterpreterChild


@dataclass(frozen=True)
class Place:
    """The functions that a call's surroundings offer."""

    spawn: Callable[[], Child]
    wanted: Callable[[], bool]


_place: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def at(place: Place) -> Iterator[None]:
    """Set ``place`` as the place of calls within this context."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def here() -> Place:
    """Return the place of the present call. Outside of any executor an answer is always needed."""
    return _place.get() or Place(InterpreterChild, _wanted_by_dask() or (lambda: True))


def _wanted_by_dask() -> Callable[[], bool] | None:
    """Return whether a client still needs the task that runs here; None outside a Dask worker.

    Dask never ends a running task: it forgets it. A task whose future was cancelled, or whose client is gone, is then
    in state ``cancelled``, which this function checks.
    """
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        worker = get_worker()
        key = worker.get_current_task()
    except ValueError:
        return None

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return task is not None and task.state != "cancelled"

    return wanted
