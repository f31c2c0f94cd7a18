"""Lowering: programs by hand, refusals, and random plans against plain oracles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import as_operations, chain, early_backward, gpipe, make_problem, straight, warmup_orders
from reference_programs import verdict

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD, Channel, Instruction, Program, parse_row
from penstock.solvers.lowering import check_programs, lower, lower_arrays
from penstock.solvers.lowering.channels import _common, _pairs
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row


def text(program: Program) -> str:
    return " ".join(map(str, program.instructions()))


def orders(*rows: tuple[Sequence[int], str]) -> Orders:
    return Orders("by hand", tuple(Row(tuple(devices), as_operations(parse_row(text))) for devices, text in rows))


def test_1f1b_on_two_stages() -> None:
    """By hand: receives are posted before the previous receive's operation, or two operations before their own."""
    problem = make_problem([1, 1], boundary_bytes=4, global_batch_size=3)
    first, second = lower(problem, allocation := straight(problem, 3), early_backward(allocation))
    assert text(first) == (
        "0RECV_B0@1 0F0 0SEND_F0@0 0F1 0SEND_F1@0 0RECV_B1@1 0B0 0F2 0SEND_F2@0 0RECV_B2@1 0B1 0B2 0STEP0"
    )
    assert text(second) == (
        "1RECV_F0@0 1RECV_F1@0 1F0 1B0 1SEND_B0@1 1RECV_F2@0 1F1 1B1 1SEND_B1@1 1F2 1B2 1SEND_B2@1 1STEP0"
    )
    assert first.channels == (Channel("F", 0, 1, 1, ((0, 1),), 1), Channel("B", 0, 1, 1, ((0, 1),), 1))
    assert (first.device, first.rank, first.world_size, first.row_classes) == ("n0/0", 0, 2, ((1, 3),))


def test_a_message_within_a_rank_is_handed_over_by_its_sender() -> None:
    """Stages 0 and 1 on one device: no send, no receive, and the two ends of a channel are neighbours."""
    problem = make_problem([1, 1], boundary_bytes=4, global_batch_size=2)
    allocation = chain([(1, [0]), (1, [0])], 2)
    (program,) = lower(problem, allocation, orders(([0], "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")))
    assert text(program) == (
        "0F0 0LOCAL_F0@0 1F0 1B0 1LOCAL_B0@2 0B0 0F1 0LOCAL_F1@0 1F1 1B1 1LOCAL_B1@2 0B1 1STEP0 0STEP0"
    )
    assert [(c.kind, c.stage, c.peer_stage, c.peer) for c in program.channels] == [
        *(("F", 0, 1, 0), ("F", 1, 0, 0)),
        *(("B", 1, 0, 0), ("B", 0, 1, 0)),
    ]


def test_two_replicas_before_one_with_buckets_armed_before_the_last_backward() -> None:
    problem = make_problem([1, 1, 1], boundary_bytes=4, parameter_bytes=[8, 8, 0], bucket_bytes=8, global_batch_size=4)
    allocation = chain([(2, [0, 1]), (1, [2])], 2)
    programs = lower(problem, allocation, gpipe(allocation))
    assert text(programs[0]) == (
        "0RECV_B0@1 0F0 0SEND_F0@0 0F1 0SEND_F1@0 0RECV_B1@1 0B0 0REDUCE0 0REDUCE1 0B1 "
        "0WAIT_REDUCE0 0WAIT_REDUCE1 0STEP0"
    )
    assert programs[0].stages[0].buckets == ((1, 1, 0), (0, 0, 0))
    assert [program.stages[0].rows for program in programs] == [((0, 1),), ((1, 2),), ((0, 2),)]
    assert [c.rows for c in programs[2].channels] == [((0, 1),), ((1, 2),), ((0, 1),), ((1, 2),)]


def test_buckets_start_after_the_last_backward_where_the_plan_does_not_overlap_them() -> None:
    problem = make_problem([1], parameter_bytes=8, global_batch_size=2, overlap_all_reduce=False)
    allocation = chain([(1, [0, 1])], 1)
    assert text(lower(problem, allocation, gpipe(allocation))[1]) == "0F0 0B0 0REDUCE0 0WAIT_REDUCE0 0STEP0"
    early = lower(problem, allocation, gpipe(allocation), overlap=True)
    assert text(early[1]) == "0F0 0REDUCE0 0B0 0WAIT_REDUCE0 0STEP0"


