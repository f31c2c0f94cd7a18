"""Programs of several pipelines, averaging, ties, the norm: run by a plain simulation of ranks, and by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from lowered import ran, starved
from problems import as_operations, chain, early_backward, gpipe, make_problem, straight
from random_plans import random_crossing_pipelines, random_orders, random_pipelines, random_problem
from reference_programs import verdict

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import Program, Shared, parse_row
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.lowering import check_programs, lower
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.schedules.periodic.eager import eager

SEEDS = 80


# Several pipelines


def _drawn(seed: int) -> tuple[Problem, Allocation, Orders]:
    """Draw two or three pipelines, with three times the samples."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    while problem.num_devices < 2 or problem.global_batch_size < 2:
        problem = random_problem(rng)
    problem = replace(problem, global_batch_size=3 * problem.global_batch_size)
    make = rng.choice([random_pipelines, random_crossing_pipelines])
    allocation = make(rng, problem)
    return problem, allocation, random_orders(rng, allocation)


def test_most_drawn_pipelines_can_be_lowered_and_some_cannot() -> None:
    lowered = sum(not starved(*_drawn(seed)[:2]) for seed in range(SEEDS))
    assert SEEDS // 2 < lowered < SEEDS


@pytest.mark.parametrize("seed", range(SEEDS))
def test_pipelines_reduce_each_layer_once(seed: int) -> None:
    problem, allocation, schedule = _drawn(seed)
    if starved(problem, allocation):
        with pytest.raises(InvalidPlan, match=r"some would get|that take turns"):
            lower(problem, allocation, schedule)
        return
    programs = lower(problem, allocation, schedule)
    ran(programs)
    for layer in range(problem.num_layers):
        holds = {p.rank for p in programs for part in p.stages if part.first <= layer <= part.last}
        buckets = [
            (p.rank, group)
            for p in programs
            for part in p.stages
            for first, last, group in part.buckets
            if first <= layer <= last
        ]
        assert sorted(rank for rank, _ in buckets) == sorted(holds)
        (group,) = {number for _, number in buckets}
        assert (programs[0].groups[group] if group >= 0 else (min(holds),)) == tuple(sorted(holds))
    ran(lower(problem, allocation, schedule, transport="nccl"), "nccl")


def test_a_device_in_two_pipelines_reduces_behind_the_last_backward_of_both() -> None:
    """Two layers, down over devices 0 and 1, up over 1 and 0 (Chimera): each device holds both layers. By hand."""
    problem = make_problem([1, 1], boundary_bytes=4, parameter_bytes=8, global_batch_size=2)
    down, up = (Stage(0, 0, (0,)), Stage(1, 1, (1,))), (Stage(0, 0, (1,)), Stage(1, 1, (0,)))
    allocation = Allocation((Pipeline(down, (0, 0)), Pipeline(up, (1, 1))), 2)
    rows = (
        Row((0,), as_operations(parse_row("0F0 3F1 3B1 0B0"))),
        Row((1,), as_operations(parse_row("2F1 1F0 1B0 2B1"))),
    )
    first, second = lower(problem, allocation, Orders("chimera", rows))
    assert [part.buckets for part in first.stages] == [((0, 0, 0),), ((1, 1, 1),)]
    assert [part.buckets for part in second.stages] == [((1, 1, 1),), ((0, 0, 0),)]
    assert " ".join(str(one) for one in first.instructions() if one.channel < 0) == (
        "0F0 3F1 3REDUCE0 3B1 0REDUCE0 0B0 3WAIT_REDUCE0 3STEP0 0WAIT_REDUCE0 0STEP0"
    )
    assert first.groups == ((0, 1), (0, 1))


def test_a_layer_that_a_rank_holds_twice_is_one_module() -> None:
    """Both pipelines have all layers on device 0: the lower stage has the bucket, its step comes behind both."""
    problem = make_problem([1, 1], parameter_bytes=8, global_batch_size=2)
    stages = (Stage(0, 1, (0,)),)
    allocation = Allocation((Pipeline(stages, (0, 0)), Pipeline(stages, (1, 1))), 2)
    (program,) = lower(problem, allocation, Orders("twice", (Row((0,), as_operations(parse_row("0F0 0B0 1F1 1B1"))),)))
    assert [part.buckets for part in program.stages] == [((0, 1, -1),), ()]
    assert " ".join(map(str, program.instructions())) == "0F0 0B0 1F1 1B1 0STEP0"


