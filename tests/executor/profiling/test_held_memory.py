"""A rank's memory, as measured storages, and the simulator's count: inputs, posted receives, split backwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import small_jobs
import torch
import torch.distributed as dist
from pipelines import Part, problem_of, programs_of, stages_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.examples.synthetic import ImageJob
from penstock.executor.profiling.layer_costs import kept_bytes
from penstock.executor.profiling.memory_use import LiveBytes
from penstock.executor.profiling.share import make_shares
from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import LayerSpec, load_job
from penstock.executor.stage.stage_module import MicroBatch, StageModule
from penstock.schemas.program import KINDS
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.schedule import Orders, Row

ROWS = 2


class HeldStorages:
    """The storages of a stage, layers 1 and 2 of a small GPT, besides its parameters and their gradients."""

    def __init__(self, *, recompute: tuple[tuple[int, int], ...] = (), split: bool = False) -> None:
        self.job = load_job("examples.gpt:tiny")
        chain = Chain(self.job)
        shapes = chain.infer_shapes(range(ROWS))
        self.stage = StageModule(chain, shapes, 1, 2, seed=1, recompute=recompute, split=split)
        for parameter in self.stage.trainable():
            parameter.grad = torch.zeros_like(parameter)
        modules = self.stage.modules.values()
        lasting = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        lasting += [parameter.grad for parameter in self.stage.trainable() if parameter.grad is not None]
        self._lasting = {tensor.untyped_storage()._cdata for tensor in lasting}
        self.cell = MicroBatch(0, range(ROWS), self.stage.seeds(0, 0))
        (self.input_shape,), (self.result_shape,) = (
            [torch.Size((ROWS, *shape.sample_shape)) for shape in shapes[cut].values()] for cut in (0, 2)
        )
        (share,) = make_shares(self.job, 0, len(chain.specs) - 1, (ROWS,))
        self.stash_bytes = sum(kept_bytes(share).stash[1:3])

    def forward(self) -> None:
        """Receive, compute, and send, after which the result is nobody's."""
        self.cell.inputs = [torch.empty(self.input_shape)]
        self.cell.outputs = [tensor.detach() for tensor in self.stage.forward(self.cell, 0)]
        self.cell.outputs = None

    def held_bytes(self, live: LiveBytes) -> int:
        return live.held_bytes(self._lasting)


@pytest.mark.parametrize(("recompute", "counts"), [(((1, 2),), False), (((1, 2),), True), (((2, 2),), False)])
def test_a_recomputing_stage_holds_the_inputs_that_the_judge_counts(
    recompute: tuple[tuple[int, int], ...], counts: bool
) -> None:
    """From its forward to its backward: where buffers count, its own input as a receive, else with what it keeps."""
    storages = HeldStorages(recompute=recompute)
    with LiveBytes() as live:
        storages.forward()
        measured = storages.held_bytes(live)
    problem = problem_of(storages.job, 1)
    problem = replace(problem, memory=replace(problem.memory, count_buffers=counts))
    kept = stage_costs(problem, Stage(1, 2, (0,), recompute=recompute), ROWS).kept_bytes
    profile_stash = 1000 * ROWS * (1 if recompute == ((2, 2),) else 0)
    received = int(problem.forward_bytes[0]) * ROWS if counts else 0
    if recompute == ((1, 2),):
        assert measured == kept + received == storages.input_shape.numel() * 4
    else:
        inputs = kept - profile_stash
        assert inputs == storages.result_shape.numel() * 4
        assert inputs < measured < storages.stash_bytes


class Sum(nn.Module):
    """Adds what an early layer wrote."""

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return x + early


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_is_passed_on_through_segments_is_held_once_and_counted_with_each(parts: int) -> None:
    """By hand: ``early`` and ``x``, 48 bytes a sample each, cross the cuts before layers 2, 3 and 4, which recompute.

    A rank holds the input of every segment, and ``early`` once; the judge counts both tensors with each segment.
    """
    linear = partial(nn.Linear, 12, 12)
    specs = [LayerSpec("flat", nn.Flatten), LayerSpec("early", linear, ("x",), ("early",))]
    specs += [LayerSpec(name, linear) for name in ("one", "two", "three")]
    specs.append(LayerSpec("sum", Sum, ("x", "early"), ("x",)))
    job = ImageJob("skip", lambda: specs, batch_size=ROWS, side=2, classes=12)
    chain = Chain(job)
    shapes = chain.infer_shapes(range(ROWS))
    segments = tuple((a, a if a < 1 + parts else 4) for a in range(2, 2 + parts))
    stage = StageModule(chain, shapes, 2, 4, seed=1, recompute=segments)
    lasting = {parameter.untyped_storage()._cdata for parameter in stage.trainable()}
    cell = MicroBatch(0, range(ROWS), stage.seeds(0, 0))
    with LiveBytes() as live:
        cell.inputs = [torch.empty((ROWS, 12)) for _ in chain.cuts[1]]
        stage.forward(cell, 0)
        measured = live.held_bytes(lasting)
    problem = problem_of(job, 1)
    problem = replace(problem, memory=replace(problem.memory, count_buffers=False))
    assert measured == (parts + 1) * 48 * ROWS
    kept = stage_costs(problem, Stage(2, 4, (0,), recompute=segments), ROWS).kept_bytes
    assert kept == 2 * parts * 48 * ROWS


def test_a_forward_leaves_its_stash_and_no_more_once_its_result_is_sent() -> None:
    storages = HeldStorages()
    with LiveBytes() as live:
        storages.forward()
        assert storages.held_bytes(live) == storages.stash_bytes


