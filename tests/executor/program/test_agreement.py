"""Ranks whose programs or settings do not belong together: refused on all of them before any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import small_jobs
from pipelines import Part, programs_of
from rank_pool import RankPool

from penstock.schemas.program import Mesh, Program

TWO = [Part(3, (0,)), Part(3, (1,))]
OTHER = [Part(2, (0,)), Part(4, (1,))]


def refused(pool: RankPool, programs: Sequence[Program], **more: Any) -> str:
    """Return the reason, which is the same on both ranks."""
    results = pool.train(programs, "plain", steps=2, **({"check": False} | more))
    assert [(one["kind"], one["error"], one["step"]) for one in results] == [("failed", "InvalidDocument", None)] * 2
    (reason,) = {one["detail"] for one in results}
    return str(reason)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("parts", "micro_batches", "changes", "words"),
    [
        pytest.param(
            OTHER,
            2,
            {},
            "stage 0 has layers 0…2 on rank 0, and stage 1 has 2…5 on rank 1: they do not follow each other",
            id="cuts",
        ),
        pytest.param(TWO, 3, {}, "rank 1 has row_classes ((4, 3),), rank 0 has ((6, 2),)", id="micro-batches"),
        pytest.param(TWO, 2, {"global_batch_size": 8}, "rank 1 has global_batch_size 8, rank 0 has 12", id="batch"),
        pytest.param(
            TWO,
            2,
            {"update_rule": "weight_stashing"},
            "rank 1 has update_rule 'weight_stashing', rank 0 has 'synchronous'",
            id="rule",
        ),
        pytest.param(TWO, 2, {"groups": ((0, 1),)}, "rank 1 has groups ((0, 1),), rank 0 has ()", id="groups"),
        pytest.param(TWO, 2, {"mesh": Mesh(2, 1, 1, 1, 0)}, "rank 1 has tensor degree 2, rank 0 has 1", id="degrees"),
    ],
)
def test_ranks_of_two_plans_are_refused(
    pool: RankPool, parts: list[Part], micro_batches: int, changes: dict[str, Any], words: str
) -> None:
    first, other = programs_of(small_jobs.plain, TWO, 2), programs_of(small_jobs.plain, parts, micro_batches)
    assert refused(pool, [first[0], replace(other[1], **changes)]) == words


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"options_of_rank": [{}, {"precision": "bf16"}]}, "rank 1 has options.precision 'bf16', rank 0 has 'fp32'"),
        ({"steps_of_rank": [2, 3]}, "rank 1 has steps 3, rank 0 has 2"),
        ({"seed_of_rank": [5, 6]}, "rank 1 has seed 6, rank 0 has 5"),
        ({"trace_steps_of_rank": [0, 1]}, "rank 1 has trace_steps 1, rank 0 has 0"),
        ({"job_of_rank": ["small_jobs:plain", "small_jobs:plain64"]}, "rank 1 has job 'plain64', rank 0 has 'plain'"),
    ],
)
def test_ranks_that_are_to_train_otherwise_are_refused(pool: RankPool, more: dict[str, Any], words: str) -> None:
    assert refused(pool, programs_of(small_jobs.plain, TWO, 2), **more) == words


def test_a_program_of_another_rank_is_refused_by_the_rank_that_gets_it(pool: RankPool) -> None:
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 2)
    (result,) = pool.train([program], "plain", world_size_of_rank=[2])
    assert result["detail"] == "the program is for rank 0 of 1, but was given to rank 0 of 2"