def test_buckets_cover_layers_without_parameters_in_the_profile() -> None:
    problem = make_problem([1, 1, 1], parameter_bytes=[0, 8, 0], global_batch_size=2)
    allocation = chain([(3, [0, 1])], 1)
    assert lower(problem, allocation, gpipe(allocation))[0].stages[0].buckets == ((0, 2, 0),)
    bare = make_problem([1, 1], global_batch_size=2)
    allocation = chain([(2, [0, 1])], 1)
    assert lower(bare, allocation, gpipe(allocation))[0].stages[0].buckets == ((0, 1, 0),)


def test_uneven_rows_over_one_three_two_replicas() -> None:
    """Ten samples in three micro-batches have 4, 3, 3 rows; slices are cut at rows × replica // replicas. By hand."""
    problem = make_problem([1, 1, 1], boundary_bytes=4, nodes=(6,), global_batch_size=10)
    allocation = chain([(1, [0]), (1, [1, 2, 3]), (1, [4, 5])], 3)
    programs = lower(problem, allocation, early_backward(allocation), transport="nccl")
    assert programs[0].row_classes == ((4, 1), (3, 2))
    assert [p.stages[0].rows for p in programs[1:]] == [
        *(((0, 1), (0, 1)), ((1, 2), (1, 2)), ((2, 4), (2, 3))),
        *(((0, 2), (0, 1)), ((2, 4), (1, 3))),
    ]
    assert [(c.kind, c.peer, c.rows) for c in programs[2].channels] == [
        ("F", 0, ((0, 1), (0, 1))),
        ("B", 0, ((0, 1), (0, 1))),
        ("F", 4, ((0, 1), (0, 0))),
        ("F", 5, ((0, 0), (0, 1))),
        ("B", 4, ((0, 1), (0, 0))),
        ("B", 5, ((0, 0), (0, 1))),
    ]
    sends = [str(one) for one in programs[2].instructions() if one.kind == "SEND_F"]
    assert sends == ["1SEND_F0@2", "1SEND_F1@3", "1SEND_F2@3"]


