"""The parts of NCCL's transport that need no GPU: too many streams, and the time at which sends are freed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.executor.transport.nccl import OTHER_STREAMS, NcclTransport, _End, _refuse_too_many
from penstock.schemas.errors import UnsupportedRequest


class Sent:
    """A send that is over when it is let go, or when it was waited for."""

    def __init__(self) -> None:
        self.is_done = False

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.is_done = True


class Group:
    """A communicator whose sends stay under way."""

    def __init__(self) -> None:
        self.works: list[Sent] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Sent:
        self.works.append(Sent())
        return self.works[-1]


@pytest.fixture
def sending() -> tuple[NcclTransport, Group, Group, list[str]]:
    """Rank 0 with edges to 1 and 2, their communicators, and the calls of the compute stream."""
    calls: list[str] = []
    runtime: Any = SimpleNamespace(compute=SimpleNamespace(synchronize=lambda: calls.append("computed")))
    first, second = Group(), Group()
    ends = {(0, 1): _End(first, 1), (0, 2): _End(second, 1)}
    return NcclTransport(runtime, ends, rank=0), first, second, calls


def under_way(transport: NcclTransport) -> dict[int, int]:
    return {peer: len(sends) for peer, sends in transport._under_way.items()}


def test_a_slow_peer_keeps_no_other_s_buffers(sending: tuple[NcclTransport, Group, Group, list[str]]) -> None:
    transport, _, second, _ = sending
    for peer in (1, 2, 2, 1):
        transport.send(torch.zeros(4), peer, tag=0, size_bytes=16)
    assert under_way(transport) == {1: 2, 2: 2}
    for work in second.works:
        work.is_done = True
    transport.hand_over()
    assert under_way(transport) == {1: 2, 2: 0}, "though the first send of all is under way"
    assert transport.bytes_sent == {1: 32, 2: 32}


def test_sends_to_one_peer_end_in_their_order(sending: tuple[NcclTransport, Group, Group, list[str]]) -> None:
    transport, first, _, _ = sending
    for _ in range(3):
        transport.send(torch.zeros(4), 1, tag=0, size_bytes=16)
    first.works[0].is_done = True
    transport.send(torch.zeros(4), 1, tag=0, size_bytes=16)
    assert under_way(transport) == {1: 3, 2: 0}, "a send lets go of what was sent before"


def test_drain_waits_for_all(sending: tuple[NcclTransport, Group, Group, list[str]]) -> None:
    transport, first, second, calls = sending
    for peer in (1, 2, 1):
        transport.send(torch.zeros(4), peer, tag=0, size_bytes=16)
    transport.drain()
    assert all(work.is_done for work in (*first.works, *second.works))
    assert under_way(transport) == {1: 0, 2: 0}
    assert calls == ["computed"]


@pytest.mark.parametrize(("edges", "groups", "too_many"), [(3, 2, False), (4, 2, True), (3, 3, True)])
def test_more_streams_than_queues_are_refused(edges: int, groups: int, too_many: bool) -> None:
    """Of eight queues, as CUDA has them unless it is asked for more."""
    runtime: Any = SimpleNamespace(hardware_queues=8)
    agreed: Any = [{(0, 1): ""}, {(1, peer): "" for peer in range(edges)}]
    if not too_many:
        _refuse_too_many(agreed, [0, groups], runtime)
        return
    words = (
        f"rank 1 needs 9 CUDA streams ({edges} edges, {groups} groups, {OTHER_STREAMS} others), but a GPU runs only 8"
    )
    with pytest.raises(UnsupportedRequest, match=re.escape(words)) as caught:
        _refuse_too_many(agreed, [0, groups], runtime)
    assert "transport gloo-staged" in str(caught.value.remedy)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in str(caught.value.remedy)
