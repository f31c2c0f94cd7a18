"""Faults of order that would hang or corrupt a run on GPUs, seeded into programs, transport and runtime, and found."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import small_jobs
from pipelines import Part, programs_of
from simulated_cuda.engine import H100, Device, run
from simulated_cuda.groups import SimulatedGroup, SimulatedWork
from simulated_cuda.ranks import log_alone
from simulated_cuda.runtime import SimulatedCuda
from torch import Tensor

from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.job import Job
from penstock.executor.runtime.cpu import Happened
from penstock.executor.stage.reduction import Reduction
from penstock.executor.transport import nccl
from penstock.executor.transport.nccl import NcclTransport
from penstock.executor.transport.order import differing_edge, digests, messages
from penstock.schemas.program import Instruction, Program

JOB = small_jobs.plain
PIPELINE = [Part(2, (0,)), Part(2, (1, 2)), Part(2, (3,))]
TWICE = [Part(2, (0, 1)), Part(2, (2,)), Part(2, (0, 1))]
"""Two stages on ranks 0 and 1, whose gradients are summed over two communicators."""
WIDE = [Part(3, (0, 1, 2, 3)), Part(3, (4,))]
"""A rank that receives from four."""


def pipeline(**more: Any) -> list[Program]:
    return programs_of(JOB, PIPELINE, 4, transport="nccl", **more)


def wide() -> list[Program]:
    """Return programs in which the next forward is on its way before the previous gradients are sent."""
    return programs_of(JOB, WIDE, 3, warmup=[1, 1], transport="nccl")


def twice() -> list[Program]:
    rows = ["0F0 0F1 2F0 2B0 0B0 2F1 2B1 0B1"] * 2 + ["1F0 1B0 1F1 1B1"]
    return programs_of(JOB, TWICE, 2, rows=rows, transport="nccl")


class Lone(SimulatedCuda):
    """A simulated GPU of a rank without peers."""

    def __init__(self, rank: int, **more: Any) -> None:
        super().__init__(rank, connected=False, **more)
        self.rank = rank


def faults_of(
    programs: Sequence[Program],
    *patches: Any,
    device: Device = H100,
    make_runtime: Callable[[int], SimulatedCuda] = Lone,
    job: Job = JOB,
    steps: int = 1,
) -> str:
    """Return the reports of the engine and of the order of accesses, a line each. The second step receives ahead."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        logged = log_alone(programs, job, make_runtime=make_runtime, steps=steps)
    outcome = run([one.log for one in logged], device)
    return "\n".join([*outcome.faults, *(race for one in logged for race in one.races)])


def changed(programs: Sequence[Program], rank: int, change: Callable[[list[Instruction]], object]) -> list[Program]:
    """Return the programs, with another order, or other instructions, on one rank."""
    instructions = list(programs[rank].instructions())
    change(instructions)
    return [replace(one, prologue=tuple(instructions)) if one.rank == rank else one for one in programs]


def places(instructions: Sequence[Instruction], kind: str, stage: int | None = None) -> list[int]:
    return [i for i, one in enumerate(instructions) if one.kind == kind and stage in (None, one.stage)]


def swap(kind: str) -> Callable[[list[Instruction]], None]:
    """Exchange the first two of a kind that go over the same channel."""

    def change(instructions: list[Instruction]) -> None:
        first, *others = places(instructions, kind)
        other = next(i for i in others if instructions[i].channel == instructions[first].channel)
        instructions[first], instructions[other] = instructions[other], instructions[first]

    return change


def delay(kind: str) -> Callable[[list[Instruction]], None]:
    """Put the first of a kind behind the next one that goes over the same channel."""

    def change(instructions: list[Instruction]) -> None:
        first, *others = places(instructions, kind)
        other = next(i for i in others if instructions[i].channel == instructions[first].channel)
        instructions.insert(other, instructions.pop(first))

    return change


def drop(kind: str) -> Callable[[list[Instruction]], None]:
    def change(instructions: list[Instruction]) -> None:
        del instructions[places(instructions, kind)[0]]

    return change