def test_round_robin_replicas_take_whole_micro_batches_in_turn() -> None:
    problem = make_problem([1, 1], boundary_bytes=4, global_batch_size=8)
    stages = Stage(0, 0, (0, 1), "round_robin"), Stage(1, 1, (2,))
    allocation = single_pipeline(stages, 4)
    rows = ([0], "0F0 0F2 0B0 0B2"), ([1], "0F1 0F3 0B1 0B3"), ([2], "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    programs = lower(problem, allocation, orders(*rows))
    assert text(programs[1]) == (
        "0RECV_B1@1 0F1 0SEND_F1@0 0F3 0SEND_F3@0 0RECV_B3@1 0B1 0REDUCE0 0B3 0WAIT_REDUCE0 0STEP0"
    )
    assert [p.stages[0].rows for p in programs] == [((0, 2),)] * 3
    received = [str(one) for one in programs[2].instructions() if one.kind == "RECV_F"]
    assert received == ["1RECV_F0@0", "1RECV_F1@1", "1RECV_F2@0", "1RECV_F3@1"]


def test_no_bytes_no_messages() -> None:
    problem = make_problem([1, 1, 1], boundary_bytes=[4, 0], backward_bytes=[0, 4], global_batch_size=2)
    programs = lower(problem, allocation := straight(problem, 2), gpipe(allocation))
    assert [[(c.kind, c.peer) for c in p.channels] for p in programs] == [[("F", 1)], [("F", 0), ("B", 2)], [("B", 1)]]


def test_split_backwards_send_after_the_input_half_and_reduce_with_the_last_weight_half() -> None:
    problem = make_problem([1, 1], boundary_bytes=4, parameter_bytes=4, global_batch_size=2)
    allocation = chain([(1, [0]), (1, [1, 2])], 1)
    programs = lower(problem, allocation, orders(([0], "0F0 0I0 0W0"), ([1, 2], "1F0 1I0 1W0")))
    assert text(programs[1]) == "1RECV_F0@0 1F0 1I0 1SEND_B0@1 1REDUCE0 1W0 1WAIT_REDUCE0 1STEP0"
    assert text(programs[0]).startswith("0RECV_B0@2 0RECV_B0@3 0F0")


def test_tags_are_unique_between_two_ranks() -> None:
    """A V shape: rank 0 holds stages 0 and 3, so both directions of two edges go between ranks 0 and 1."""
    problem = make_problem([1] * 4, boundary_bytes=4, global_batch_size=5)
    allocation = chain([(1, [0]), (1, [1]), (1, [1]), (1, [0])], 5)
    row = "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"
    devices = [([d], f"({row[d]})*5") for d in (0, 1)]
    programs = lower(problem, allocation, orders(*devices))
    tags = [(c.peer, c.tag) for c in programs[0].channels if (c.kind == "F") == (c.stage < c.peer_stage)]
    assert len(set(tags)) == len(tags) == 2
    assert abs(tags[0][1] - tags[1][1]) >= 5 * 64


def test_each_pair_of_ranks_counts_its_tags_from_one() -> None:
    """Two replicas before one: rank 2 receives from both, with separate tags for each."""
    problem = make_problem([1, 1], boundary_bytes=4, global_batch_size=2)
    allocation = chain([(1, [0, 1]), (1, [2])], 1)
    programs = lower(problem, allocation, gpipe(allocation))
    assert [(c.kind, c.peer, c.tag) for c in programs[2].channels] == [
        ("F", 0, 1),
        ("F", 1, 1),
        ("B", 0, 1),
        ("B", 1, 1),
    ]


def test_the_result_does_not_depend_on_the_order_of_rows() -> None:
    problem = make_problem([1, 1, 1], boundary_bytes=4, nodes=(6,), global_batch_size=10)
    allocation = chain([(1, [4]), (1, [1, 0, 3]), (1, [2])], 3)
    schedule = early_backward(allocation)
    reverse = Orders(schedule.name, schedule.rows[::-1], schedule.warmup)
    programs = lower(problem, allocation, schedule)
    assert programs == lower(problem, allocation, reverse)
    assert [p.device for p in programs] == ["n0/0", "n0/1", "n0/2", "n0/3", "n0/4"]
    assert programs[0].stages[0].replica == 1


# What is refused


def refused(problem: Problem, allocation: Allocation, *rows: tuple[Sequence[int], str], transport: str = "gloo") -> str:
    with pytest.raises(InvalidPlan) as caught:
        lower(problem, allocation, orders(*rows), transport=transport)  # type: ignore[arg-type]
    return str(caught.value)


def two_stages(num_micro_batches: int = 2) -> tuple[Problem, Allocation]:
    problem = make_problem([1, 1], boundary_bytes=4, global_batch_size=num_micro_batches)
    return problem, straight(problem, num_micro_batches)


def test_a_deadlock_names_both_ranks_and_their_next_instructions() -> None:
    message = refused(*two_stages(), ([0], "0F0 0B0 0F1 0B1"), ([1], "1F1 1B1 1F0 1B0"))
    assert message.startswith("the ranks wait for each other in a circle, even when no send waits: ")
    assert "rank 0 (n0/0) is at 0B0 (instruction 4) and waits for 1SEND_B0 of rank 1" in message
    assert "rank 1 (n0/1) is at 1F1 (instruction 2) and waits for 0SEND_F1 of rank 0" in message


def test_receives_are_posted_as_sent_where_sends_wait_in_a_circle() -> None:
    """Stage 0 warms up with 6, stage 1 with 1: its second receive would be posted when its first backward is sent."""
    problem, allocation = two_stages(8)
    schedule = warmup_orders(allocation, [6, 1])
    tagged = lower(problem, allocation, schedule)
    with pytest.raises(InvalidPlan) as caught:
        check_programs(tagged, transport="nccl")
    assert "when a send has to wait for its receive" in str(caught.value)
    assert "rank 0 (n0/0) is at 0SEND_F2@0 (instruction 5) and waits for 1RECV_F2 of rank 1" in str(caught.value)
    assert "rank 1 (n0/1) is at 1SEND_B0@1" in str(caught.value)
    assert caught.value.remedy is not None
    programs = lower(problem, allocation, schedule, transport="nccl")
    check_programs(programs, transport="nccl")
    assert verdict(programs, "nccl") == "ok"
    for with_tags, without in zip(tagged, programs, strict=True):
        assert text(without) != text(with_tags)
        assert sorted(without.instructions()) == sorted(with_tags.instructions())


def test_messages_are_received_in_the_order_of_their_sends_where_they_have_no_tags() -> None:
    problem, allocation = two_stages()
    rows = ([0], "0F0:2 0B0:2"), ([1], "(1F1)*2-1 1B0:2")
    with pytest.raises(InvalidPlan) as caught:
        check_programs(lower(problem, allocation, orders(*rows)), transport="nccl")
    assert "from rank 0 (n0/0) to rank 1 (n0/1) are not received in the order" in str(caught.value)
    assert "number 0 is 0SEND_F0@0 there and 1RECV_F1@0 here" in str(caught.value)
    programs = lower(problem, allocation, orders(*rows), transport="nccl")
    assert text(programs[1]).startswith("1RECV_F0@0 1RECV_F1@0 1F1 1F0 1B0 1SEND_B0@1")
    assert verdict(programs, "nccl") == "ok"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        pytest.param((([0], "0F0:2 0B0"), ([1], "1F0:2 1B0:2")), "rank 0 (n0/0) runs 0B1 0 times", id="no-backward"),
        pytest.param((([0], "0F0:2 0F1 0B0:2"), ([1], "1F0:2 1B0:2")), "runs 0F1 2 times", id="twice"),
        pytest.param((([0], "0B0 0F0:2 0B1"), ([1], "1F0:2 1B0:2")), "F comes before B", id="backward-first"),
        pytest.param((([0], "0F0:2 0I0:2"), ([1], "1F0:2 1B0:2")), "runs 0W0 0 times", id="half-a-backward"),
        pytest.param((([0], "0F0:2 0R0:2 0R0 0B0:2"), ([1], "1F0:2 1B0:2")), "runs 0R0 2 times", id="recomputed-twice"),
        pytest.param(
            (([0], "0F0:2 0R0 0B0:2"), ([1], "1F0:2 1B0:2")), "stage 0 recomputes nothing", id="nothing-again"
        ),
        pytest.param((([0], "0F0:2 0B0:2"), ([1], "1F0 1B0")), "rank 1 (n0/1) runs 1F1 0 times", id="not-all"),
        pytest.param((([0], "0F0:2 0B0:2"), ([1], "0F0:2 0B0:2")), "the rank holds stages [1]", id="another's-stage"),
        pytest.param((([0], "0F0:2 0B0:2"), ([1], "1F0:3 1B0:2")), "there are 2 micro-batches", id="too-many"),
        pytest.param((([0], "0F0:2 0B0:2"),), "no row for ['n0/1']", id="a-row-missing"),
        pytest.param((([0], "0F0:2 0B0:2"), ([1, 2], "1F0:2 1B0:2")), "'n0/2' has a row", id="an-idle-device"),
        pytest.param((([0, 1], "0F0:2 0B0:2"), ([1], "1F0:2 1B0:2")), "the rank holds stages [1]", id="two-rows"),
        pytest.param((([1], "1F0:2 1B0:2"), ([1], "1F0:2 1B0:2")), "'n0/1' is in two rows", id="two-rows-of-one"),
    ],
)
def test_orders_that_do_not_run_everything_once_are_refused(
    rows: tuple[tuple[Sequence[int], str], ...], words: str
) -> None:
    message = refused(*two_stages(), *rows)
    assert words in message


