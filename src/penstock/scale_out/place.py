"""Where a submitted call finds itself: how it starts a process, and whether its answer is still wanted.

An executor of ours says so around each call; on a Dask worker the worker does.
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
    """What a call may ask of its surroundings."""

    spawn: Callable[[], Child]
    wanted: Callable[[], bool]


_place: ContextVar[Place | None] = ContextVar("place", default=None)


@contextmanager
def at(place: Place) -> Iterator[None]:
    """Calls made within are at ``place``."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def here() -> Place:
    """The place of the present call. Outside of any executor it is wanted for ever."""
    return _place.get() or Place(InterpreterChild, _wanted_by_dask() or (lambda: True))


def _wanted_by_dask() -> Callable[[], bool] | None:
    """Whether the task that runs here is still wanted by a client; None outside a Dask worker.

    Dask ends no task that runs: it forgets it. A task whose future was cancelled, or whose client is gone, is then
    in state ``cancelled``, which is where this looks.
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