def instead(name: str, function: Any, owner: Any = NcclTransport) -> Any:
    return mock.patch.object(owner, name, function)


def early() -> Any:
    """Start receives where the program has them, also in its first run."""

    def begin(transport: Any, *, is_first: bool) -> None:
        transport._is_first = False

    return instead("begin", begin)


def test_nothing_is_found_without_a_fault() -> None:
    for programs in (pipeline(), pipeline(bucket_bytes=2000, norm=True), wide(), twice()):
        assert faults_of(programs) == ""


# Programs


def test_receives_in_another_order_than_sends() -> None:
    """Messages have no tags: what comes first is taken for what was to come first."""
    programs = changed(pipeline(), 3, swap("RECV_F"))
    assert "do not fit each other" in faults_of(programs)
    assert differing_edge([digests(messages(program)) for program in programs]) is not None, "ranks refuse to start"


def test_sends_in_another_order_than_receives() -> None:
    """The same from the other end."""
    assert "do not fit each other" in faults_of(changed(pipeline(), 3, delay("SEND_B")))


def test_a_missing_send() -> None:
    """Its receiver waits for the next one, and for ever for the last."""
    report = faults_of(changed(pipeline(), 0, drop("SEND_F")))
    assert re.search("do not fit each other|has not launched", report)


def test_the_last_send_is_missing() -> None:
    """Nothing is confused, but the receiver's compute stream never goes on, and its host never sees the losses."""

    def change(instructions: list[Instruction]) -> None:
        del instructions[places(instructions, "SEND_F")[-1]]

    report = faults_of(changed(pipeline(), 0, change))
    assert re.search(r"rank [123] hangs: its host is waiting for", report)
    assert "waiting for rank 0 (which has not launched its own)" in report


def test_a_receive_is_missing() -> None:
    """The sender is not through until its peer has received."""

    def change(instructions: list[Instruction]) -> None:
        del instructions[places(instructions, "RECV_B")[-1]]

    report = faults_of(changed(pipeline(), 0, change))
    assert "send 4 of edge (" in report
    assert "waiting for rank 0 (which has not launched its own)" in report


def test_opposite_orders_of_two_communicators_on_a_full_device() -> None:
    """Each rank runs the kernel that the other cannot start."""

    def change(instructions: list[Instruction]) -> None:
        sums = [instructions.pop(place) for place in reversed(places(instructions, "REDUCE"))]
        after = places(instructions, "B")[-1] + 1
        instructions[after:after] = sums

    turned = changed(twice(), 1, change)
    assert faults_of(turned) == "", "they fit side by side"
    report = faults_of(turned, device=Device(blocks=40))
    assert "it needs 32 of 40 blocks" in report
    assert "which has not started its own" in report


# Transport


def test_posted_receives_of_nccls_own_size_leave_no_blocks() -> None:
    """Four posted receives of 32 blocks each; the gradients that their senders wait for first do not fit any more."""

    def large(rank: int) -> SimulatedCuda:
        return Lone(rank, message_blocks=32)

    assert faults_of(wide()) == ""
    report = faults_of(wide(), make_runtime=large, steps=2)
    assert "it needs 32 of 132 blocks, of which 4 are free" in report


def test_more_streams_than_hardware_queues() -> None:
    """A posted receive holds up the sends of the streams that share its queue: ranks refuse that many communicators."""
    report = faults_of(pipeline(), device=Device(queues=2))
    assert re.search(r"queue \d begins with .* is not done", report)


def test_both_ends_send_first_over_one_communicator() -> None:
    """A communicator for both directions has one stream: each rank's send waits for the receive behind the other's."""

    class Shared(Lone):
        def __init__(self, rank: int) -> None:
            super().__init__(rank)
            self.groups: dict[frozenset[int], Any] = {}

        def new_group(self, ranks: Sequence[int], *arguments: Any, for_messages: bool, **more: Any) -> Any:
            if not for_messages:
                return super().new_group(ranks, *arguments, for_messages=False, **more)
            key = frozenset(ranks)
            if key not in self.groups:
                self.groups[key] = super().new_group(sorted(ranks), *arguments, for_messages=True, **more)
            return self.groups[key]

    report = faults_of(pipeline(), instead("close", lambda _: None), make_runtime=Shared)
    assert re.search(r"do not fit each other: .*|hangs: ", report)


