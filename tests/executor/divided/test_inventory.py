"""The inventory: what counts as another collective than the predicted one, and a run that has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mesh_cases import Case, lowered
from rank_pool import RankPool, differences

from penstock.executor.divided.inventory import Expected, Ran, first_difference
from penstock.executor.profiling.tracing import Sent

GATHER, SUM, BUCKET = Sent("all_gather", "a", 64), Sent("all_reduce", "a", 8), Sent("all_reduce", "b", 8)
SMALLER, OTHER = GATHER._replace(bytes=63), BUCKET._replace(group="c")
PLANNED = [Expected(1, 1, GATHER), Expected(2, 5, BUCKET), Expected(3, 3, GATHER), Expected(4, 4, SUM)]
DONE = [Ran(1, GATHER), Ran(3, GATHER), Ran(4, SUM), Ran(5, BUCKET)]


def test_groups_are_apart_and_a_sum_may_start_until_it_is_waited_for() -> None:
    assert first_difference(PLANNED, DONE) is None


@pytest.mark.parametrize(
    ("ran", "expected", "wrong"),
    [
        pytest.param(DONE[:2] + DONE[3:], PLANNED[3], None, id="one-is-missing"),
        pytest.param([*DONE, Ran(6, SUM)], None, Ran(6, SUM), id="one-more"),
        pytest.param([Ran(1, SUM), *DONE[1:]], PLANNED[0], Ran(1, SUM), id="another-kind"),
        pytest.param([Ran(1, SMALLER), *DONE[1:]], PLANNED[0], Ran(1, SMALLER), id="bytes"),
        pytest.param([*DONE[:3], Ran(6, BUCKET)], PLANNED[1], Ran(6, BUCKET), id="too-late"),
        pytest.param([*DONE[:3], Ran(1, BUCKET)], PLANNED[1], Ran(1, BUCKET), id="too-early"),
        pytest.param([DONE[0], DONE[2], DONE[1], DONE[3]], PLANNED[2], DONE[2], id="another-order"),
        pytest.param([*DONE[:3], Ran(5, OTHER)], PLANNED[1], None, id="another-group"),
    ],
)
def test_the_first_that_differs_is_found(ran: list[Ran], expected: Expected | None, wrong: Ran | None) -> None:
    assert first_difference(PLANNED, ran) == (expected, wrong)


@pytest.mark.tier("nightly")
def test_a_collective_that_nobody_predicted_is_told_with_its_instruction(world: RankPool) -> None:
    """The job's embedding sums a number over its ranks where it is not traced."""
    case = Case("gpt", "float32", 2, 1, 1, 1, 1, "none", "gpipe", "none")
    done = world.train(lowered(case).programs, "mesh_jobs:talkative", steps=1, directory=str(Path(__file__).parent))
    assert [one["collectives_differ"] for one in done] == [
        f"rank {rank}, step 0, instruction 0 (0F0), over ranks 0, 1: predicted reduce-scatter of 4096 bytes, "
        "ran all-reduce of 4 bytes"
        for rank in range(2)
    ]


def test_ranks_whose_degrees_disagree_are_refused_before_any_step(world: RankPool) -> None:
    first, second = lowered(Case("gpt", "float32", 2, 1, 1, 1, 1, "none", "gpipe", "none")).programs
    assert second.mesh is not None
    other = replace(second, mesh=replace(second.mesh, tensor=4))
    done = world.train([first, other], "mesh_jobs:gpt_float32", steps=1, directory=str(Path(__file__).parent))
    assert done[1]["reason"].startswith("rank 1 has tensor degree 4, rank 0 has 2")
    assert done[1]["step"] is None


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(("tensor", "recompute"), [(1, "none"), (2, "none"), (1, "full")])
def test_neighbours_that_have_one_parameter_gather_and_sum_it_as_predicted(
    world: RankPool, tensor: int, recompute: str
) -> None:
    """A layer gathers ahead for its neighbour what it has itself at that moment."""
    case = Case("adjacent", "float64", tensor, 1, 1, 2, 1, "parameters", "gpipe", recompute)
    directory = str(Path(__file__).parent)
    done = world.train(lowered(case).programs, "mesh_jobs:adjacent_float64", steps=2, directory=directory)
    assert max(differences(done)) <= 1e-12
    assert {one["collectives_differ"] for one in done} == {None}