# Elastic averaging


@pytest.mark.parametrize("pipelines", [1, 2, 3])
@pytest.mark.parametrize("delta", [0, 1, 2])
def test_averaging_gives_every_pipeline_a_rank_on_every_device(pipelines: int, delta: int) -> None:
    problem = make_problem([1] * 3, boundary_bytes=4, parameter_bytes=8, global_batch_size=4)
    stages = tuple(Stage(s, s, (2 - s,)) for s in range(3))
    allocation = parallel_pipelines(stages, pipelines, 4)
    schedule = advance_forward(problem, allocation, delta=delta)
    programs = lower(problem, allocation, schedule, update_rule="elastic_averaging", staleness=1)
    ran(programs)
    assert [(p.device, part.pipeline) for p in programs for part in p.stages] == [
        (f"n0/{d}", i) for d in range(3) for i in range(pipelines)
    ]
    assert programs[0].groups == tuple(tuple(range(d * pipelines, (d + 1) * pipelines)) for d in (2, 1, 0))
    for program in programs:
        (part,) = program.stages
        assert program.groups[part.buckets[0][2]].index(program.rank) == part.pipeline
        assert (program.pipelines, program.staleness, program.batches) == (pipelines, 1, 1)
        tail = [str(one) for one in program.instructions()][-3:]
        assert tail == [f"{part.stage}AVG_PULL0", f"{part.stage}STEP0", f"{part.stage}AVG_PUSH0"]
        peers = {channel.peer for channel in program.channels}
        assert all(programs[peer].stages[0].pipeline == part.pipeline for peer in peers)


def folded(num_micro_batches: int) -> Orders:
    """Return the order of two stages on both of devices 0 and 1, one micro-batch after the other."""
    row = " ".join(f"0F{m} 1F{m} 1B{m} 0B{m}" for m in range(num_micro_batches))
    return Orders("folded", (Row((0, 1), as_operations(parse_row(row))),))


# Split backwards, recomputation, ties, the norm


def test_recomputed_modules_are_in_the_program_of_their_stage() -> None:
    problem = make_problem([1] * 4)
    allocation = single_pipeline((Stage(0, 1, (0,)), Stage(2, 3, (1,), modules=("norm", "mlp"))), 2)
    first, second = lower(problem, allocation, early_backward(allocation))
    assert [part.modules for program in (first, second) for part in program.stages] == [(), ("norm", "mlp")]


def test_modules_are_not_recomputed_by_an_instruction_of_its_own() -> None:
    """Modules run again within the backward; a rank has nothing to do before it."""
    problem = make_problem([1] * 2)
    allocation = single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1,), modules=("norm", "mlp"))), 2)
    rows = Row((0,), as_operations(parse_row("0F0:2 0B0:2"))), Row((1,), as_operations(parse_row("1F0:2 1R0 1B0:2")))
    with pytest.raises(InvalidPlan, match=r"cannot run 1R0: stage 1 recomputes only norm, mlp of each layer"):
        lower(problem, allocation, Orders("by hand", rows))


def test_halves_and_recomputation_are_operations_of_their_own() -> None:
    problem = make_problem([1, 1, 1], boundary_bytes=4, global_batch_size=2)
    stages = Stage(0, 1, (0,), recompute=((1, 1),)), Stage(2, 2, (1,))
    allocation = single_pipeline(stages, 2)
    rows = (
        Row((0,), as_operations(parse_row("0F0:2 0R0 0I0 0W0 0I1 0W1"))),
        Row((1,), as_operations(parse_row("1F0 1I0 1F1 1I1 1W0:2"))),
    )
    first, second = lower(problem, allocation, Orders("halves", rows))
    ran([first, second])
    assert " ".join(map(str, second.instructions())) == (
        "1RECV_F0@0 1RECV_F1@0 1F0 1I0 1SEND_B0@1 1F1 1I1 1SEND_B1@1 1W0 1W1 1STEP0"
    )
    assert first.stages[0].recompute == ((1, 1),)
    assert [one.kind for one in first.instructions() if one.kind in "FIWR"] == list("FFRIWIW")