@pytest.mark.tier("nightly")
def test_kernels_that_are_loaded_while_receives_wait() -> None:
    """The first launch of a kernel waits for receives that were started ahead, whose senders wait for this rank."""
    programs = wide()
    unrehearsed = instead("rehearse", lambda _: None, Interpreter)
    report = faults_of(programs, unrehearsed, early())
    assert "its host is loading the kernel of aten." in report
    assert re.search(r"receive \d of edge .* waiting for rank \d \(which has not launched its own\)", report)
    assert faults_of(programs, unrehearsed) == "", (
        "receives that start when they are needed are enough for this program"
    )
    assert faults_of(programs, early()) == "", "and so are kernels that are there already"


def test_a_receive_that_blocks_the_host() -> None:
    """Receives are posted ahead; a host that waits in one never launches the send that the peer needs first."""
    receive = NcclTransport.receive

    def blocking(transport: Any, buffer: Tensor, peer: int, tag: int) -> Any:
        work = receive(transport, buffer, peer, tag)
        work.wait()
        transport._runtime.compute.synchronize()
        return work

    assert "its host is waiting for event" in faults_of(pipeline(), instead("receive", blocking))


def test_a_device_that_is_waited_for_before_each_send() -> None:
    """Waiting for the whole device includes receives whose senders wait for this very send."""
    send = NcclTransport.send

    def after_all(transport: Any, *arguments: Any) -> None:
        transport._runtime.synchronize()
        send(transport, *arguments)

    assert "its host is waiting for the whole device" in faults_of(pipeline(), instead("send", after_all), steps=2)


def test_different_sizes_at_the_two_ends() -> None:
    """NCCL would hang, or write beyond the buffer."""
    receive = NcclTransport.receive

    def shorter(transport: Any, buffer: Tensor, peer: int, tag: int) -> Any:
        return receive(transport, buffer[:-1] if peer == 0 and len(buffer) > 1 else buffer, peer, tag)

    assert re.search(r"do not fit each other: .*\(\d+ bytes\)", faults_of(pipeline(), instead("receive", shorter)))


def test_communicators_made_in_different_orders() -> None:
    """Each of two ranks waits for the other to come to the one that it makes."""
    edges, ranks = nccl.edges, iter(range(4))

    def in_turn(everyone: Any) -> Any:
        all_edges = edges(everyone)
        return all_edges if next(ranks) != 2 else [*all_edges[1:], all_edges[0]]

    report = faults_of(pipeline(), instead("edges", in_turn, nccl))
    assert "communicators are made in different orders" in report


def test_a_receive_that_is_not_waited_for() -> None:
    """The forward reads what may not have come yet."""
    report = faults_of(pipeline(), instead("wait", lambda work: True, SimulatedWork))
    assert re.search(r"computation in the compute stream reads what receive \d+ in the stream of edge", report)


