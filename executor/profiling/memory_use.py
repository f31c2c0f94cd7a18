"""The memory that code needs, by the allocator: on a GPU from torch's statistics, on a CPU from its records.

The records of the CPU allocator (torch's profiler with ``profile_memory``) list every allocation and release in every
thread, so their sums are exact. Recording takes time, so only single layers and steps are measured.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage
from torch.autograd.profiler import profile, record_function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from penstock.executor.profiling.numberless import is_foreign
from penstock.executor.runtime.interface import Runtime

_MEMORY = "[memory]"
_STRETCH = "penstock/"


class Growth(NamedTuple):
    """The memory that a stretch allocated: the most at once beyond its beginning, and the rest at its end."""

    peak_bytes: int
    left_bytes: int


class MemoryWatch:
    """A measurement of named stretches within its context; ``growth`` has them afterwards. Do not nest it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._by_device = runtime.gpu is not None
        self._growth: dict[str, Growth] = {}
        self._records: Any = None

    def __enter__(self) -> MemoryWatch:
        if not self._by_device:
            self._records = profile(profile_memory=True)
            self._records.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._by_device:
            self._records.__exit__(*error)
            self._read(self._records.kineto_results.events())

    @contextmanager
    def stretch(self, name: str) -> Iterator[None]:
        """Measure the code in this context as a stretch; on a GPU it starts and ends with an idle device."""
        if not self._by_device:
            with record_function(_STRETCH + name):
                yield
            return
        runtime = self._runtime
        runtime.synchronize()
        before = runtime.memory.reset_peak().active
        yield
        runtime.synchronize()
        self._growth[name] = Growth(runtime.memory.peak().active - before, runtime.memory.now().active - before)

    def growth(self, name: str) -> Growth:
        """Return the growth of the stretch with this name."""
        return self._growth[name]

    def _read(self, events: Iterable[Any]) -> None:
        changes, stretches = [], []
        for event in events:
            if event.name() == _MEMORY:
                changes.append((event.start_ns(), event.nbytes()))
            elif event.name().startswith(_STRETCH):
                name = event.name().removeprefix(_STRETCH)
                stretches.append((event.start_ns(), event.start_ns() + event.duration_ns(), name))
        changes.sort(key=lambda change: change[0])
        moments = [moment for moment, _ in changes]
        for start, end, name in stretches:
            levels = list(
                accumulate(size for _, size in changes[bisect_left(moments, start) : bisect_right(moments, end)])
            )
            self._growth[name] = Growth(max([0, *levels]), levels[-1] if levels else 0)


def held_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes that tensors keep allocated, each storage once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


class LiveBytes(TorchDispatchMode):
    """A mode that counts the storages that operations of this thread create and that are still alive.

    A storage counts until its last tensor is gone, in whichever thread that happens. Of a tensor that ranks share, this
    rank's part counts. A storage that is resized must not become larger than it was before. Memory that a kernel uses
    while it runs is not seen. Meant for measurements on a CPU on request, since it slows every operation down.
    ``on_meta``: count storages of the meta device instead of storages with numbers.
    """

    def __init__(self, *, on_meta: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_meta = on_meta
        self._alive: dict[int, _Storage] = {}
        self._peak_bytes = 0
        self._most_bytes = 0

    @property
    def bytes(self) -> int:
        """The most bytes at once."""
        return self._peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """The same number: tensors are counted, not the memory of an allocator."""
        return self._peak_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # it splits the operation into operations on its parts, which are seen
        result = func(*args, **(kwargs or {}))
        if self._on_meta and (func.is_view or func._schema.is_mutable):
            return result  # a storage that existed: a parameter's, or a gradient's that accumulates
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        if self._most_bytes > self._peak_bytes:
            self._peak_bytes = max(self._peak_bytes, self.held_bytes())
        return result

    def _note(self, tensor: Tensor) -> None:
        """Record a storage if it is new and counts."""
        storage = tensor.untyped_storage()
        if (storage.device.type == "meta") != self._on_meta or is_foreign(tensor):
            return
        reference = StorageWeakRef(storage)
        existing = self._alive.get(reference.cdata)
        if existing is None or existing.reference.expired():
            self._alive[reference.cdata] = _Storage(reference, storage.nbytes())
            self._most_bytes += storage.nbytes()

    def restart(self) -> int:
        """Restart the maximum from the bytes that are alive now, and return them."""
        self._peak_bytes = self.held_bytes()
        return self._peak_bytes

    def held_bytes(self, but: Container[int] = ()) -> int:
        """Return the bytes that are alive now, without the storages whose numbers (``_cdata``) are in ``but``.

        Also recounts ``_most_bytes``, an upper bound on the bytes alive until more are created: the sum of each
        storage's maximum, since a storage that was resized to nothing may grow back.
        """
        alive: dict[int, _Storage] = {}
        held_bytes = self._most_bytes = 0
        for key, entry in self._alive.items():
            storage: Any = UntypedStorage._new_with_weak_ptr(entry.reference.cdata)
            if storage is not None:
                now_bytes = storage.nbytes()
                alive[key] = entry if now_bytes <= entry.most_bytes else _Storage(entry.reference, now_bytes)
                self._most_bytes += alive[key].most_bytes
                held_bytes += 0 if key in but else now_bytes
        self._alive = alive
        return held_bytes


class _Storage(NamedTuple):
    """A storage that may be alive, and the most bytes that were seen of it."""

    reference: StorageWeakRef
    most_bytes: int
