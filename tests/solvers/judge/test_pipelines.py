"""Several pipelines in one flushed step: the layers that reduce together, when they do, and the time of the step."""

from __future__ import annotations

import random

import pytest
from problems import as_operations, gpipe, make_network, make_problem, warmup_orders

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.reductions import ReductionGroup, reduction_groups
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.network import Network
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.model.timeline import Interval
from penstock.solvers.verify.verifier import verify


def _pipelines(*cuts: list[tuple[int, list[int]]], batches: list[int]) -> Allocation:
    """Build pipelines of stages of (layers, devices), each with so many micro-batches in order."""
    pipelines, first = [], 0
    for groups, count in zip(cuts, batches, strict=True):
        stages, layer = [], 0
        for layers, devices in groups:
            stages.append(Stage(layer, layer + layers - 1, tuple(devices)))
            layer += layers
        pipelines.append(Pipeline(tuple(stages), (first, first + count - 1)))
        first += count
    return Allocation(tuple(pipelines), first)


def test_groups_of_different_cuts() -> None:
    """Two virtual workers (HetPipe) that cut five layers after 2 and after 1, 4; groups by lowest stage, last first."""
    allocation = _pipelines([(2, [0]), (3, [1, 2])], [(1, [3]), (3, [4]), (1, [5])], batches=[1, 1])
    assert reduction_groups(allocation) == (
        ReductionGroup(1, 1, (0, 3), (0, 4)),
        ReductionGroup(0, 0, (0, 2), (0, 3)),
        ReductionGroup(4, 4, (1, 4), (1, 2, 5)),
        ReductionGroup(2, 3, (1, 3), (1, 2, 4)),
    )


def test_groups_of_one_pipeline_are_its_stages() -> None:
    allocation = single_pipeline((Stage(0, 1, (0,)), Stage(2, 2, (1, 2))), 3)
    assert reduction_groups(allocation) == (ReductionGroup(0, 1, (0,), (0,)), ReductionGroup(2, 2, (1,), (1, 2)))


def test_two_virtual_workers_by_hand() -> None:
    """Worker 0 cuts two layers in two, worker 1 has them on one device; one micro-batch each, F = 10, B = 20.

    Worker 0: F on d0 to 10, over 5, F on d1 15 to 25, B to 45, over 5, B on d0 50 to 70. Worker 1: F to 20, B to 60,
    of layer 1 until 40. Layer 1 is ready on both at 45 and its 40 bytes take 40 between two devices: to 85; layer 0 at
    70, with 30 bytes: to 100. d1 steps at 85 for 3, d0 at 100 for 2, d2 after both for 5.
    """
    problem = make_problem(
        [10, 10], [20, 20], 5, [30, 40], update_ns=[2, 3], nodes=(3,), global_batch_size=2, bucket_bytes=1
    )
    allocation = _pipelines([(1, [0]), (1, [1])], [(2, [2])], batches=[1, 1])
    timeline = simulate(problem, allocation, gpipe(allocation))
    assert timeline.reductions == (Interval(0, 0, 70, 100), Interval(1, 0, 45, 85))
    assert timeline.updates == (Interval(0, -1, 100, 102), Interval(1, -1, 85, 88), Interval(2, -1, 100, 105))
    assert timeline.time_per_global_batch_ns == 105
    assert [(use.busy_ns, use.communication_ns, use.idle_ns) for use in timeline.uses.values()] == [
        (32, 5 + 5 + 30, 33),
        (33, 5 + 5 + 35, 27),
        (65, 40, 0),
    ]


@pytest.mark.parametrize(("overlap", "starts"), [(True, (40, 80)), (False, (60, 100))])
def test_layers_may_be_reduced_while_those_before_them_compute(overlap: bool, starts: tuple[int, int]) -> None:
    """Two equal workers of one stage; B of layer 1 from 20 to 40, of layer 0 to 60, buckets of 40 and 30."""
    problem = make_problem(
        [10, 10], [20, 20], 0, [30, 40], nodes=(2,), global_batch_size=2, bucket_bytes=1, overlap_all_reduce=overlap
    )
    allocation = _pipelines([(2, [0])], [(2, [1])], batches=[1, 1])
    reductions = simulate(problem, allocation, gpipe(allocation)).reductions
    assert reductions == (Interval(0, 0, starts[0], starts[0] + 40), Interval(0, 1, starts[1], starts[1] + 30))


