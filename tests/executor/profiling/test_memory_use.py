"""Counted memory: tensors by hand, and the peaks of real ranks beside what the plan predicts."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch

from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.profiling.memory_use import LiveBytes
from penstock.executor.run.job import load_job
from penstock.executor.run.local import run_locally
from penstock.planning.programs.lower import programs
from penstock.questions.answer import plan
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster

BYTES = 4000


def test_storages_count_once_and_as_long_as_they_live() -> None:
    with LiveBytes() as live:
        first = torch.zeros(1000)
        view = first[10:].view(-1)
        assert live.bytes == BYTES
        second = first + 1
        assert live.bytes == 2 * BYTES
        del second
        third = view * 2
        assert live.bytes == 2 * BYTES, "the second one was gone by then"
        first.add_(1)
        assert live.bytes == 2 * BYTES
        third.requires_grad_()
        total = (third.exp() * 3).sum()
        before = live.bytes
        total.backward()
        assert live.bytes > before
    torch.zeros(10**6)
    assert live.bytes < 10**6


@pytest.mark.parametrize("seed", range(8))
def test_the_peak_is_the_most_that_was_there_after_any_operation(seed: int) -> None:
    """Tensors are made, let go of, resized to nothing and back, in any order; what is there is added up each time."""
    draw = random.Random(seed)
    tensors: list[torch.Tensor] = []
    most = 0
    with LiveBytes() as live:
        for _ in range(400):
            what = draw.choice(("make", "make", "let go", "empty", "back"))
            if what == "make" or not tensors:
                tensors.append(torch.zeros(draw.randrange(1, 1000)))
                most = max(most, sum(each.untyped_storage().nbytes() for each in tensors))
                assert live.bytes == most
            elif what == "let go":
                tensors.pop(draw.randrange(len(tensors)))
            else:
                number = draw.randrange(len(tensors))
                tensors[number].untyped_storage().resize_(0 if what == "empty" else 4 * tensors[number].numel())
    assert live.held_bytes() == sum(each.untyped_storage().nbytes() for each in tensors)


def test_what_another_thread_lets_go_of_is_gone() -> None:
    with LiveBytes() as live:
        tensors = [torch.zeros(1000)]
        thread = threading.Thread(target=tensors.clear)
        thread.start()
        thread.join()
        kept = torch.zeros(1000)
        assert live.bytes == kept.untyped_storage().nbytes() == BYTES


@pytest.mark.tier("nightly")
def test_ranks_need_what_the_plan_predicts(tmp_path: Path) -> None:
    topology = ClusterTopology(
        name="here",
        uniform=UniformCluster(
            nodes=1,
            devices_per_node=2,
            kind="V100",
            memory_bytes=2**30,
            fabric=Fabric(bandwidth_bytes_per_s=10**9),
        ),
    )
    profile = analytic_profile(load_job("examples.gpt:tiny"), "V100", (2,))
    file = plan(
        profile, topology, global_batch_size=16, micro_batch_sizes=(2,), planner="gpipe", options={"stages": 2}
    ).file
    report = run_locally(programs(file), "examples.gpt:tiny", directory=tmp_path, steps=2, seed=0, count_memory=True)
    assert file.plan.prediction is not None
    predicted = [use.peak_memory_bytes for use in file.plan.prediction.devices]
    assert list(report.peak_memory_bytes) == pytest.approx(predicted, rel=0.15)
