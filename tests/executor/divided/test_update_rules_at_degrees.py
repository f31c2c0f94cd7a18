"""Update rules other than synchronous, where ranks share layers: what they train is what one process trains."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mesh_cases import MICRO_BATCHES, Case, contracted
from rank_pool import RankPool, differences

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import Program
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.schedules.periodic.wpipe import wpipe

HERE = Path(__file__).parent
LAYERS = 6
BATCHES = 4


def case_of(job: str, replicas: int, pipeline: int, sharding: str = "none", **degrees: int) -> Case:
    """Return a case in fp64; its schedule is the rule's."""
    sizes = {name: degrees.get(name, 1) for name in ("tensor", "context", "expert")}
    return Case(
        job, "float64", **sizes, replicas=replicas, pipeline=pipeline, sharding=sharding, schedule="", recompute=""
    )


def programs_of(case: Case, rule: UpdateRule, *, recompute: bool = False, in_turn: bool = False) -> list[Program]:
    """Lower about equal stages, under WPipe two on each device; the first layer of each is recomputed."""
    cells = contracted(case)
    number = case.pipeline * (2 if rule == "double_grouped" else 1)
    bounds = [LAYERS * k // number for k in range(number + 1)]
    stages = tuple(
        Stage(
            first,
            end - 1,
            tuple(case.replicas * (k % case.pipeline) + replica for replica in range(case.replicas)),
            "round_robin" if in_turn else "rows",
            ((first, first),) if recompute else (),
        )
        for k, (first, end) in enumerate(pairwise(bounds))
    )
    if rule == "elastic_averaging":
        allocation = parallel_pipelines(stages, 2, MICRO_BATCHES)
        return lower(cells, allocation, advance_forward(cells, allocation, delta=0), update_rule=rule)
    allocation = single_pipeline(stages, MICRO_BATCHES)
    pattern: Any = wpipe(cells, allocation) if rule == "double_grouped" else eager(cells, allocation, update_rule=rule)
    return lower(cells, allocation, pattern, update_rule=rule, batches=BATCHES)


CASES: dict[str, tuple[UpdateRule, Case, dict[str, Any]]] = {
    "2bw": ("double_buffered", case_of("gpt", 1, 2, tensor=2), {}),
    "2bw, replicas": ("double_buffered", case_of("llama", 2, 2, tensor=2), {}),
    "2bw, recomputed": ("double_buffered", case_of("llama", 1, 2, tensor=2), {"recompute": True}),
    "2bw, context": ("double_buffered", case_of("llama", 1, 2, tensor=2, context=2), {}),
    "2bw, experts": ("double_buffered", case_of("moe", 1, 2, expert=2), {}),
    "2bw, tied": ("double_buffered", case_of("tied", 1, 2, tensor=2), {}),
    "stashing": ("weight_stashing", case_of("gpt", 1, 3, tensor=2), {}),
    "stashing, replicas": ("weight_stashing", case_of("llama", 2, 2, tensor=2), {}),
    "stashing, in turn": ("weight_stashing", case_of("llama", 2, 2, tensor=2), {"in_turn": True}),
    "stashing, context": ("weight_stashing", case_of("llama", 1, 2, context=2), {}),
    "stashing, experts": ("weight_stashing", case_of("moe", 1, 2, expert=2), {}),
    "wpipe": ("double_grouped", case_of("gpt", 1, 2, tensor=2), {}),
    "wpipe, experts": ("double_grouped", case_of("moe", 1, 2, tensor=2, expert=2), {}),
    "averaging": ("elastic_averaging", case_of("gpt", 1, 2, tensor=2), {}),
}  # fmt: skip


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("name", CASES)
def test_every_rule_trains_its_equations_at_degrees(world: RankPool, name: str) -> None:
    rule, case, how = CASES[name]
    segments: dict[str, Any] = {} if rule == "elastic_averaging" else {"segments": [0]}
    programs = programs_of(case, rule, **how)
    done = world.train(programs, f"mesh_jobs:{case.job}_float64", steps=BATCHES, directory=str(HERE), **segments)
    gradients, losses = differences(done)
    assert max(gradients, losses) <= 1e-12


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("case", "rule", "how", "words"),
    [
        (case_of("moe", 1, 2, expert=2), "elastic_averaging", {}, "2 GPUs of a cell hold the same parameters"),
        (case_of("llama", 2, 2, context=2), "weight_stashing", {"in_turn": True}, "in turn, as those of stage 0"),
    ],
    ids=str,
)
def test_what_ranks_do_not_train_is_refused_with_its_reason(
    case: Case, rule: UpdateRule, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedRequest, match=words) as refused:
        programs_of(case, rule, **how)
    assert "another update rule" in str(refused.value.remedy)
