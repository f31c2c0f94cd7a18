"""An executor whose calls run in threads of this process, each of which manages one process that can be killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.schemas.machine.processors import available_processors
from penstock.workers.forkserver import Forkserver
from penstock.workers.place import Place, at

T = TypeVar("T")


class EndableFuture(Future[T]):
    """A future whose ``cancel`` also ends a running call: its result is then CancelledError."""

    def __init__(self) -> None:
        super().__init__()
        self.unwanted = threading.Event()

    def cancel(self) -> bool:
        """End the call; return False when it has ended already."""
        self.unwanted.set()
        return super().cancel() or not self.done()


class LocalExecutor(Executor):
    """``processes`` calls at a time, by default one per processor; children come from one warm forkserver."""

    def __init__(self, processes: int | None = None) -> None:
        self._forkserver = Forkserver()
        self._threads = ThreadPoolExecutor(processes or available_processors(), "local-executor")
        self._futures: set[EndableFuture[Any]] = set()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn`` in a thread, at a ``Place`` where it starts its process."""
        future: EndableFuture[T] = EndableFuture()
        self._threads.submit(self._call, future, lambda: fn(*args, **kwargs))
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(wait=kind is None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down; with ``cancel_futures``, or without ``wait``, end running calls."""
        if cancel_futures or not wait:
            for future in list(self._futures):
                future.cancel()
        self._threads.shutdown(wait=True)
        self._forkserver.stop()

    def _call(self, future: EndableFuture[T], call: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            with at(Place(self._forkserver.spawn, lambda: not future.unwanted.is_set())):
                result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            if future.unwanted.is_set():
                future.set_exception(CancelledError())
            else:
                future.set_result(result)
