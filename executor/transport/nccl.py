"""Messages from GPU to GPU: one NCCL communicator per directed edge, none of them made lazily.

NCCL matches messages by their order and a send occupies its stream until the peer receives, so only programs that were
lowered for it run over it (``choice``); both ends compare their order before the first message all the same. Receives
are waited for by the compute stream, not by this thread (EXECUTOR C.2; Megatron-LM #5240 for communicators that are
made lazily).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.executor.transport.order import Edge, Messages, differing_edge, digests, edges, messages, refuse_order
from penstock.schemas.program import Program


class _End(NamedTuple):
    """A communicator of two ranks, and the other's number in it."""

    group: Any
    peer: int


class NcclTransport:
    """Point-to-point messages over the communicators of ``connect_edges``."""

    def __init__(self, device: torch.device, own: Mapping[Edge, _End], rank: int) -> None:
        self.bytes_sent: Counter[int] = Counter()
        self._stream = torch.cuda.current_stream(device)
        self._ends = own
        self._sends = {peer: end for (source, peer), end in own.items() if source == rank}
        self._receives = {peer: end for (peer, target), end in own.items() if target == rank}
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        """Start sending a contiguous tensor; it must not change until ``drain``. The tag is not sent."""
        under_way = self._under_way
        while under_way and under_way[0][0].is_completed():
            under_way.popleft()
        end = self._sends[peer]
        under_way.append((end.group.send([tensor], end.peer, 0), tensor))
        self.bytes_sent[peer] += size_bytes

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        """Start receiving; ``wait()`` on what is returned makes the compute stream wait."""
        end = self._receives[peer]
        return end.group.recv([buffer], end.peer, 0)

    def hand_over(self) -> None:
        """Do nothing: sends are freed as later ones are issued."""

    def drain(self) -> None:
        """Return when every send is done. Raises what a failed send raised."""
        while self._under_way:
            work, _ = self._under_way.popleft()
            work.wait()
        self._stream.synchronize()

    def close(self) -> None:
        """Give the communicators back."""
        for edge in sorted(self._ends):
            dist.destroy_process_group(self._ends[edge].group)


def connect_edges(program: Program, device: torch.device, timeout_s: float) -> NcclTransport:
    """Make every edge's communicator, in one order on all ranks; collective.

    Raises InvalidPlan on all ranks when two ends of an edge do not count the same messages in the same order.
    """
    agreed = agree_on_order(messages(program))
    own: dict[Edge, _End] = {}
    for edge in edges(agreed):
        group = dist.new_group(
            list(edge),
            timeout=timedelta(seconds=timeout_s),
            backend="nccl",
            device_id=device,
            group_desc=f"edge {edge}",
        )
        if program.rank in edge:
            own[edge] = _End(group, 1 - dist.get_rank(group))
            _first_message(own[edge], program.rank == edge[0], device)
    return NcclTransport(device, own, program.rank)


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


def _first_message(end: _End, sends: bool, device: torch.device) -> None:
    """One number along the edge: whatever torch still makes lazily is made here, in the agreed order."""
    number = torch.zeros(1, device=device)
    work = end.group.send([number], end.peer, 0) if sends else end.group.recv([number], end.peer, 0)
    work.wait()
    torch.cuda.synchronize(device)
