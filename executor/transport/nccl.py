"""Messages from GPU to GPU: one NCCL communicator per directed edge, none of them made lazily.

NCCL matches messages by their order and a send occupies its stream until the peer receives, so only programs that were
lowered for it run over it (``choice``); both ends compare their order before the first message all the same. Receives
are waited for by the compute stream, not by this thread (EXECUTOR C.2; Megatron-LM #5240 for communicators that are
made lazily).

A kernel that is launched for the first time is loaded then, and so are libraries; that waits until the GPU has nothing
to do [1]_. A receive that was started ahead of need would hold it up until its sender comes, which may itself wait for
this rank. So what runs for the first time starts a receive only when it is waited for: then the computation that loads
something needs all that the GPU receives. Sends may still wait; a rank's `rehearsal` leaves little to load.

A communicator has a stream. Streams beyond the GPU's hardware queues share one, in which a receive that waits for its
sender holds up whatever comes after it: so a rank has no more communicators than there are queues for.

.. [1] CUDA programming guide, Lazy loading, "Potential hazards"; on an H100 `cublasCreate` waited so (decision 48).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.executor.runtime.interface import Runtime
from penstock.executor.transport.order import Edge, Messages, differing_edge, digests, edges, messages, refuse_order
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import Program

OTHER_STREAMS = 3
"""Of a rank besides its communicators': computation, copies to and from the host, and what the job may use."""


class _End(NamedTuple):
    """A communicator of two ranks, and the other's number in it."""

    group: Any
    peer: int


class _Later:
    """A receive that is started when it is waited for, after those before it on its edge."""

    def __init__(self, start: Callable[[], Any], before: deque[_Later]) -> None:
        self._start = start
        self._before = before
        self._work: Any = None
        before.append(self)

    def start(self) -> None:
        """Start those before it, and it."""
        while self._work is None:
            first = self._before.popleft()
            first._work = first._start()

    def wait(self) -> None:
        """Make the compute stream wait for it."""
        self.start()
        self._work.wait()


class NcclTransport:
    """Point-to-point messages over the communicators of ``connect_edges``."""

    def __init__(self, runtime: Runtime, own: Mapping[Edge, _End], rank: int) -> None:
        self.bytes_sent: Counter[int] = Counter()
        self._runtime = runtime
        self._ends = own
        self._sends = {peer: end for (source, peer), end in own.items() if source == rank}
        self._receives = {peer: end for (peer, target), end in own.items() if target == rank}
        self._under_way: dict[int, deque[tuple[Any, Tensor]]] = {peer: deque() for peer in self._sends}
        self._later: dict[int, deque[_Later]] = {peer: deque() for peer in self._receives}
        self._is_first = True

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        """Start sending a contiguous tensor; it must not change until ``drain``. The tag is not sent."""
        self.hand_over()
        end = self._sends[peer]
        self._under_way[peer].append((end.group.send([tensor], end.peer, 0), tensor))
        self.bytes_sent[peer] += size_bytes

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        """Start receiving, or do so when it is needed; ``wait()`` on what is returned makes the compute stream wait."""
        before = self._later[peer]
        if self._is_first:
            return _Later(partial(self._receive, buffer, peer, tag), before)
        if before:
            before[-1].start()
        return self._receive(buffer, peer, tag)

    def begin(self, *, is_first: bool) -> None:
        """What is run next runs for the first time, or has run before."""
        self._is_first = is_first

    def _receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        end = self._receives[peer]
        return end.group.recv([buffer], end.peer, 0)

    def hand_over(self) -> None:
        """Let go of what has been sent, to whichever peer: those of one peer arrive in their order."""
        for under_way in self._under_way.values():
            while under_way and under_way[0][0].is_completed():
                under_way.popleft()

    def drain(self) -> None:
        """Return when every send is done, and all that was computed. Raises what a failed send raised."""
        for under_way in self._under_way.values():
            while under_way:
                work, _ = under_way.popleft()
                work.wait()
        self._runtime.compute.synchronize()

    def close(self) -> None:
        """Give the communicators back."""
        for edge in sorted(self._ends):
            dist.destroy_process_group(self._ends[edge].group)


def connect_edges(program: Program, runtime: Runtime, timeout: timedelta) -> NcclTransport:
    """Make every edge's communicator, in one order on all ranks; collective.

    Raises InvalidPlan on all ranks when two ends of an edge do not count the same messages in the same order, and
    UnsupportedRequest when a rank has more communicators than its GPU has queues for.
    """
    agreed = agree_on_order(messages(program))
    _refuse_too_many(agreed, _groups_of_each(program), runtime)
    own: dict[Edge, _End] = {}
    for edge in edges(agreed):
        group = runtime.new_group(edge, timeout, f"edge {edge}", for_messages=True)
        if program.rank in edge:
            own[edge] = _End(group, 1 - dist.get_rank(group))
            _first_message(own[edge], program.rank == edge[0], runtime)
    return NcclTransport(runtime, own, program.rank)


def agree_on_order(own: Messages) -> Sequence[Mapping[Edge, str]]:
    """The digests of all ranks' edges; collective. Raises InvalidPlan on every rank when two ends differ."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digests(own))
    differing = differing_edge(everyone)
    if differing is not None:
        words: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(words, own.get(differing, []))
        raise refuse_order(differing, *(words[rank] for rank in differing))
    return everyone


def _groups_of_each(program: Program) -> list[int]:
    """How many groups of the program each rank is in."""
    return [sum(rank in ranks for ranks in program.groups) for rank in range(program.world_size)]


def _refuse_too_many(agreed: Sequence[Mapping[Edge, str]], groups: Sequence[int], runtime: Runtime) -> None:
    for rank, (own, shared) in enumerate(zip(agreed, groups, strict=True)):
        streams = OTHER_STREAMS + len(own) + shared
        if streams > runtime.hardware_queues:
            raise UnsupportedRequest(
                f"rank {rank} has {len(own)} edges and {shared} groups; with {OTHER_STREAMS} others that is {streams} "
                f"streams, of which a GPU runs {runtime.hardware_queues} side by side: a receive that waits for its "
                "sender would hold up others",
                remedy="transport gloo-staged, stages with fewer replicas, or CUDA_DEVICE_MAX_CONNECTIONS=32 where it "
                "is set to less",
            )


def _first_message(end: _End, sends: bool, runtime: Runtime) -> None:
    """One number along the edge: whatever torch still makes lazily is made here, in the agreed order."""
    number = torch.zeros(1, device=runtime.device)
    work = end.group.send([number], end.peer, 0) if sends else end.group.recv([number], end.peer, 0)
    work.wait()
    runtime.synchronize()