def test_a_replica_runs_its_own_micro_batches_only() -> None:
    problem = make_problem([1], global_batch_size=2)
    allocation = single_pipeline((Stage(0, 0, (0, 1), "round_robin"),), 2)
    message = refused(problem, allocation, ([0, 1], "0F0:2 0B0:2"))
    assert "rank 0 (n0/0) runs 0F1, which belongs to replica 1" in message


def test_plans_that_leave_a_replica_without_work_are_refused() -> None:
    problem = make_problem([1, 1], boundary_bytes=4, global_batch_size=5)
    allocation = chain([(1, [0]), (1, [1, 2, 3])], 2)
    assert "some would get no row" in refused(problem, allocation)
    turns = single_pipeline((Stage(0, 0, (0, 1, 2), "round_robin"), Stage(1, 1, (3,))), 2)
    assert "but only" in refused(problem, turns)
    assert "a global batch of 5 samples cannot fill 6 micro-batches" in refused(problem, straight(problem, 6))
    twice = chain([(1, [0, 0]), (1, [1])], 2)
    assert "names a device twice" in refused(problem, twice)


def test_groups_that_share_ranks_reduce_in_one_order_where_collectives_have_no_tags() -> None:
    problem = make_problem([1, 1], global_batch_size=2)
    allocation = chain([(1, [0, 1]), (1, [0, 1])], 1)
    rows = ([0], "0F0 1F0 1B0 0B0"), ([1], "0F0 1F0 0B0 1B0")
    tagged = lower(problem, allocation, orders(*rows))
    with pytest.raises(InvalidPlan) as caught:
        check_programs(tagged, transport="nccl")
    words = "rank 0 (n0/0) reduces layers 1 to 1 before layers 0 to 0, rank 1 (n0/1) layers 0 to 0 before layers 1 to 1"
    assert words in str(caught.value)
    programs = lower(problem, allocation, orders(*rows), transport="nccl")
    assert [text(p).split("0REDUCE0 1REDUCE0")[0] for p in programs] == ["0F0 1F0 1B0 0B0 ", "0F0 1F0 0B0 1B0 "]
    check_programs(programs, transport="nccl")


