"""Transports: the same bytes over each, the choice by devices, and the order that NCCL demands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import small_jobs
import torch
from pipelines import Part, programs_of
from rank_pool import RankPool, differences
from torch import Tensor
from two_groups import two_groups

from penstock.executor.runtime.cpu import CpuRuntime, Happened, HostStream
from penstock.executor.runtime.interface import Event
from penstock.executor.runtime.nested import on_tensors
from penstock.executor.runtime.opening import open_device
from penstock.executor.transport.choice import AUTO, Place, choose
from penstock.executor.transport.gloo import GlooTransport
from penstock.executor.transport.order import differing_edge, digests, edges, messages, refuse_order
from penstock.executor.transport.staged import StagedTransport
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import TRANSPORTS

ROWS = ["0F0:3 2F0:3 2B0:3 0B0:3", "0F0:3 0B0:3", "1F0:3 1B0:3"]
TWO = [Part(3, (0,)), Part(3, (1,))]


@pytest.fixture
def pair() -> tuple[object, object]:
    return two_groups()


class Busy(CpuRuntime):
    """A device that is busy until it is let go; whatever it holds is on host and device apart."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def download(self, tensor: Tensor, host: Tensor) -> Event:
        def copy() -> None:
            self.free.wait()
            host.copy_(tensor)

        return Copied(copy)


class Lost(CpuRuntime):
    """A device whose copies fail."""

    def download(self, tensor: Tensor, host: Tensor) -> Event:
        def fail() -> None:
            raise RuntimeError("the device is lost")

        return Copied(fail)


class Computing(HostStream):
    """A stream that has something to do until it is waited for."""

    def __init__(self, waited: threading.Event) -> None:
        self._waited = waited

    def synchronize(self) -> None:
        self._waited.set()


