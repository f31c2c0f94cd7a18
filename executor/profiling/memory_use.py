"""How much memory something needs, as the allocator counts: on a GPU torch's statistics, on a CPU its own records.

The records of the CPU allocator (torch's profiler with ``profile_memory``) name every allocation and release in every
thread, so what they add up to is exact; taking them costs time, which is why only single layers and steps are measured.
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
    """What a stretch allocated: the most at once beyond its beginning, and what was left at its end."""

    peak_bytes: int
    left_bytes: int


class MemoryWatch:
    """Measures named stretches of what runs inside it; ``growth`` knows them after it. Not to be nested."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._by_device = runtime.gpu is not None
        self._found: dict[str, Growth] = {}
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
        """What runs inside it is a stretch; on a GPU it starts and ends with an idle device."""
        if not self._by_device:
            with record_function(_STRETCH + name):
                yield
            return
        runtime = self._runtime
        runtime.synchronize()
        before = runtime.memory.reset_peak().active
        yield
        runtime.synchronize()
        self._found[name] = Growth(runtime.memory.peak().active - before, runtime.memory.now().active - before)

    def growth(self, name: str) -> Growth:
        """Of the stretch with this name."""
        return self._found[name]

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
            held = list(
                accumulate(size for _, size in changes[bisect_left(moments, start) : bisect_right(moments, end)])
            )
            self._found[name] = Growth(max([0, *held]), held[-1] if held else 0)


def held_bytes(tensors: Sequence[Tensor]) -> int:
    """What tensors keep allocated, each storage once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations of this thread make inside it, and that are still alive.

    A storage counts until its last tensor is gone, in whichever thread that happens; of a tensor that ranks share this
    rank's part counts. One that is resized is not expected to become larger than it has been. What a kernel needs for
    itself while it runs is not seen. For opt-in measuring on a CPU: every operation is slowed down. ``on_meta``:
    storages of the meta device count, instead of those with numbers.
    """

    def __init__(self, *, on_meta: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_meta = on_meta
        self._alive: dict[int, _Held] = {}
        self._peak_bytes = 0
        self._most_bytes = 0

    @property
    def bytes(self) -> int:
        """The most at once."""
        return self._peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """The same: tensors are counted, not what an allocator keeps."""
        return self._peak_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # it takes the operation apart into those on its parts, which are seen
        result = func(*args, **(kwargs or {}))
        if self._on_meta and (func.is_view or func._schema.is_mutable):
            return result  # of a storage that was there: a parameter's, or a gradient's to which another one is added
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        if self._most_bytes > self._peak_bytes:
            self._peak_bytes = max(self._peak_bytes, self.held_bytes())
        return result

    def _note(self, tensor: Tensor) -> None:
        """Keep a storage that is a new one and counts."""
        storage = tensor.untyped_storage()
        if (storage.device.type == "meta") != self._on_meta or is_foreign(tensor):
            return
        reference = StorageWeakRef(storage)
        known = self._alive.get(reference.cdata)
        if known is None or known.reference.expired():
            self._alive[reference.cdata] = _Held(reference, storage.nbytes())
            self._most_bytes += storage.nbytes()

    def restart(self) -> int:
        """Count the most from now on; the bytes that are alive."""
        self._peak_bytes = self.held_bytes()
        return self._peak_bytes

    def held_bytes(self, but: Container[int] = ()) -> int:
        """What is alive now; storages of these numbers (``_cdata``) are left out.

        Also recounts ``_most_bytes``, above which nothing is until more is made: each storage with the most that it
        has had, since what was resized to nothing may come back.
        """
        alive: dict[int, _Held] = {}
        held_bytes = self._most_bytes = 0
        for key, held in self._alive.items():
            storage: Any = UntypedStorage._new_with_weak_ptr(held.reference.cdata)
            if storage is not None:
                now_bytes = storage.nbytes()
                alive[key] = held if now_bytes <= held.most_bytes else _Held(held.reference, now_bytes)
                self._most_bytes += alive[key].most_bytes
                held_bytes += 0 if key in but else now_bytes
        self._alive = alive
        return held_bytes


class _Held(NamedTuple):
    """A storage that may be alive, and the most bytes that it was seen to have."""

    reference: StorageWeakRef
    most_bytes: int