def change(program: Program, old: str, new: Sequence[str]) -> Program:
    """Return the program with instructions in place of one of them."""
    by_text = {str(one): one for one in program.instructions()}
    code = [one for i in program.instructions() for one in ([by_text[n] for n in new] if str(i) == old else [i])]
    return replace(program, prologue=tuple(code))


@pytest.mark.parametrize(
    ("rank", "old", "new", "words"),
    [
        pytest.param(1, "1RECV_F1@0", [], "1F1 (instruction 2): a receive that it needs has not", id="no-receive"),
        pytest.param(0, "0SEND_F1@0", [], "waits for 0SEND_F1 of rank 0", id="no-send"),
        pytest.param(1, "1SEND_B1@1", [], "waits for 1SEND_B1 of rank 1; rank 1 (n0/1) is at its end", id="end"),
        pytest.param(0, "0SEND_F1@0", ["0SEND_F1@0", "0SEND_F1@0"], "it has been run before", id="sent-twice"),
        pytest.param(1, "1RECV_F1@0", ["1RECV_F1@0", "1RECV_F1@0"], "it has been run before", id="received-twice"),
        pytest.param(0, "0STEP0", [], "stage 0 would not be trained", id="no-step"),
        pytest.param(0, "0B1", ["0STEP0", "0B1"], "all before STEP", id="step-too-early"),
        pytest.param(0, "0F0", ["0SEND_F0@0", "0F0"], "cannot run 0SEND_F0@0 (instruction 1)", id="send-too-early"),
    ],
)
def test_programs_from_elsewhere_are_checked(rank: int, old: str, new: list[str], words: str) -> None:
    problem, allocation = two_stages()
    programs = lower(problem, allocation, gpipe(allocation))
    check_programs(programs)
    programs[rank] = change(programs[rank], old, new)
    with pytest.raises(InvalidPlan) as caught:
        check_programs(programs)
    assert words in str(caught.value)


@pytest.mark.parametrize("one", [Instruction("JUMP", 0, 0), Instruction("F", -1, 0), Instruction("F", 0, -1)])
def test_what_is_no_instruction_is_refused(one: Instruction) -> None:
    problem, allocation = two_stages()
    first, second = lower(problem, allocation, gpipe(allocation))
    with pytest.raises(InvalidPlan, match="which is not an instruction"):
        check_programs([replace(first, epilogue=(one,)), second])