class Copied(Happened):
    """The end of a copy, which is made when it is waited for."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy

    def synchronize(self) -> None:
        self._copy()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("job", "parts", "count"),
    [
        pytest.param("plain", TWO, 4, id="one-to-one"),
        pytest.param("encoder_decoder", [Part(2, (0, 1)), Part(4, (2,))], 2, id="replicas-and-several-tensors"),
    ],
)
def test_staged_runs_train_what_one_process_trains(pool: RankPool, job: str, parts: list[Part], count: int) -> None:
    programs = programs_of(getattr(small_jobs, job), parts, count)
    assert differences(pool.train(programs, job, transport="gloo-staged"))[0] <= 1e-6


def test_a_staged_send_does_not_hold_its_issuer(pair: tuple[object, object]) -> None:
    copies = Busy()
    sender, receiver = StagedTransport(copies, pair[0]), StagedTransport(CpuRuntime(), pair[1])
    sent, got = torch.arange(6.0), torch.zeros(2, 6)
    arrivals = [receiver.receive(got[tag], 0, tag) for tag in range(2)]
    for tag in range(2):
        sender.send(sent + tag, 1, tag, 24)
    assert sender.bytes_sent[1] == 0, "nothing leaves before the device is done"
    copies.free.set()
    for arrival in arrivals:
        arrival.wait()
    sender.drain()
    assert torch.equal(got, torch.stack([sent, sent + 1]))
    assert sender.bytes_sent[1] == 48
    sender.close()
    receiver.close()


def test_a_staged_send_that_fails_is_told_at_the_drain(pair: tuple[object, object]) -> None:
    transport = StagedTransport(Lost(), pair[0])
    transport.send(torch.zeros(1), 1, 1, 4)
    with pytest.raises(RuntimeError, match="the device is lost"):
        transport.drain()
    transport.close()


def test_a_staged_step_ends_when_the_device_has_ended_it(pair: tuple[object, object]) -> None:
    """Else its last instructions would be timed in the next step."""
    waited = threading.Event()
    runtime = CpuRuntime()
    runtime.compute = Computing(waited)
    transport = StagedTransport(runtime, pair[0])
    transport.drain()
    assert waited.is_set()
    transport.close()


def test_a_closed_transport_has_no_threads(pair: tuple[object, object]) -> None:
    """One that runs when the interpreter ends is ended within C++, which aborts the process."""
    before = set(threading.enumerate())
    for make in (GlooTransport, partial(StagedTransport, CpuRuntime())):
        transport = make(pair[0])
        assert set(threading.enumerate()) - before
        transport.close()
        assert not set(threading.enumerate()) - before


CPU, ONE, OTHER = None, "GPU-1", "GPU-2"


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("gpus", "kind"),
    [
        pytest.param((CPU, CPU), "gloo", id="cpus"),
        pytest.param((ONE, OTHER), "nccl", id="a-gpu-each"),
        pytest.param((ONE, OTHER, ONE), "gloo-staged", id="two-on-a-gpu"),
        pytest.param((ONE, CPU), "gloo-staged", id="mixed"),
    ],
)
def test_auto_chooses_by_the_devices(gpus: tuple[str | None, ...], kind: str) -> None:
    assert choose([Place(AUTO, gpu, TRANSPORTS) for gpu in gpus]) == kind
    assert choose([Place(kind, gpu, TRANSPORTS) for gpu in gpus]) == kind


@pytest.mark.tier("quick")
def test_programs_for_gloo_alone_are_staged_on_gpus() -> None:
    """Their receives, or reductions, were never brought into an order that NCCL can match."""
    places = [Place(AUTO, ONE, TRANSPORTS), Place(AUTO, OTHER, ("gloo",))]
    assert choose(places) == "gloo-staged"
    with pytest.raises(UnsupportedRequest, match="programs of rank 1 were lowered for gloo alone") as caught:
        choose([place._replace(wanted="nccl") for place in places])
    assert "at auto" in str(caught.value.remedy)


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("wanted", "gpus", "message"),
    [
        pytest.param("nccl", (ONE, OTHER, ONE), "ranks 0 and 2 share the GPU GPU-1", id="shared"),
        pytest.param("nccl", (ONE, CPU), r"ranks \[1\] compute on CPUs", id="cpu"),
        pytest.param("gloo", (CPU, ONE), "rank 1 computes on a GPU", id="out-of-reach"),
        pytest.param("mpi", (CPU,), r"\['mpi'\]; all ranks need the same known", id="unknown"),
    ],
)
def test_devices_that_a_transport_cannot_connect_are_refused(
    wanted: str, gpus: tuple[str | None, ...], message: str
) -> None:
    with pytest.raises(UnsupportedRequest, match=message) as caught:
        choose([Place(wanted, gpu, TRANSPORTS) for gpu in gpus])
    assert caught.value.remedy


@pytest.mark.tier("quick")
def test_ranks_that_ask_for_different_transports_are_refused() -> None:
    with pytest.raises(UnsupportedRequest, match=r"\['auto', 'gloo'\]"):
        choose([Place(AUTO, CPU, TRANSPORTS), Place("gloo", CPU, TRANSPORTS)])


def test_both_ends_of_every_edge_count_alike() -> None:
    programs = programs_of(small_jobs.residual, [Part(2, (0, 1)), Part(2, (2,)), Part(4, (0,))], 3, rows=ROWS)
    of_ranks = [messages(program) for program in programs]
    everyone = [digests(one) for one in of_ranks]
    assert differing_edge(everyone) is None
    assert edges(everyone) == [(0, 2), (1, 2), (2, 0), (2, 1)]
    for source, target in edges(everyone):
        assert of_ranks[source][source, target] == of_ranks[target][source, target]
    assert of_ranks[2][2, 0] == ["F 1>2 0", "F 1>2 1", "F 1>2 2", "B 1>0 0", "B 1>0 1", "B 1>0 2"]


def test_an_order_that_differs_names_both_ends() -> None:
    programs = programs_of(small_jobs.plain, TWO, 3, rows=["0F0:3 0B0:3", "1F0:3 1B0:3"])
    of_ranks = [messages(program) for program in programs]
    of_ranks[1][0, 1][1:] = reversed(of_ranks[1][0, 1][1:])
    edge = differing_edge([digests(one) for one in of_ranks])
    assert edge == (0, 1)
    message = str(refuse_order(edge, of_ranks[0][edge], of_ranks[1][edge]))
    assert "number 1 is 'F 0>1 1'" in message
    assert "on rank 0 and 'F 0>1 2' on rank 1" in message
    assert "'nothing' on rank 1" in str(refuse_order(edge, ["F 0>1 0"], []))


def test_a_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedRequest, match="torch has no device 'gpu0'"):
        open_device("gpu0")
    with pytest.raises(UnsupportedRequest, match="device 'mps'"):
        open_device("mps")
    with pytest.raises(UnsupportedRequest, match="device 'cuda:99': "):
        open_device("cuda:99")
    assert open_device("cpu").device == torch.device("cpu")


def test_batches_move_with_their_shape() -> None:
    class Pair(NamedTuple):
        first: Tensor
        second: list[Tensor]

    batch = {"x": torch.zeros(1), "y": (Pair(torch.zeros(2), [torch.zeros(3)]), 4, "text")}
    result = on_tensors(lambda tensor: tensor.to("meta"), batch)
    assert result["x"].device.type == "meta"
    pair = result["y"][0]
    assert type(pair) is Pair
    assert (pair.first.device.type, pair.second[0].device.type) == ("meta", "meta")
    assert result["y"][1:] == (4, "text")
