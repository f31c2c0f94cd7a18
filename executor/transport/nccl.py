"""Messages from GPU to GPU: one NCCL communicator per directed edge, all created before the first step.

NCCL matches messages by their order, and a send occupies its stream until the peer receives. So only programs that were
lowered for it run over it (``choice``), and both ends still compare their order before the first message. The compute
stream waits for receives, not this thread (EXECUTOR C.2; Megatron-LM #5240 for communicators that are created lazily).

A kernel or a library is loaded at its first use, which waits until the GPU is idle [1]_. A receive that was started
early would block that until its sender comes, which may itself wait for this rank. So in its first run a program starts
a receive only when it is waited for: then the computation that loads something needs all that the GPU receives. Sends
may still wait; a rank's `rehearsal` leaves little to load.

A communicator has a stream. Streams beyond the GPU's hardware queues share one, in which a receive that waits for its
sender blocks all later work. So a rank has no more communicators than queues.

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
"""A rank's streams besides its communicators': computation, copies to and from the host, and the job's streams."""


class _End(NamedTuple):
    """A communicator of two ranks, and the peer's number in it."""

    group: Any
    peer: int


class _Later:
    """A receive that is started when it is waited for, after the earlier ones on its edge."""

    def __init__(self, start: Callable[[], Any], before: deque[_Later]) -> None:
        self._start = start
        self._before = before
        self._work: Any = None
        before.append(self)

    def start(self) -> None:
        """Start the earlier receives, and this one."""
        while self._work is None:
            first = self._before.popleft()
            first._work = first._start()

    def wait(self) -> None:
        """Make the compute stream wait for it."""
        self.start()
        self._work.wait()


class NcclTransport:
    """Point-to-point messages over the communicators of ``connect_edges``."""

    def __init__(self, runtime: Runtime, ends: Mapping[Edge, _End], rank: int) -> None:
        self.bytes_sent: Counter[int] = Counter()
        self._runtime = runtime
        self._ends = ends
        self._sends = {peer: end for (source, peer), end in ends.items() if source == rank}
        self._receives = {peer: end for (peer, target), end in ends.items() if target == rank}
        self._under_way: dict[int, deque[tuple[Any, Tensor]]] = {peer: deque() for peer in self._sends}
        self._later: dict[int, deque[_Later]] = {peer: deque() for peer in self._receives}
        self._is_first = True

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        """Start to send a contiguous tensor; it must not change until ``drain``. The tag is not sent."""
        self.hand_over()
        end = self._sends[peer]
        self._under_way[peer].append((end.group.send([tensor], end.peer, 0), tensor))
        self.bytes_sent[peer] += size_bytes

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        """Start to receive, at once or when needed; ``wait()`` on the result makes the compute stream wait."""
        before = self._later[peer]
        if self._is_first:
            return _Later(partial(self._receive, buffer, peer, tag), before)
        if before:
            before[-1].start()
        return self._receive(buffer, peer, tag)

    def begin(self, *, is_first: bool) -> None:
        """Note whether the next part of the program runs for the first time."""
        self._is_first = is_first

    def _receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        end = self._receives[peer]
        return end.group.recv([buffer], end.peer, 0)

    def hand_over(self) -> None:
        """Free tensors that have been sent, peer by peer: messages to one peer arrive in order."""
        for under_way in self._under_way.values():
            while under_way and under_way[0][0].is_completed():
                under_way.popleft()

    def drain(self) -> None:
        """Wait until every send and all computation is done. Raises the error of a failed send."""
        for under_way in self._under_way.values():
            while under_way:
                work, _ = under_way.popleft()
                work.wait()
        self._runtime.compute.synchronize()

    def close(self) -> None:
        """Free the communicators."""
        for edge in sorted(self._ends):
            dist.destroy_process_group(self._ends[edge].group)


def connect_edges(program: Program, runtime: Runtime, timeout: timedelta) -> NcclTransport:
    """Create every edge's communicator, in one order on all ranks; collective.

    Raises InvalidPlan on all ranks when the two ends of an edge do not have the same messages in the same order, and
    UnsupportedRequest when a rank has more communicators than its GPU has queues for.
    """
    agreed = agree_on_order(messages(program))
    _refuse_too_many(agreed, _groups_of_each(program), runtime)
    ends: dict[Edge, _End] = {}
    for edge in edges(agreed):
        group = runtime.new_group(edge, timeout, f"edge {edge}", for_messages=True)
        if program.rank in edge:
            ends[edge] = _End(group, 1 - dist.get_rank(group))
            _first_message(ends[edge], program.rank == edge[0], runtime)
    return NcclTransport(runtime, ends, program.rank)


def agree_on_order(local: Messages) -> Sequence[Mapping[Edge, str]]:
    """Return the digests of all ranks' edges; collective. InvalidPlan on every rank when two ends differ."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digests(local))
    differing = differing_edge(everyone)
    if differing is not None:
        words: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(words, local.get(differing, []))
        raise refuse_order(differing, *(words[rank] for rank in differing))
    return everyone


def _groups_of_each(program: Program) -> list[int]:
    """Return the number of the program's groups that each rank is in."""
    return [sum(rank in ranks for ranks in program.groups) for rank in range(program.world_size)]


def _refuse_too_many(agreed: Sequence[Mapping[Edge, str]], groups: Sequence[int], runtime: Runtime) -> None:
    for rank, (ends, shared) in enumerate(zip(agreed, groups, strict=True)):
        streams = OTHER_STREAMS + len(ends) + shared
        if streams > runtime.hardware_queues:
            raise UnsupportedRequest(
                f"rank {rank} needs {streams} CUDA streams ({len(ends)} edges, {shared} groups, {OTHER_STREAMS} "
                "others), "
                f"but a GPU runs only {runtime.hardware_queues} side by side: a receive that waits for its sender "
                "would block others",
                remedy="transport gloo-staged, stages with fewer replicas, or CUDA_DEVICE_MAX_CONNECTIONS=32 where it "
                "is set to less",
            )


def _first_message(end: _End, sends: bool, runtime: Runtime) -> None:
    """Send one number along the edge, so that torch creates everything lazy now, in the agreed order."""
    number = torch.zeros(1, device=runtime.device)
    work = end.group.send([number], end.peer, 0) if sends else end.group.recv([number], end.peer, 0)
    work.wait()
    runtime.synchronize()