def test_buckets_of_one_stage_start_in_the_order_of_their_numbers() -> None:
    """A shared bus: both groups of stage 0 are ready at 6, and the group of the last layers goes first."""
    problem = make_problem(
        [1, 1],
        [2, 2],
        0,
        [30, 40],
        nodes=(3,),
        form="bus",
        shared=True,
        global_batch_size=2,
        overlap_all_reduce=False,
    )
    allocation = _pipelines([(2, [0])], [(1, [1]), (1, [2])], batches=[1, 1])
    reductions = simulate(problem, allocation, gpipe(allocation)).reductions
    assert [(each.stage, each.bucket) for each in reductions] == [(0, 0), (0, 1)]
    assert reductions[0].start_ns == 6
    assert reductions[1].start_ns == reductions[0].end_ns


@pytest.mark.parametrize("seed", range(30))
def test_equal_pipelines_of_one_stage_are_replicas_that_take_turns(seed: int) -> None:
    """The same devices, operations and bytes, described in two ways (data parallelism)."""
    rng = random.Random(seed)
    layers, replicas, each = rng.randint(1, 4), rng.randint(2, 4), rng.randint(1, 4)
    problem = make_problem(
        [rng.randint(1, 9) for _ in range(layers)],
        parameter_bytes=[rng.randint(0, 40) for _ in range(layers)],
        stash_bytes=3,
        update_ns=2,
        nodes=(replicas,),
        bucket_bytes=rng.choice([10, 100]),
        global_batch_size=2 * replicas * each,
        shared=rng.random() < 0.5,
        overlap_all_reduce=rng.random() < 0.5,
    )
    stages = [Stage(0, layers - 1, (d,)) for d in range(replicas)]
    pipelines = tuple(Pipeline((stage,), (d * each, (d + 1) * each - 1)) for d, stage in enumerate(stages))
    many = Allocation(pipelines, replicas * each)
    turns = single_pipeline((Stage(0, layers - 1, tuple(range(replicas)), "round_robin"),), replicas * each)
    rows = [
        [(kind, 0, m) for m in range(d, replicas * each, replicas) for kind in (FORWARD, BACKWARD)]
        for d in range(replicas)
    ]
    orders = Orders("turns", tuple(Row((d,), as_operations(row)) for d, row in enumerate(rows)))
    one = simulate(problem, many, warmup_orders(many, [1] * replicas))
    two = simulate(problem, turns, orders)
    assert one.time_per_global_batch_ns == two.time_per_global_batch_ns
    assert [r[2:] for r in one.reductions] == [r[2:] for r in two.reductions]
    assert one.uses == two.uses


@pytest.mark.parametrize("seed", range(20))
def test_scaling_all_times_scales_the_answer(seed: int) -> None:
    rng = random.Random(seed)
    layers, factor = rng.randint(1, 4), rng.randint(2, 9)
    forward = [rng.randint(1, 30) for _ in range(layers)]
    cut = rng.randint(1, layers)
    left = [(cut, [0]), (layers - cut, [1])] if cut < layers else [(layers, [0, 1])]
    allocation = _pipelines(
        left, [(layers, [2])], [(1, [3]), (layers - 1, [4])] if layers > 1 else [(1, [3])], batches=[3, 2, 1]
    )
    shared = rng.random() < 0.5
    times = []
    for c in (1, factor):
        problem = make_problem(
            [f * c for f in forward],
            None,
            6 * c,
            30 * c,
            update_ns=4 * c,
            nodes=(5,),
            shared=shared,
            global_batch_size=12,
        )
        times.append(makespan_ns(problem, allocation, gpipe(allocation)))
    assert times[1] == factor * times[0]