def test_tied_weights_are_summed_over_all_that_hold_them() -> None:
    problem = make_problem(
        [1, 1, 1], boundary_bytes=4, parameter_bytes=8, global_batch_size=4, shared_parameters=(("wte", (0, 2), 8),)
    )
    allocation = chain([(1, [0, 1]), (1, [2]), (1, [3])], 2)
    programs = lower(problem, allocation, early_backward(allocation))
    ran(programs)
    assert programs[0].groups == ((0, 1), (0, 1, 3))
    assert programs[0].shared == (Shared("wte", (0, 2), 1),)
    tails = [
        [str(one) for one in p.instructions() if one.kind in ("WAIT_REDUCE", "REDUCE_SHARED", "STEP")] for p in programs
    ]
    assert tails == [
        ["0WAIT_REDUCE0", "0REDUCE_SHARED0", "0STEP0"],
        ["0WAIT_REDUCE0", "0REDUCE_SHARED0", "0STEP0"],
        ["1STEP0"],
        ["2REDUCE_SHARED0", "2STEP0"],
    ]
    together = chain([(3, [0])], 2)
    assert lower(problem, together, gpipe(together))[0].shared == ()


def test_ties_cross_two_ranks_in_one_order() -> None:
    """Rank 0 finishes stage 1 before stage 0, rank 1 stage 3 before stage 2: separate orders of ties would block."""
    ties = (("outer", (0, 3), 8), ("inner", (1, 2), 8))
    problem = make_problem([1] * 4, boundary_bytes=4, parameter_bytes=8, global_batch_size=2, shared_parameters=ties)
    allocation = chain([(1, [0]), (1, [0]), (1, [1]), (1, [1])], 2)
    rows = ([0], "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"), ([1], "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1")
    schedule = Orders("by hand", tuple(Row(tuple(d), as_operations(parse_row(text))) for d, text in rows))
    for norm in (False, True):
        programs = lower(problem, allocation, schedule, norm=norm)
        reference = ran(programs)
        assert [reference.left[rank, "tie", tie] for rank in (0, 1) for tie in (0, 1)] == [1] * 4
        first, second = ([one.channel for one in p.instructions() if one.kind == "REDUCE_SHARED"] for p in programs)
        assert len(first) == 2
        assert first == second, "both ranks sum the ties in the same order"


@pytest.mark.parametrize("batches", [1, 7, 40])
def test_ties_under_double_buffered_updates(batches: int) -> None:
    ties = (("wte", (0, 2), 8),)
    problem = make_problem([1] * 3, boundary_bytes=4, parameter_bytes=8, global_batch_size=4, shared_parameters=ties)
    allocation = straight(problem, 4)
    pattern = eager(problem, allocation, update_rule="double_buffered")
    reference = ran(lower(problem, allocation, pattern, update_rule="double_buffered", batches=batches))
    assert reference.left[0, "tie", 0] == reference.left[2, "tie", 0] == batches
    with pytest.raises(UnsupportedRequest, match="'wte' is shared by layers"):
        lower(problem, allocation, pattern, update_rule="weight_stashing")


def test_the_norm_is_summed_once_behind_all_gradients_and_ahead_of_all_steps() -> None:
    problem = make_problem([1, 1], boundary_bytes=4, parameter_bytes=8, global_batch_size=4)
    allocation = chain([(1, [0, 1]), (1, [0, 1])], 2)
    programs = lower(problem, allocation, folded(2), norm=True)
    ran(programs)
    tail = [one.kind for one in programs[0].instructions()][-6:]
    assert tail == ["WAIT_REDUCE", "WAIT_REDUCE", "NORM", "WAIT_NORM", "STEP", "STEP"]
    assert {one.stage for one in programs[0].instructions() if one.kind == "NORM"} == {0}


def test_optimizer_states_are_shared_out_where_the_request_says_so() -> None:
    for shard, replicas in ((True, [0, 1]), (False, [0, 1]), (True, [0])):
        problem = make_problem([1], parameter_bytes=8, global_batch_size=4, shard_states=shard)
        allocation = chain([(1, replicas)], 2)
        program = lower(problem, allocation, gpipe(allocation))[0]
        assert program.shard_states == (shard and len(replicas) > 1)


def test_replicas_that_share_states_step_their_stages_in_one_order() -> None:
    """Steps gather the parts that replicas have stepped; else each stage steps as soon as its gradients are summed."""
    allocation = chain([(1, [0, 1]), (1, [2]), (1, [0, 1])], 1)
    texts = "0F0 2F0 2B0 0B0", "0F0 2F0 2I0 0B0 2W0", "1F0 1B0"
    rows = [Row((rank,), as_operations(list(parse_row(text)))) for rank, text in enumerate(texts)]
    for shard, expected in ((True, [[2, 0], [2, 0], [1]]), (False, [[2, 0], [0, 2], [1]])):
        problem = make_problem([1] * 3, boundary_bytes=4, parameter_bytes=8, global_batch_size=2, shard_states=shard)
        programs = lower(problem, allocation, Orders("test", tuple(rows)))
        assert [[one.stage for one in p.instructions() if one.kind == "STEP"] for p in programs] == expected