def test_rows_that_do_not_tile_and_ends_that_disagree_are_refused() -> None:
    problem = make_problem([1, 1], boundary_bytes=4, global_batch_size=4)
    allocation = chain([(1, [0, 1]), (1, [2])], 1)
    programs = lower(problem, allocation, gpipe(allocation))

    def with_channel(rank: int, index: int, **fields: object) -> list[Program]:
        channels = list(programs[rank].channels)
        channels[index] = replace(channels[index], **fields)  # type: ignore[arg-type]
        return [replace(p, channels=tuple(channels)) if p.rank == rank else p for p in programs]

    with pytest.raises(InvalidPlan, match="disagree about the activations between stages 0 and 1"):
        check_programs(with_channel(2, 0, tag=9))
    with pytest.raises(InvalidPlan, match="rank 2 has rows for 2 classes in stage 1, not 1"):
        check_programs(with_channel(2, 0, rows=((0, 2), (0, 0))))
    with pytest.raises(InvalidPlan, match="rank 1 has no such channel"):
        check_programs(with_channel(1, 0, kind="B"))
    half = with_channel(2, 0, rows=((0, 1),))
    half[0] = with_channel(0, 0, rows=((0, 1),))[0]
    with pytest.raises(InvalidPlan, match="do not tile its 4 rows"):
        check_programs(half)


@pytest.mark.parametrize("policy", ["A", "B"])
@pytest.mark.parametrize("num_stages", [1, 2, 5, 9])
def test_dapple_schedules_run_also_where_sends_wait(num_stages: int, policy: str) -> None:
    problem = make_problem([1] * num_stages, boundary_bytes=4, nodes=(num_stages,), global_batch_size=32)
    allocation = straight(problem, 32)
    programs = lower(problem, allocation, early_backward(allocation, policy), transport="nccl")  # type: ignore[arg-type]
    assert verdict(programs, "nccl") == "ok"


def test_a_long_1f1b_program_has_a_short_text() -> None:
    problem = make_problem([1] * 16, boundary_bytes=4, nodes=(16,), global_batch_size=2048)
    lowered = lower_arrays(problem, allocation := straight(problem, 2048), early_backward(allocation))
    assert lowered.codes.dtype == np.int32
    assert lowered.starts[-1] == len(lowered.codes) == 16 * 2 * 2048 + 15 * 4 * 2048 + 16
    assert len(lowered.program(7).to_json()["prologue"]) < 400


def test_replicas_that_run_the_same_share_their_instructions() -> None:
    problem = make_problem([1, 1], boundary_bytes=4, nodes=(6,), global_batch_size=24)
    stages = (Stage(0, 0, (0, 1, 2, 3)), Stage(1, 1, (4, 5)))
    allocation = single_pipeline(stages, 4)
    lowered = lower_arrays(problem, allocation, early_backward(allocation))
    programs = lowered.programs()
    assert programs == [lowered.program(rank) for rank in range(6)]
    assert all(one.prologue is programs[0].prologue for one in programs[:4])
    assert programs[4].prologue is programs[5].prologue


@given(classes=st.lists(st.integers(1, 20), min_size=1, max_size=2), below=st.integers(1, 9), above=st.integers(1, 9))
def test_replicas_that_exchange_something_are_found_without_looking_at_all_pairs(
    classes: list[int], below: int, above: int
) -> None:
    stages = Stage(0, 0, tuple(range(below))), Stage(1, 1, tuple(range(above)))
    rows = tuple((size, 1) for size in classes)
    every = [(i, j) for i in range(below) for j in range(above) if _common(stages[0], i, stages[1], j, rows)]
    assert _pairs(*stages, 0, 1, rows) == every


def test_kinds_and_instructions_are_of_the_schema() -> None:
    problem, allocation = two_stages()
    program = lower(problem, allocation, gpipe(allocation))[0]
    kinds = [(one.kind, one.micro_batch) for one in program.prologue if one.kind in "FB"]
    assert kinds == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    assert program.prologue[1] == Instruction("F", 0, 0)
    assert (FORWARD, BACKWARD) == (0, 1)
