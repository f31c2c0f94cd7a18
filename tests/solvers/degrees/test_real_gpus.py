"""Plans with degrees against the GPUs that hold them: times, memory and bytes from documents and the real topology."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from drawn_documents import Drawn, drawn_plan, drawn_shared_plan
from lane_clock import alone_ns, run_apart, run_file
from page_agreement import assert_same

from penstock.planning.judge import judge
from penstock.schemas.plan import RecomputedModules
from penstock.schemas.plan import Stage as StageOut
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.costs.buckets import Bucket, buckets
from penstock.solvers.degrees.cell_network import cell_network
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.network import Network

PLANS = 1000
SHARED = 500


def documents(drawn: Drawn) -> dict[str, Any]:
    """Return the plan and its request, as they are stored."""
    return drawn.file.model_dump(mode="json")


def assert_on_gpus(drawn: Drawn) -> None:
    """Check that the simulator's timeline equals the run on real GPUs."""
    verdict = judge(drawn.file)
    assert verdict.faults == ()
    assert verdict.timeline is not None
    assert_same(verdict.timeline, run_file(documents(drawn)))


@pytest.mark.parametrize("seed", range(PLANS))
def test_the_judge_says_what_the_gpus_do(seed: int) -> None:
    """Every operation, transfer, reduction and step to the nanosecond, every device's memory to the byte."""
    assert_on_gpus(drawn_plan(random.Random(seed)))


@pytest.mark.parametrize("seed", range(SHARED))
def test_of_stages_that_they_share_out_as_well(seed: int) -> None:
    """Gathers and sums of each layer run on a separate stream, beside the computation."""
    assert_on_gpus(drawn_shared_plan(random.Random(seed)))


@pytest.mark.tier("nightly")
def test_clusters_with_several_ways_between_nodes() -> None:
    for seed in range(40):
        drawn = drawn_plan(random.Random(seed), ("circles",))
        if all(len({drawn.cells.real.network.node_of[gpu] for gpu in cell}) == 1 for cell in drawn.cells.cells):
            assert_on_gpus(drawn)


@pytest.mark.parametrize("seed", range(PLANS))
def test_lanes_that_wait_by_themselves_take_about_as_long(seed: int) -> None:
    """No plan is below the bound of its choice; only lanes' waits for each other are beyond the simulator's time."""
    drawn = drawn_plan(random.Random(seed), sharing="shared")
    whole, (apart, most_ns) = run_file(documents(drawn)), run_apart(documents(drawn))
    assert request_bound(drawn.cells).bound_ns <= apart.time <= whole.time + most_ns
    for (s, direction, m), (start, end) in whole.transfers.items():
        lanes = list(whole.costs.lanes(s, whole.costs.neighbour(s, direction), direction, whole.costs.rows(m)))
        if len({tuple(lane.route) for lane in lanes}) == 1:  # all wait for the same links: for latencies and rounding
            most_ns = end - start + (len(lanes) - 1) * (lanes[0].latency + 1)
            assert end - start <= alone_ns(lanes, whole.costs.links.bandwidth) <= most_ns


def test_every_kind_is_met() -> None:
    """A tenth of the seeds has every kind."""
    met: Counter[str] = Counter()
    for seed in range(0, PLANS, 10):
        drawn = drawn_plan(random.Random(seed))
        request, stages, real = drawn.request, drawn.file.plan.pipelines[0].stages, drawn.cells.real
        size = drawn.choice.degrees.cell
        met.update([request.topology.name, str(drawn.choice.degrees), request.network.sharing, request.memory.buffers])
        features = {
            "sharded": drawn.cells.memory.shard_states,
            "replicas": any(len(stage.devices) > size for stage in stages),
            "several stages": len(stages) > 1,
            "several pipelines": len(drawn.file.plan.pipelines) > 1,
            "left over": drawn.cells.num_devices * size < real.num_devices,
            "of several nodes": any(len(real.network.nodes_of(cell)) > 1 for cell in drawn.cells.cells),
            "scaled kinds": len({device.kind for device in drawn.cells.devices}) > 1,
            "ties": bool(request.profile.shared_parameters),
            "modules": any(isinstance(stage.recompute, RecomputedModules) for stage in stages),
            "several meshes": drawn.choice.degrees.meshes > 1,
            "reduced on one cell": drawn.cells.copies is not None
            and any(bucket for stage in stages if len(stage.devices) == size for bucket in _buckets(drawn, stage)),
        }
        met.update(name for name, there in features.items() if there)
    assert {kind: number for kind, number in met.items() if number < 3} == {}
    assert len(met) == 36


def _buckets(drawn: Drawn, stage: StageOut) -> tuple[Bucket, ...]:
    """Return the buckets that a stage of one GPU group sums."""
    number = [device.name for device in drawn.cells.devices].index(stage.devices[0])
    return buckets(drawn.cells, Stage(*stage.layers, (number,)))


@pytest.mark.tier("nightly")
def test_cells_whose_lanes_are_forgotten_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane gets the whole of a cable or a bus."""

    def undivided(network: Network, cells: Any) -> Network:
        return replace(cell_network(network, cells), cables=network.cables, insides=network.insides)

    monkeypatch.setattr("penstock.solvers.degrees.contract.cell_network", undivided)
    other = 0
    for seed in range(40):
        drawn = drawn_plan(random.Random(seed), ("uniform", "star", "racks"))
        verdict = judge(drawn.file)
        assert verdict.timeline is not None
        other += verdict.timeline.time_per_global_batch_ns != run_file(documents(drawn)).time
    assert other > 10


@pytest.mark.tier("nightly")
def test_lanes_apart_are_another_plan() -> None:
    """Some plans take another time than with all lanes at once."""
    other = 0
    for seed in range(20):
        drawn = drawn_plan(random.Random(seed), sharing="shared")
        other += run_apart(documents(drawn))[0].time != run_file(documents(drawn)).time
    assert other > 4
