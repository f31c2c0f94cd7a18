"""Consecutive layers of a stage that run as one callable, with slots for tensors and a random seed for each layer.

Slots are assigned when the segment is built; a run moves tensors between numbered slots.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from penstock.executor.run.chain import Chain
from penstock.schemas.errors import ModelMismatch

Reseed = Callable[[int], Any]

_LAYER = "penstock_layer"
"""The attribute of an exception that was raised within a layer: the layer's number."""


class Call(NamedTuple):
    """A layer's call within a segment. Tensors are in numbered slots.

    ``read``, ``write``: the only slot that it reads, or writes; -1 where it has several slots or none. ``dead``: slots
    that no later call reads. ``layer``: its number in the chain.
    """

    module: nn.Module
    read: int
    write: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    dead: tuple[int, ...]
    layer: int


class Segment:
    """Consecutive layers that run forward and backward as one; ``recompute``: they run again before their backward.

    ``autocast``: the contexts of lower precision, with gradients and without. ``local``: a function that returns this
    rank's part of a layer's result that ranks share.
    """

    def __init__(
        self,
        chain: Chain,
        first: int,
        last: int,
        modules: Sequence[nn.Module],
        reseed: Reseed,
        *,
        recompute: bool,
        autocast: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None,
        local: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.chain = chain
        self._local = local
        self.first = first
        self.recompute = recompute
        self.autocast = autocast
        self.modules = tuple(modules)
        self.layers = range(first, last + 1)
        self.buffers = tuple(buffer for module in modules for buffer in module.buffers())
        self.reseed = reseed
        incoming = chain.cuts[first - 1] if first else ()
        outgoing = chain.cuts[last] if last < len(chain.specs) - 1 else chain.outputs
        slots = {name: i for i, name in enumerate(incoming)}
        self.batch_slots: list[tuple[int, str]] = []
        self.calls: list[Call] = []
        size = len(incoming)
        for i, module in enumerate(modules, start=first):
            spec = chain.specs[i]
            reads = []
            for name in spec.reads:
                if name in chain.inputs[i]:
                    self.batch_slots.append((size, name))
                    reads.append(size)
                    size += 1
                else:
                    reads.append(slots[name])
            writes = []
            for name in spec.writes:
                slots[name] = size
                writes.append(size)
                size += 1
            read = reads[0] if len(reads) == 1 else -1
            write = writes[0] if len(writes) == 1 else -1
            self.calls.append(Call(module, read, write, tuple(reads), tuple(writes), (), i))
        self.results = tuple(slots[name] for name in outgoing)
        self.free = (None,) * (size - len(incoming))
        self._drop_dead_slots(len(incoming))
        self._plain_calls: list[tuple[Any, ...]] = [tuple(call) for call in self.calls]  # a NamedTuple unpacks slower

    def _drop_dead_slots(self, num_incoming: int) -> None:
        """Let each layer drop the slots that it is the last to read."""
        kept = set(self.results)
        for k in range(len(self.calls) - 1, -1, -1):
            call = self.calls[k]
            slots = dict.fromkeys((*call.reads, *call.writes))
            dead = tuple(slot for slot in slots if slot not in kept and slot >= num_incoming)
            kept.update(dead)
            self.calls[k] = call._replace(dead=dead)

    def run(self, inputs: Sequence[Tensor], batch: dict[str, Tensor] | None, seeds: Sequence[int], key: int) -> Any:
        """Return the tensors that leave the segment, in the order of the cut after it; ``key`` is the step's seed."""
        if self.autocast is None:
            return self._run(inputs, batch, seeds, key)
        with self.autocast[0 if torch.is_grad_enabled() else 1]:
            return self._run(inputs, batch, seeds, key)

    def _run(self, inputs: Sequence[Tensor], batch: dict[str, Tensor] | None, seeds: Sequence[int], key: int) -> Any:
        env: list[Any] = [*inputs, *self.free]
        if batch is not None:
            for slot, name in self.batch_slots:
                env[slot] = batch[name]
        reseed = self.reseed
        layer = -1
        try:
            for (module, read, write, reads, writes, dead, layer), seed in zip(self._plain_calls, seeds, strict=True):
                reseed(seed + key)
                result = module(env[read]) if read >= 0 else module(*[env[slot] for slot in reads])
                if write >= 0 and type(result) is Tensor:
                    env[write] = result
                else:
                    for slot, one in zip(writes, self._checked(layer, result), strict=True):
                        env[slot] = one
                for slot in dead:
                    env[slot] = None
        except Exception as error:
            error.__dict__[_LAYER] = layer
            raise
        return [env[slot] for slot in self.results]

    def run_again(
        self, inputs: Sequence[Tensor], batch: dict[str, Tensor] | None, seeds: Sequence[int], key: int
    ) -> Any:
        """Run the segment again, and restore buffers (running statistics) to their values before this run."""
        before = [buffer.clone() for buffer in self.buffers]
        results = self.run(inputs, batch, seeds, key)
        wait_for(results)
        for buffer, value in zip(self.buffers, before, strict=True):
            buffer.data.copy_(value)
        return results

    def _checked(self, index: int, result: Any) -> Sequence[Tensor]:
        spec = self.chain.specs[index]
        results = result if isinstance(result, tuple | list) else (result,)
        if len(results) != len(spec.writes) or not all(isinstance(one, Tensor) for one in results):
            shown = ", ".join(type(one).__name__ for one in results)
            raise ModelMismatch(f"layer {spec.name!r} writes {spec.writes!r} but returned ({shown})")
        if self._local is None or index == len(self.chain.specs) - 1:
            return results
        return [self._local(one) for one in results]


def segment_ranges(
    first: int, last: int, recompute: Sequence[tuple[int, int]], *, singly: bool = False
) -> Iterator[tuple[int, int, bool]]:
    """Yield layer ranges that cover a stage, each with whether it is recomputed.

    ``singly``: layers that are not recomputed come one by one.
    """
    at = first
    for a, b in (*sorted(recompute), (last + 1, last)):
        if at < a:
            yield from ((i, i, False) for i in range(at, a)) if singly else ((at, a - 1, False),)
        if a <= b:
            yield max(a, at), b, True
        at = b + 1


def wait_for(results: Any) -> None:
    """Wait for collectives whose results are not read: torch keeps works that are never waited for."""
    for leaf in tree_leaves(results):
        wait = getattr(getattr(leaf, "_local_tensor", leaf), "trigger_wait", None)
        if wait is not None:
            wait()


class Blame(NamedTuple):
    """The place where user code raised: a layer (None: outside of layers, as in a loss or a backward), and a line."""

    layer: str | None
    line: str | None


def blame(error: BaseException, names: Sequence[str]) -> Blame:
    """Return the layer that ran when ``error`` was raised, and the innermost line outside of torch and the executor."""
    number = error.__dict__.get(_LAYER)
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        path, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if not (module == "torch" or module.startswith(("torch.", "penstock.executor."))):
            text = linecache.getline(path, traceback.tb_lineno).strip()
            line = f"{path}:{traceback.tb_lineno}, in {frame.f_code.co_name}: {text}"
        traceback = traceback.tb_next
    return Blame(None if number is None else names[number], line)
