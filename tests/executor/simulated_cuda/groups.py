"""Simulated communicators as process groups of torch, and collectives of hosts that are written into the log.

A communicator has a separate stream, as in torch's group over NCCL. Its work comes after the present work of the
current stream, and waiting for it makes the current stream wait. A collective that is not asynchronous runs in the
current stream itself. Numbers travel through gloo; without peers, each peer is assumed to send the numbers of this
rank. The group keeps the tensors of an asynchronous collective until it is waited for, as torch's group over NCCL does,
but no tensor of a message: the sender has to keep it until it has been sent.

Collectives within layers that ranks share come through ``torch.ops._c10d_functional``, which calls the same groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from penstock.executor.transport.nccl import NcclTransport
from simulated_cuda.entries import Kind
from simulated_cuda.recorder import Recorder, without_watching

BACKEND = "simulated-nccl"


_Group: Any = dist.ProcessGroup  # torch calls what it declares otherwise
_Work: Any = dist.Work


class SimulatedWork(_Work):  # type: ignore[misc]
    """A kernel of a communicator on its way, with the tensors that it keeps."""

    def __init__(self, recorder: Recorder, event: int, carried: Any, kept: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._recorder = recorder
        self._event = event
        self._carried = carried
        self._kept = kept

    def wait(self, *_: Any) -> bool:
        """Let the current stream wait; the numbers are there then."""
        if self._carried is not None:
            without_watching(self._carried.wait)
            self._carried = None
        self._recorder.wait(self._recorder.current, self._event)
        self._kept = ()
        return True

    def is_completed(self) -> bool:
        """Return whether the host can know that it is over."""
        return self._recorder.ordering.is_over(self._event)


class SimulatedGroup(_Group):  # type: ignore[misc]
    """A communicator of this rank; ``carrier``: the gloo group through which its numbers travel, or None."""

    def __init__(self, recorder: Recorder, name: str, rank: int, size: int, carrier: Any) -> None:
        super().__init__(rank, size)
        self._recorder = recorder
        self._label = self._name = name
        self._size = size
        self._carrier = carrier
        self._stream = recorder.open(f"the stream of {name}")

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        """Set the name by which torch finds the group for collectives within layers."""
        self._name = name

    def _set_group_desc(self, name: str) -> None:
        """Ignore the description: it has one."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> SimulatedWork:
        return self._give("send", tensors, [], lambda group: group.send([_copied(tensors[0])], peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> SimulatedWork:
        return self._give("receive", [], tensors, lambda group: group.recv(tensors, peer, tag))

    def allreduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        return self._give("all_reduce", tensors, tensors, lambda group: group.allreduce(tensors, opts), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        return self._give("broadcast", tensors, tensors, lambda group: group.broadcast(tensors, opts), opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> SimulatedWork:
        return self._give("reduce", tensors, tensors, lambda group: group.reduce(tensors, opts), opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> SimulatedWork:
        return self._give(
            "reduce_scatter", [source], [output], lambda group: group._reduce_scatter_base(output, source, opts), opts
        )

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any) -> SimulatedWork:
        return self._give(
            "all_gather", [source], [output], lambda group: group._allgather_base(output, source, opts), opts
        )

    def all_to_all_single(
        self, output: Tensor, source: Tensor, taken_rows: list[int], given_rows: list[int], opts: Any
    ) -> SimulatedWork:
        return self._give(
            "all_to_all",
            [source],
            [output],
            lambda group: group.alltoall_base(output, source, taken_rows, given_rows, opts),
            opts,
        )

    def all_gather_single_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any) -> SimulatedWork:
        return self.all_gather_single(*outputs, *sources, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any) -> SimulatedWork:
        return self.reduce_scatter_single(*outputs, *sources, opts)

    # What torch called these before 2.13
    _reduce_scatter_base = reduce_scatter_single
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _give(
        self, kind: Kind, reads: list[Tensor], writes: list[Tensor], carry: Callable[[Any], Any], opts: Any = None
    ) -> SimulatedWork:
        recorder = self._recorder
        current, size_bytes = recorder.current, max(one.nbytes for one in (*reads, *writes))
        apart = getattr(opts, "asyncOp", True)
        stream = self._stream if apart else current
        if apart:
            recorder.wait(stream, recorder.record(current))
        root = getattr(opts, "rootRank", -1)
        recorder.joins(stream, self._label, kind, size_bytes, root, reads=reads, writes=writes)
        carried = None
        if self._carrier is not None:
            carried = without_watching(lambda: carry(self._carrier))
        elif kind == "receive":
            without_watching(writes[0].zero_)
        elif kind in ("all_gather", "reduce_scatter", "all_to_all"):
            without_watching(lambda: _imagine(writes[0], reads[0]))
        kept = () if kind in ("send", "receive") or not apart else (*reads, *writes)
        return SimulatedWork(recorder, recorder.record(stream), carried, kept)


def _imagine(output: Tensor, source: Tensor) -> None:
    """Fill an output as if each peer sent the numbers of this rank, over and over."""
    flat, numbers = output.view(-1), source.reshape(-1)
    for at in range(0, len(flat), max(1, len(numbers))):
        part = flat[at : at + len(numbers)]
        part.copy_(numbers[: len(part)])


_making: list[tuple[Recorder, str, bool]] = []


@contextmanager
def making(recorder: Recorder, name: str, *, connected: bool) -> Iterator[None]:
    """Give groups of ``BACKEND`` that torch creates within this context to this recorder."""
    _making.append((recorder, name, connected))
    try:
        yield
    finally:
        _making.pop()


def _make(store: Any, rank: int, size: int, timeout: Any) -> SimulatedGroup:
    recorder, name, connected = _making[-1]
    carrier = dist.ProcessGroupGloo(store, rank, size, timeout) if connected else None
    return SimulatedGroup(recorder, name, rank, size, carrier)


dist.Backend.register_backend(BACKEND, _make, devices=["cpu"])


def _copied(tensor: Tensor) -> Tensor:
    """Copy numbers, in case their sender frees them too early."""
    return tensor.detach().clone()


@contextmanager
def tags_noted(recorder: Recorder) -> Iterator[None]:
    """Let kernels say which message they are of: the tag that the transport is called with, and does not send."""

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(transport: Any, tensor: Tensor, peer: int, tag: int, *arguments: Any) -> Any:
            recorder.meant = tag
            try:
                return function(transport, tensor, peer, tag, *arguments)
            finally:
                recorder.meant = 0

        return call

    with (
        mock.patch.object(NcclTransport, "send", noting(NcclTransport.send)),
        mock.patch.object(NcclTransport, "_receive", noting(NcclTransport._receive)),
    ):
        yield


class _HostWork:
    """A collective of hosts on its way."""

    def __init__(self, recorder: Recorder, group: str, number: int, work: Any) -> None:
        self._wait = (recorder, group, number, work)

    def wait(self) -> bool:
        recorder, group, number, work = self._wait
        recorder.gathers(group, number)
        if work is not None:
            work.wait()
        return True


class HostCollectives:
    """A recorder of collectives of hosts, over gloo, in a log while ``watching``; it numbers groups as created.

    ``imagined``: the value of every sum where there are no peers.
    """

    def __init__(self, recorder: Recorder, imagined: float | None = None) -> None:
        self._recorder = recorder
        self._imagined = imagined
        self._names: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._num_groups = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with (
            mock.patch.object(dist, "all_reduce", self._around(dist.all_reduce, "all_reduce")),
            mock.patch.object(dist, "broadcast", self._around(dist.broadcast, "broadcast")),
            mock.patch.object(dist, "barrier", self._around(dist.barrier, "barrier")),
            mock.patch.object(dist, "new_group", self._new_group(dist.new_group)),
        ):
            yield

    def _around(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*arguments: Any, group: Any = None, async_op: bool = False, **more: Any) -> Any:
            if isinstance(group, SimulatedGroup):
                return function(*arguments, group=group, async_op=async_op, **more)
            tensors, imagined = [one for one in arguments if isinstance(one, Tensor)], self._imagined
            name, members = self._names.get(id(group), ("all", tuple(range(dist.get_world_size()))))
            number = self._recorder.meets(name, members, kind, tensors)
            work = None
            if imagined is None:
                work = function(*arguments, group=group, async_op=True, **more)
            elif kind == "all_reduce" and not more and len(arguments) == 1:
                without_watching(lambda: tensors[0].fill_(imagined))
            host_work = _HostWork(self._recorder, name, number, work)
            if async_op:
                return host_work
            host_work.wait()
            return None

        return call

    def _new_group(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(ranks: Sequence[int] | None = None, *arguments: Any, backend: str | None = None, **more: Any) -> Any:
            if backend != "gloo":
                return (
                    function(ranks, *arguments, backend=backend, **more)
                    if backend
                    else function(ranks, *arguments, **more)
                )
            new_group = function(ranks, *arguments, backend="gloo" if self._imagined is None else "fake", **more)
            members = tuple(range(dist.get_world_size()) if ranks is None else ranks)
            self._names[id(new_group)] = f"hosts {self._num_groups}", members
            self._num_groups += 1
            return new_group

        return call