# What is refused


def test_what_a_rule_does_not_have_is_refused() -> None:
    problem = make_problem([1, 1], boundary_bytes=4, global_batch_size=4)
    allocation = straight(problem, 4)
    pattern = eager(problem, allocation, update_rule="double_buffered")
    orders = gpipe(allocation)
    with pytest.raises(UnsupportedRequest, match="double_buffered updates have no norm of all gradients"):
        lower(problem, allocation, pattern, update_rule="double_buffered", norm=True)
    with pytest.raises(UnsupportedRequest, match="cannot train 2 global batches under synchronous"):
        lower(problem, allocation, orders, batches=2)
    with pytest.raises(UnsupportedRequest, match="staleness 1 needs elastic averaging"):
        lower(problem, allocation, orders, staleness=1)
    with pytest.raises(InvalidPlan, match="is periodic, which does not fit synchronous updates"):
        lower(problem, allocation, pattern)
    with pytest.raises(InvalidPlan, match="is one flushed step, which does not fit double_buffered updates"):
        lower(problem, allocation, orders, update_rule="double_buffered")
    turns = single_pipeline((Stage(0, 0, (0, 1), "round_robin"), Stage(1, 1, (2,))), 3)
    stashing = eager(problem, turns, update_rule="weight_stashing")
    with pytest.raises(InvalidPlan, match="stage 0 steps after every 2 micro-batches, but 1 global batches have 3"):
        lower(problem, turns, stashing, update_rule="weight_stashing")
    assert len(lower(problem, turns, stashing, update_rule="weight_stashing", batches=2)) == 3


def test_programs_that_do_not_fit_together_are_refused() -> None:
    problem = make_problem([1, 1], parameter_bytes=8, global_batch_size=4)
    allocation = chain([(2, [0, 1])], 2)
    good = lower(problem, allocation, gpipe(allocation))
    part = good[1].stages[0]

    def changed(**fields: object) -> list[Program]:
        return [good[0], replace(good[1], **fields)]  # type: ignore[arg-type]

    with pytest.raises(InvalidPlan, match="do not agree on micro-batches"):
        check_programs(changed(batches=2))
    with pytest.raises(InvalidPlan, match="cover the layers"):
        check_programs(changed(stages=(replace(part, buckets=((1, 1, 0),)),)))
    with pytest.raises(InvalidPlan, match="not all ranks of group 0 have a bucket of layers"):
        check_programs(changed(stages=(replace(part, buckets=((1, 1, 0), (0, 0, 0))),)))
    with pytest.raises(InvalidPlan, match="in group 3, but is not in this group"):
        check_programs(changed(stages=(replace(part, buckets=((0, 1, 3),)),)))
    hasty = tuple(one for one in good[0].prologue if one.kind != "WAIT_REDUCE")
    with pytest.raises(InvalidPlan, match="each bucket is reduced once"):
        check_programs([replace(good[0], prologue=hasty), good[1]])


def test_ranks_that_wait_for_each_other_at_a_bucket_are_named() -> None:
    problem = make_problem([1, 1], parameter_bytes=8, global_batch_size=4)
    allocation = chain([(1, [0, 1]), (1, [0, 1])], 1)
    first, second = lower(problem, allocation, folded(1))
    code = list(first.prologue)
    reduces, waits = [[one for one in code if one.kind == kind] for kind in ("REDUCE", "WAIT_REDUCE")]
    rest = [one for one in code if one not in (*reduces, *waits) and one.kind != "STEP"]
    steps = [one for one in code if one.kind == "STEP"]
    crossed = [
        replace(p, prologue=(*rest, order[0], waits_of[0], order[1], waits_of[1], *steps))
        for p, order, waits_of in ((first, reduces, waits), (second, reduces[::-1], waits[::-1]))
    ]
    with pytest.raises(InvalidPlan, match=r"waits for the REDUCE of rank 1.*waits for the REDUCE of rank 0"):
        check_programs(crossed)
    assert verdict(crossed, "gloo") == "stuck"