def test_the_input_half_frees_what_weights_do_not_need_and_leaves_gradients_that_wait() -> None:
    """No profile splits a stash, so the judge counts all of it until W, and the gradients that wait not at all."""
    storages = HeldStorages(split=True)
    with LiveBytes() as live:
        storages.forward()
        assert storages.held_bytes(live) == storages.stash_bytes
        storages.cell.gradients = [torch.ones(storages.result_shape)]
        storages.stage.backward_input(storages.cell, 0)
        storages.cell.input_gradients = None
        after = storages.held_bytes(live)
        waiting = {
            gradient.untyped_storage()._cdata: gradient.untyped_storage().nbytes()
            for recorded in storages.cell.pending or ()
            for _, gradients, _ in recorded._pending
            for gradient in gradients
        }
        weights_part = after - sum(waiting.values())
        assert 0 < weights_part < storages.stash_bytes
        assert after > storages.stash_bytes, "what waits is more than what is freed, in this model"
        storages.stage.backward_weight(storages.cell)
        assert storages.held_bytes(live) == 0


class Scripted:
    """A transport without a network: sends are done at once, receives are zeros; it counts live receive buffers."""

    def __init__(self) -> None:
        self.bytes_sent: Counter[int] = Counter()
        self._posted: list[tuple[StorageWeakRef, int]] = []

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        self.bytes_sent[peer] += size_bytes

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        storage = buffer.untyped_storage()
        self._posted.append((StorageWeakRef(storage), storage.nbytes()))
        buffer.zero_()
        return self

    def wait(self) -> None:
        """Return at once: it has arrived."""

    def hand_over(self) -> None:
        """Do nothing: no buffer is left."""

    def begin(self, *, is_first: bool) -> None:
        """Do nothing: no work depends on it."""

    def drain(self) -> None:
        """Return at once: no send is left."""

    def close(self) -> None:
        """Do nothing: nothing is open."""

    @property
    def held_bytes(self) -> int:
        return sum(size for reference, size in self._posted if not reference.expired())


class Watched(list[int]):
    """A mark that notes what receives hold when an instruction begins."""

    def __init__(self, transport: Scripted) -> None:
        super().__init__([0, 0])
        self.transport = transport
        self.seen: dict[int, int] = {}

    def __setitem__(self, place: Any, index: Any) -> None:
        if place == 0:
            self.seen[index] = self.transport.held_bytes
        super().__setitem__(place, index)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("ahead", [(6, 6), (2, 1), (3, 2)])
def test_a_rank_holds_its_receives_as_long_as_the_judge_counts_them(alone: None, ahead: tuple[int, int]) -> None:
    """In the middle of every operation of the second of two stages: what was posted for it and those after it."""
    job, count, parts = small_jobs.plain, 6, [Part(3, (0,)), Part(3, (1,))]
    program = programs_of(job, parts, count, warmup=ahead)[1]
    transport = Scripted()
    mark, chain = Watched(transport), Chain(job)
    shapes = chain.infer_shapes(range(4))
    interpreter = Interpreter(program, chain, shapes, seed=1, transport=transport, mark=mark)
    interpreter.agree()
    interpreter.step(0)
    measured = [mark.seen[i] for i, one in enumerate(program.instructions()) if one.kind in KINDS]

    problem, allocation = problem_of(job, 2), single_pipeline(stages_of(parts), count)
    rows = [[tuple(one) for one in _row(s, count, ahead[s])] for s in (0, 1)]
    orders = Orders("test", tuple(Row((s,), np.asarray(row, dtype=np.int32)) for s, row in enumerate(rows)))
    curves = []
    for counts in (True, False):
        timeline = simulate(replace(problem, memory=replace(problem.memory, count_buffers=counts)), allocation, orders)
        track, (times, sizes) = timeline.tracks[1], timeline.memory_curve(1)
        middle = (track.start_ns + track.end_ns) // 2
        curves.append(sizes[np.searchsorted(times, middle, side="right") - 1])
    sent = timeline.transfers
    back = [(track.end_ns[track.operations[:, 0] == 1][m], sent.end_ns[k]) for k, m in _gradients(sent)]
    leaving = [sum(int(low) <= t < int(high) for low, high in back) for t in middle]
    each = int(problem.forward_bytes[2]) * job.batch_size // count
    counted = (curves[0] - curves[1] - each * np.asarray(leaving)).tolist()
    assert measured == counted
    assert max(measured) > each
    assert len(set(measured)) > 1


def _row(s: int, count: int, ahead: int) -> Iterator[tuple[int, int, int]]:
    yield from ((0, s, m) for m in range(ahead))
    for m in range(count):
        yield 1, s, m
        if m + ahead < count:
            yield 0, s, m + ahead


def _gradients(sent: Any) -> list[tuple[int, int]]:
    """Return (place, micro-batch) of the transfers that go backward."""
    return [(k, int(m)) for k, (way, m) in enumerate(zip(sent.direction, sent.micro_batch, strict=True)) if way == 1]


def test_one_receive_of_a_direction_is_posted_ahead_whatever_the_number_of_micro_batches() -> None:
    """At most two are open: the receive of the operation that waits, and one more."""
    for count in (2, 6):
        program = programs_of(small_jobs.plain, [Part(3, (0,)), Part(3, (1,))], count)[1]
        kinds = [one.kind for one in program.instructions()]
        ahead = np.cumsum([(kind == "RECV_F") - (kind == "F") for kind in kinds])
        assert ahead.max() == 2
        assert all(high - low <= 1 for low, high in pairwise(ahead.tolist()))