def test_pipelines_in_opposite_directions_by_hand() -> None:
    """Two layers, F = 10, B = 20, 5 to travel; pipeline 0 goes from d0 to d1, pipeline 1 from d1 to d0, one batch each.

    d0 runs F0 to 10 and F1 of layer 1, there at 15, to 25, then its B to 45; d1 likewise. The gradients arrive at 50,
    B of layer 0 ends at 70. Both devices hold both layers: 40 bytes of layer 1 are reduced from 45 to 85, and 30 of
    layer 0 from 70 on in a chain of their own, to 100. Each device steps its layers 1 at 85 and 0 at 100, for 3 and 2.
    """
    problem = make_problem([10, 10], [20, 20], 5, [30, 40], update_ns=[2, 3], nodes=(2,), global_batch_size=2)
    allocation = _pipelines([(1, [0]), (1, [1])], [(1, [1]), (1, [0])], batches=[1, 1])
    rows = (
        [(FORWARD, 0, 0), (FORWARD, 3, 1), (BACKWARD, 3, 1), (BACKWARD, 0, 0)],
        [(FORWARD, 2, 1), (FORWARD, 1, 0), (BACKWARD, 1, 0), (BACKWARD, 2, 1)],
    )
    orders = Orders("crossing", tuple(Row((d,), as_operations(row)) for d, row in enumerate(rows)))
    timeline = simulate(problem, allocation, orders)
    assert [track.end_ns.tolist() for track in timeline.tracks] == [[10, 25, 45, 70]] * 2
    assert sorted(timeline.reductions) == [Interval(0, 0, 70, 100), Interval(1, 0, 45, 85)]
    assert sorted(timeline.updates) == [
        Interval(0, -1, 100, 102),
        Interval(1, -1, 85, 88),
        Interval(2, -1, 100, 102),
        Interval(3, -1, 85, 88),
    ]
    assert timeline.time_per_global_batch_ns == makespan_ns(problem, allocation, orders) == 102
    assert verify(problem, allocation, orders, timeline) == []


def test_a_circle_through_both_directions_is_named() -> None:
    """Each device waits for the other device's next operation in the other direction."""
    problem = make_problem([10, 10], nodes=(2,), global_batch_size=2)
    allocation = _pipelines([(1, [0]), (1, [1])], [(1, [1]), (1, [0])], batches=[1, 1])
    rows = (
        [(FORWARD, 3, 1), (BACKWARD, 3, 1), (FORWARD, 0, 0), (BACKWARD, 0, 0)],
        [(FORWARD, 1, 0), (BACKWARD, 1, 0), (FORWARD, 2, 1), (BACKWARD, 2, 1)],
    )
    orders = Orders("crossing", tuple(Row((d,), as_operations(row)) for d, row in enumerate(rows)))
    circle = "n0/0 waits in F1 of stage 3 for F1 of stage 2, while n0/1 waits in F0 of stage 1 for F0 of stage 0"
    with pytest.raises(InvalidPlan, match=circle):
        simulate(problem, allocation, orders)


def test_layers_that_a_device_holds_twice_are_reduced_on_it_for_nothing() -> None:
    """Both pipelines have layer 1 on d1, which adds up its gradients itself; layer 0 is on d0 and d2."""
    problem = make_problem([10, 10], parameter_bytes=[30, 40], nodes=(3,), global_batch_size=2)
    allocation = _pipelines([(1, [0]), (1, [1])], [(1, [2]), (1, [1])], batches=[1, 1])
    assert [group.devices for group in reduction_groups(allocation)] == [(0, 2), (1,)]
    rows = {
        0: [(FORWARD, 0, 0), (BACKWARD, 0, 0)],
        1: [(FORWARD, 1, 0), (BACKWARD, 1, 0), (FORWARD, 3, 1), (BACKWARD, 3, 1)],
        2: [(FORWARD, 2, 1), (BACKWARD, 2, 1)],
    }
    orders = Orders("shared", tuple(Row((d,), as_operations(row)) for d, row in rows.items()))
    timeline = simulate(problem, allocation, orders)
    assert [(each.stage, each.end_ns - each.start_ns) for each in timeline.reductions] == [(0, 30)]
    assert timeline.uses[1].memory.parameters == 80
    assert verify(problem, allocation, orders, timeline) == []


def test_pipelines_that_nothing_connects_are_refused() -> None:
    network = make_network((1, 1))
    apart = Network(network.device_names, network.node_names, network.node_of, network.insides, ())
    problem = make_problem([1], parameter_bytes=1, network=apart, shared=True, global_batch_size=2)
    allocation = _pipelines([(1, [0])], [(1, [1])], batches=[1, 1])
    with pytest.raises(InvalidPlan, match="Nothing connects the replicas of stage 0 and stage 1: n0/0, n1/0"):
        simulate(problem, allocation, gpipe(allocation))
    assert makespan_ns(problem, allocation, gpipe(allocation)) == NEVER_NS