def test_memory_that_is_given_out_again_before_it_is_sent() -> None:
    """The transport lets go of what it sends at once, and the next tensor takes its place."""

    def forgetful(transport: Any, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        end = transport._sends[peer]
        end.group.send([tensor], end.peer, 0)

    report = faults_of(pipeline(), instead("send", forgetful))
    assert re.search(r"in the compute stream writes what send \d+ in the stream of edge .* reads", report)


# Runtime


def test_a_copy_without_its_event() -> None:
    """Inputs are read while they are copied."""

    class Hasty(Lone):
        def moved(self, value: Any) -> Any:
            with mock.patch.object(self.compute, "wait"):
                return super().moved(value)

    assert "reads what a copy in the copy stream writes" in faults_of(pipeline(), make_runtime=Hasty)


def test_a_download_that_does_not_wait_for_what_it_copies() -> None:
    """The copy stream brings what the compute stream has not made yet."""

    class Hasty(Lone):
        def download(self, tensor: Tensor, host: Tensor) -> Any:
            with mock.patch.object(self.copies, "wait"):
                return super().download(tensor, host)

    report = faults_of(pipeline(norm=True), make_runtime=Hasty)
    assert "a copy in the copy stream reads what computation in the compute stream writes" in report


def test_a_host_that_reads_what_has_not_been_copied() -> None:
    """The norm is read from host memory before the copy has come there."""

    class Hasty(Lone):
        def download(self, tensor: Tensor, host: Tensor) -> Any:
            super().download(tensor, host)
            return Happened()

    report = faults_of(pipeline(norm=True), make_runtime=Hasty)
    assert "the host in the host writes what a copy in the copy stream writes" in report


def test_inputs_whose_memory_is_not_kept() -> None:
    """They were made in the copy stream, which takes their memory for the next ones while they are still read."""

    class Careless(Lone):
        def keep(self, tensor: Tensor, stream: Any) -> None:
            """Keep nothing."""

    report = faults_of(pipeline(), make_runtime=Careless)
    assert "a copy in the copy stream writes what computation in the compute stream reads" in report


# Reductions


def test_a_collective_that_one_member_leaves_out() -> None:
    """The others' kernels wait for it."""
    reduce = SimulatedGroup.allreduce

    def all_but_one(group: Any, tensors: list[Tensor], opts: Any) -> Any:
        if group.rank() == 1:
            return SimulatedWork(group._recorder, group._recorder.record(0), None)
        return reduce(group, tensors, opts)

    report = faults_of(pipeline(), instead("allreduce", all_but_one, SimulatedGroup))
    assert "all_reduce 0 of group 0" in report
    assert "waiting for rank 2 (which has not launched its own)" in report


def test_buckets_in_different_orders_on_two_replicas() -> None:
    """Each replica starts what is ready first; their kernels are of different buckets."""

    def as_it_comes(reduction: Any, bucket: Any) -> None:
        if bucket.works is None:
            bucket.start()

    job = small_jobs.residual
    parts = [Part(6, (0, 1)), Part(2, (2,))]
    programs = programs_of(job, parts, 3, bucket_bytes=1200, transport="nccl", overlap=False)
    assert len(places(programs[1].prologue, "REDUCE")) > 1
    assert faults_of(programs, job=job) == ""

    def change(instructions: list[Instruction]) -> None:
        order = places(instructions, "REDUCE")
        instructions[order[0]], instructions[order[-1]] = instructions[order[-1]], instructions[order[0]]

    turned = changed(programs, 1, change)
    assert faults_of(turned, job=job) == "", "the product starts them in the order of their numbers"
    report = faults_of(turned, instead("_start", as_it_comes, Reduction), job=job)
    assert re.search(r"kernels \d of group 0 do not fit each other: all_reduce", report)


def test_a_step_that_does_not_wait_for_its_sums() -> None:
    """The optimizer reads gradients that are still being summed."""
    report = faults_of(
        pipeline(), instead("wait", lambda *_: None, Reduction), instead("wait_all", lambda _: None, Reduction)
    )
    assert re.search(r"in the compute stream (reads|writes) what all_reduce 0 in the stream of group 0 writes", report)


def test_a_host_that_leaves_out_a_collective_of_hosts() -> None:
    """The others wait for the sum of squares; the device of the one that goes on is not to blame."""
    programs = pipeline(norm=True)

    def change(instructions: list[Instruction]) -> None:
        for kind in ("NORM", "WAIT_NORM"):
            del instructions[places(instructions, kind)[0]]

    report = faults_of(changed(programs, 2, change))
    assert "rank 0 hangs: its host is waiting for collective" in report
    assert "of hosts (all), which ranks [2] have not entered" in report
