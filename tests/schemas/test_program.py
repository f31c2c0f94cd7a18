"""Words, compact text and JSON of programs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.errors import InvalidDocument
from penstock.schemas.notation import MAX_OPERATIONS
from penstock.schemas.program import (
    BACKWARD,
    FORWARD,
    Channel,
    Instruction,
    Operation,
    Program,
    RankStage,
    Shared,
    Texts,
    parse_instructions,
    parse_ranks,
    parse_row,
    print_instructions,
    print_ranks,
    print_row,
)


def one_f_one_b(stage: int, warmup: int, num_micro_batches: int) -> list[Operation]:
    row = [(FORWARD, stage, m) for m in range(warmup)]
    for m in range(num_micro_batches):
        row.append((BACKWARD, stage, m))
        if m + warmup < num_micro_batches:
            row.append((FORWARD, stage, m + warmup))
    return row


@pytest.mark.parametrize(
    ("operations", "text"),
    [
        pytest.param([], "", id="nothing"),
        pytest.param([(0, 0, 3)], "F3", id="one"),
        pytest.param([(0, 2, 0), (1, 2, 0)], "2F0 2B0", id="other-stage-has-a-prefix"),
        pytest.param(one_f_one_b(0, 8, 4096), "F0:8 (B0 F8)*4088 B4088:4096", id="the-design's-example"),
        pytest.param([(1, 0, m) for m in range(7, -1, -1)], "(B7)*8-1", id="backwards"),
        pytest.param([(0, 0, 0), (0, 0, 0)], "(F0)*2+0", id="shift-0"),
        pytest.param([(0, 0, m) for m in range(0, 12, 3)], "(F0)*4+3", id="shift-3"),
        pytest.param(
            [(0, s, 4 * g + m) for g in range(3) for s in (0, 2) for m in range(4)],
            "(F0:4 2F0:4)*3+4",
            id="a-range-inside-a-group",
        ),
        pytest.param(
            [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 2), (1, 0, 1)], "F0:2 B0 F2 B1", id="greedy-takes-the-left-first"
        ),
        pytest.param([(0, 0, m) for m in range(4)], "F0:4", id="of-equals-the-shorter-period"),
    ],
)
def test_rows_print_by_the_greedy_rule_and_parse_back(operations: list[Operation], text: str) -> None:
    assert print_row(operations, home=0) == text
    assert parse_row(text, home=0) == operations


def covered(operations: list[Operation], i: int, period: int) -> int:
    """Count operations from ``i`` that repetitions of ``period`` cover; 0 for fewer than two repetitions."""
    kinds = [op[:2] for op in operations]
    if i + 2 * period > len(operations):
        return 0
    shift = operations[i + period][2] - operations[i][2]
    end = i
    while end + period < len(operations) and (
        kinds[end] == kinds[end + period] and operations[end + period][2] - operations[end][2] == shift
    ):
        end += 1
    count = 1 + (end - i) // period
    return count * period if count > 1 else 0


def greedy_by_definition(operations: list[Operation]) -> str:
    """Print operations by the stated rule, word by word."""
    items, i = [], 0
    while i < len(operations):
        best = max(range(1, 65), key=lambda period: (covered(operations, i, period), -period))
        count = covered(operations, i, best) // best
        kind, stage, m = operations[i]
        if count == 0:
            items.append(f"{stage}{'FBIWR'[kind]}{m}")
            i += 1
            continue
        shift = operations[i + best][2] - m
        if best == 1 and shift == 1:
            items.append(f"{stage}{'FBIWR'[kind]}{m}:{m + count}")
        else:
            inner = greedy_by_definition(operations[i : i + best])
            items.append(f"({inner})*{count}" + ("" if shift == 1 else f"{shift:+d}"))
        i += best * count
    return " ".join(items)


some_operations = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 6)), max_size=12)


@st.composite
def rows_that_repeat(draw: st.DrawFn) -> list[Operation]:
    row: list[Operation] = []
    for _ in range(draw(st.integers(0, 4))):
        group = draw(some_operations)
        shift = draw(st.integers(0, 3))
        for i in range(draw(st.integers(1, 5))):
            row += [(kind, stage, m + shift * i) for kind, stage, m in group]
    return row


@given(rows_that_repeat(), st.sampled_from([None, 0, 1]))
def test_print_then_parse_is_the_identity(row: list[Operation], home: int | None) -> None:
    text = print_row(row, home)
    assert parse_row(text, home) == row
    assert print_row(parse_row(text, home), home) == text


@given(rows_that_repeat())
def test_printing_follows_the_rule_as_stated(row: list[Operation]) -> None:
    assert print_row(row) == greedy_by_definition(row)


@pytest.mark.parametrize(("stage", "warmup"), [(0, 1), (3, 5), (7, 64), (1, 65), (2, 200)])
def test_schedules_print_by_the_rule_too(stage: int, warmup: int) -> None:
    row = one_f_one_b(stage, warmup, 200)
    assert print_row(row) == greedy_by_definition(row)


def test_a_thousand_rows_of_4096_micro_batches_stay_below_a_megabyte() -> None:
    texts = [print_row(one_f_one_b(s, 1024 - s, 4096), s) for s in range(0, 1024, 64)]
    assert 64 * sum(map(len, texts)) < 1_000_000
    assert parse_row(texts[3], 192) == one_f_one_b(192, 832, 4096)


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        pytest.param("F0 1FOO3", 4, "not a token", id="torch-reads-1F"),
        pytest.param("2BANANA", 1, "not a token", id="torch-reads-2B"),
        pytest.param("F0 B0 3RECV_F12x", 7, "expected F, B, I, W or R", id="torch-reads-3RECV_F12"),
        pytest.param("F0B0", 1, "not a token", id="no-blank"),
        pytest.param("F0(B0)*2", 3, "expected a space", id="no-blank-before-a-group"),
        pytest.param("F01", 1, "not a token", id="leading-zero"),
        pytest.param("F١", 1, "not a token", id="digit-of-another-script"),
        pytest.param("F-1", 1, "not a token", id="negative"),
        pytest.param("F4:4", 1, "no micro-batch", id="empty-range"),
        pytest.param("F4:2", 1, "no micro-batch", id="range-backwards"),
        pytest.param("F2147483648", 1, "above 2147483647", id="micro-batch-beyond-int32"),
        pytest.param("2147483648F0", 1, "above 2147483647", id="stage-beyond-int32"),
        pytest.param("(F0", 1, "never closed", id="open"),
        pytest.param("F0 )*2", 4, "has no matching", id="closed-twice"),
        pytest.param("(F0)", 4, "no repeat count", id="no-count"),
        pytest.param("(F0)*2x", 4, "no repeat count", id="bad-count"),
        pytest.param("(F0)*0", 4, "repeated 0 times", id="no-repetition"),
        pytest.param("()*3", 2, "empty", id="empty-group"),
        pytest.param("(F1)*3-1", 4, "reaches micro-batch -1", id="below-zero"),
        pytest.param("(F2147483647)*2", 13, "reaches micro-batch 2147483648", id="beyond-int32-by-shift"),
        pytest.param(f"F0:{MAX_OPERATIONS + 1}", 1, "unrolls to more", id="too-long-a-range"),
        pytest.param("((((F0:64)*64)*64)*64)*64", 18, "unrolls to more", id="too-many-in-groups-of-groups"),
        pytest.param("(F0)*9999999999", 4, "unrolls to more", id="too-many-repetitions"),
    ],
)
def test_bad_text_is_refused_with_its_position(text: str, position: int, words: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        parse_row(text, home=0)
    assert str(caught.value).startswith(f"character {position}: ")
    assert words in str(caught.value)


def test_a_row_without_a_home_needs_its_stages() -> None:
    with pytest.raises(InvalidDocument, match="character 5: 'F3' names no stage"):
        parse_row("2F0 F3")


def steady(stage: int, count: int) -> list[Instruction]:
    return [
        Instruction(kind, stage, m + ahead, channel)
        for m in range(count)
        for kind, ahead, channel in (
            ("RECV_F", 2, 0),
            ("F", 1, -1),
            ("SEND_F", 1, 1),
            ("B", 0, -1),
            ("SEND_B", 0, 2),
        )
    ]


def test_instructions_print_in_groups_and_parse_back() -> None:
    instructions = [*steady(2, 100), Instruction("REDUCE", 2, 0), Instruction("STEP", 2, 0)]
    text = print_instructions(instructions)
    assert text == "(2RECV_F2@0 2F1 2SEND_F1@1 2B0 2SEND_B0@2)*100 2REDUCE0 2STEP0"
    assert parse_instructions(text) == instructions
    assert parse_instructions("2RECV_F0:3@1") == [Instruction("RECV_F", 2, m, 1) for m in range(3)]


@pytest.mark.parametrize("text", ["RECV_F0", "2RECV_F12x", "2RECV_F0@", "2RECV_F0@x", "2JUMP0", "2F"])
def test_bad_instructions_are_refused(text: str) -> None:
    with pytest.raises(InvalidDocument, match="character 1: "):
        parse_instructions(text)


def a_program() -> Program:
    stage = RankStage(
        2, 4, 7, 1, (0, 3), "rows", ((2, 4), (1, 3)), ((5, 5),), 1, None, (0, 9), ((6, 7, 1), (4, 5, -1)), 10, 2, 1
    )
    channels = (Channel("F", 2, 1, 1, ((0, 2), (0, 0)), 1), Channel("B", 2, 1, 1, ((0, 2), (0, 0)), 65))
    body = (Instruction("B", 2, 0), Instruction("VERSION", 2, 1), Instruction("F", 2, 4), Instruction("REDUCE", 2, 1))
    ends = (Instruction("F", 2, 0), Instruction("F", 2, 1)), (Instruction("STEP", 2, 0),)
    return Program(
        *(3, 4, "n0/g1", 37, 10, ((4, 7), (3, 3)), (stage,), channels, ends[0], body, 3, ends[1]),
        update_rule="double_buffered",
        batches=8,
        body_batches=2,
        groups=((0, 1), (0, 3)),
        shared=(Shared("wte.weight", (0, 7), 0),),
        pipelines=2,
        shard_states=True,
    )


@given(st.lists(st.integers(0, 12)))
def test_ranks_print_as_ranges_and_parse_back(ranks: list[int]) -> None:
    text = print_ranks(ranks)
    assert parse_ranks(text) == tuple(ranks)
    assert len(text.split()) == sum(i == 0 or one != ranks[i - 1] + 1 for i, one in enumerate(ranks))


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        pytest.param("0:4 x", 5, "not a rank", id="no-number"),
        pytest.param("3:3", 1, "not a rank", id="empty-range"),
        pytest.param("-1", 1, "not a rank", id="negative"),
        pytest.param("0 0:9999999999", 3, f"more than {MAX_OPERATIONS} ranks", id="too-many"),
    ],
)
def test_bad_ranks_are_refused_with_their_position(text: str, position: int, words: str) -> None:
    with pytest.raises(InvalidDocument, match=words) as caught:
        parse_ranks(text)
    assert str(caught.value).startswith(f"character {position}: ")


def test_programs_print_what_they_share_once() -> None:
    texts = Texts()
    one, other = a_program().to_json(texts), a_program()
    again = other.to_json(texts)
    assert again == one == other.to_json()
    same = replace(other, rank=0).to_json(texts)
    assert same["prologue"] is again["prologue"]
    assert same["groups"] is again["groups"]


def test_a_program_survives_json() -> None:
    program = a_program()
    data = json.loads(json.dumps(program.to_json()))
    assert Program.from_json(data) == program
    assert data["prologue"] == "2F0:2"


def test_a_repetition_raises_micro_batches_by_whole_global_batches_but_not_buckets() -> None:
    shown = [str(one) for one in a_program().instructions()]
    assert shown == [
        *("2F0", "2F1"),
        *("2B0", "2VERSION1", "2F4", "2REDUCE1", "2B20", "2VERSION1", "2F24", "2REDUCE1"),
        *("2B40", "2VERSION1", "2F44", "2REDUCE1"),
        "2STEP0",
    ]


def test_micro_batches_are_numbered_through_the_row_classes() -> None:
    assert [a_program().row_class(m) for m in (0, 6, 7, 9, 10, 16, 17)] == [0, 0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        pytest.param({"rank": -1}, "/rank", id="negative"),
        pytest.param({"rank": True}, "/rank", id="a-truth-value"),
        pytest.param({"world_size": 2**53}, "/world_size", id="beyond-2^53"),
        pytest.param({"row_classes": [[4, 7, 1]]}, "/row_classes", id="no-pairs"),
        pytest.param({"color": "red"}, "/color", id="unknown"),
        pytest.param({"stages": [{}]}, "/stages/0/stage", id="missing"),
        pytest.param({"prologue": 3}, "/prologue", id="no-text"),
        pytest.param({"groups": [[0, 1]]}, "/groups", id="a-group-without-text"),
        pytest.param({"shard_states": 1}, "/shard_states", id="no-truth-value"),
        pytest.param({"shared": [{"name": 3}]}, "/shared/0/name", id="a-tie-without-a-name"),
    ],
)
def test_a_bad_program_is_refused_with_its_place(change: dict[str, object], pointer: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        Program.from_json(a_program().to_json() | change)
    assert caught.value.faults[0].pointer == pointer


def test_home_may_stand_for_a_stage_that_is_not_known_yet() -> None:
    assert parse_row("F0 2B0", home=-1) == [(FORWARD, -1, 0), (BACKWARD, 2, 0)]
