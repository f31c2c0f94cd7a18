"""The workers of a Dask cluster as an executor. It needs the extra ``cluster``."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from penstock.schemas.errors import MissingExtra, Unreachable

CONNECT_S = 10.0


@contextmanager
def dask_executor(scheduler: str) -> Iterator[Executor]:
    """Return an executor on the cluster whose scheduler listens at ``HOST:PORT``; a dead worker's tasks run elsewhere.

    Running tasks are ended when the block is left by an error, and waited for otherwise.
    Raises MissingExtra without Dask, Unreachable when the scheduler does not answer.
    """
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"executor dask:// needs {error.name!r}, which is not installed", remedy="pip install 'penstock[cluster]'"
        ) from None
    try:
        client = Client(f"tcp://{scheduler}", timeout=CONNECT_S, set_as_default=False)
    except OSError as error:
        raise Unreachable(
            f"no Dask scheduler answers at {scheduler}: {error}", remedy="start `dask scheduler` and `dask worker`"
        ) from None
    with client:
        executor: Executor = client.get_executor(pure=False)
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False)
            raise
        executor.shutdown()
