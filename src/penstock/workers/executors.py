"""Executors for many solves: processes of this machine or workers of a Dask cluster, with one interface.

``executor_of("local:4")`` and ``executor_of("dask://host:8786")`` return a ``concurrent.futures.Executor``. A call
submitted to it may be ended at any time: ``future.cancel()`` also ends a running solver, here and on a Dask worker.
"""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager

from penstock.schemas.errors import InvalidDocument


def executor_of(address: str = "local") -> AbstractContextManager[Executor]:
    """Return an executor by its address, for a ``with``: ``local``, ``local:PROCESSES`` or ``dask://HOST:PORT``.

    Raises InvalidDocument for another address, MissingExtra without Dask, Unreachable without its scheduler.
    """
    kind, _, rest = address.partition(":")
    if kind == "local" and (not rest or (rest.isdigit() and int(rest) > 0)):
        from penstock.workers.local import LocalExecutor

        return LocalExecutor(int(rest) if rest else None)
    if kind == "dask" and rest.startswith("//") and rest[2:].rpartition(":")[2].isdigit():
        from penstock.workers.cluster import dask_executor

        return dask_executor(rest[2:])
    raise InvalidDocument(f"{address!r} is not an executor", remedy="local, local:PROCESSES or dask://HOST:PORT")
