"""Programs of plans that share out gradients and parameters: words, their places, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from problems import as_operations, make_problem, warmup_orders

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, SHARDINGS, Program, Sharding
from penstock.solvers.lowering import check_programs, lower
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.schedules.zero_bubble import zb_h1

MICRO_BATCHES = 4
ONE = (Stage(0, 1, (0, 1)),)
TWO = (Stage(0, 0, (0, 1)), Stage(1, 1, (2, 3)))


def problem_of(sharding: Sharding | None) -> Problem:
    problem = make_problem([1, 1], boundary_bytes=4, parameter_bytes=8, nodes=(4,), global_batch_size=8)
    return problem if sharding is None else replace(problem, choice=Choice(sharding=sharding))


def plan_of(
    sharding: Sharding | None,
    stages: tuple[Stage, ...],
    *,
    norm: bool = False,
    transport: Literal["auto", "nccl"] = "auto",
) -> list[Program]:
    allocation = single_pipeline(stages, MICRO_BATCHES)
    return lower(problem_of(sharding), allocation, orders_of(allocation), norm=norm, transport=transport)


def orders_of(allocation: Allocation) -> Orders:
    """Return 1F1B, with a row for each replica."""
    orders = warmup_orders(allocation, list(range(len(allocation.stages), 0, -1)))
    rows = zip(allocation.stages, orders.rows, strict=True)
    return Orders("1f1b", tuple(Row((device,), row.operations) for stage, row in rows for device in stage.devices))


def kinds(program: Program) -> list[str]:
    return [one.kind for one in program.instructions()]


def test_programs_without_such_a_sharding_do_not_have_the_field() -> None:
    for program in plan_of(None, TWO):
        assert "sharding" not in program.to_json()
        assert program.sharding is None


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_field_is_read_as_it_is_written(sharding: Sharding) -> None:
    for program in plan_of(sharding, ONE):
        assert program.sharding == sharding
        assert not program.shard_states
        assert Program.from_json(program.to_json()) == program


@pytest.mark.parametrize("transport", ["auto", "nccl"])
@pytest.mark.parametrize("norm", [False, True])
def test_kept_parameters_are_gathered_before_all_and_let_go_of_between_backwards_and_step(
    norm: bool, transport: Literal["auto", "nccl"]
) -> None:
    for program in plan_of("parameters_kept", TWO, norm=norm, transport=transport):
        words = kinds(program)
        buckets = sum(group >= 0 for part in program.stages for _, _, group in part.buckets)
        assert words.count("UNSHARD") == words.count("RESHARD") == words.count("REDUCE") == buckets > 0
        last = max(index for index, word in enumerate(words) if word == "B")
        assert max(index for index, word in enumerate(words) if word == "UNSHARD") < words.index("F")
        assert last < words.index("RESHARD") < words.index("STEP")
        assert max(index for index, word in enumerate(words) if word == "RESHARD") < words.index("STEP")


@pytest.mark.parametrize("sharding", ["gradients", "parameters"])
def test_what_moves_within_passes_has_no_words(sharding: Sharding) -> None:
    for program in plan_of(sharding, ONE):
        assert set(kinds(program)) == {"F", "B", "STEP"}
        assert any(group >= 0 for part in program.stages for _, _, group in part.buckets)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        pytest.param(("drop", "UNSHARD"), "are not gathered", id="never-gathered"),
        pytest.param(("drop", "RESHARD"), "gathered, and let go of, once", id="never-let-go-of"),
        pytest.param(("double", "UNSHARD"), "gathered, and let go of, once", id="gathered-twice"),
        pytest.param(("first", "RESHARD"), "gathered, and let go of, once", id="let-go-of-first"),
        pytest.param(("before-last-backward", "RESHARD"), "has not run yet", id="let-go-of-too-early"),
        pytest.param(("last", "RESHARD"), "gathered, and let go of, once", id="let-go-of-after-the-step"),
    ],
)
def test_programs_that_compute_without_parameters_are_refused(edit: tuple[str, str], words: str) -> None:
    first, *others = plan_of("parameters_kept", ONE)
    code = list(first.prologue)
    what, word = edit
    at = next(index for index, one in enumerate(code) if one.kind == word)
    one = code.pop(at)
    last = max(index for index, each in enumerate(code) if each.kind == "B")
    place = {"double": at, "first": 0, "before-last-backward": last, "last": len(code)}.get(what)
    if place is not None:
        code.insert(place, one)
    if what == "double":
        code.insert(at, one)
    with pytest.raises(InvalidPlan, match=words):
        check_programs([replace(first, prologue=tuple(code)), *others])


def test_gathers_that_wait_for_each_other_are_refused() -> None:
    """Rank 0 holds stages 0 and 1, rank 1 the same in the other order of gathers."""
    stages = (Stage(0, 0, (0, 1)), Stage(1, 1, (0, 1)))
    order = [(FORWARD, 0, 0), (FORWARD, 1, 0), (BACKWARD, 1, 0), (BACKWARD, 0, 0)]
    rows = Orders("by hand", (Row((0,), as_operations(order)), Row((1,), as_operations(order))))
    first, second = lower(problem_of("parameters_kept"), single_pipeline(stages, 1), rows)
    code = list(second.prologue)
    gathers = [index for index, one in enumerate(code) if one.kind == "UNSHARD"]
    code[gathers[0]], code[gathers[-1]] = code[gathers[-1]], code[gathers[0]]
    with pytest.raises(InvalidPlan, match="wait for each other in a circle"):
        check_programs([first, replace(second, prologue=tuple(code))])


@pytest.mark.parametrize("sharding", ["gradients", "parameters"])
def test_replicas_in_different_orders_are_refused(sharding: Sharding) -> None:
    allocation = single_pipeline(ONE, 2)
    orders = [[(FORWARD, 0, 0), (FORWARD, 0, 1), (BACKWARD, 0, first), (BACKWARD, 0, 1 - first)] for first in (0, 1)]
    rows = tuple(Row((device,), as_operations(order)) for device, order in enumerate(orders))
    with pytest.raises(InvalidPlan, match=r"as operation 2 .* runs 0B0, .* runs 0B1"):
        lower(problem_of(sharding), allocation, Orders("by hand", rows))


@pytest.mark.parametrize("sharding", ["gradients", "parameters"])
def test_what_such_ranks_do_not_train_is_refused_in_a_sentence(sharding: Sharding) -> None:
    with pytest.raises(UnsupportedRequest, match="which needs a plan of one stage; this plan has 2"):
        plan_of(sharding, TWO)
    with pytest.raises(UnsupportedRequest, match="take micro-batches in turn"):
        plan_of(sharding, (Stage(0, 1, (0, 1), "round_robin"),))
    allocation = single_pipeline(ONE, MICRO_BATCHES)
    problem = problem_of(sharding)
    with pytest.raises(UnsupportedRequest, match="this schedule splits backwards"):
        lower(problem, allocation, zb_h1(problem, allocation))
    with pytest.raises(UnsupportedRequest, match="does not shard versions of weights"):
        lower(problem, allocation, orders_of(allocation), update_rule="elastic_averaging")
