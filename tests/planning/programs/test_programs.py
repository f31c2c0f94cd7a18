"""``penstock.programs`` and ``penstock.ladder`` on plans of planners, through their documents."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock
from penstock.planning.judge import judge
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.program import Program
from penstock.solvers.lowering import check_programs


def planned(planner: str, rule: str, **more: object) -> PlanFile:
    return penstock.plan(
        "gpt2-small",
        "1x4xV100",
        global_batch_size=16,
        planner=planner,
        update_rules=[rule],
        max_plans=8,
        degrees={"tensor": 1},
        **more,
    ).file


@pytest.fixture(scope="module")
def averaging() -> PlanFile:
    options = {"stages": 4, "pipelines": 2}
    return planned("avgpipe", "elastic_averaging", options=options, micro_batch_sizes=[1])


def warm_ups(programs: list[Program]) -> list[int]:
    """Return the number of forwards of each rank before its first backward."""
    return [[one.kind for one in p.instructions() if one.kind in "FB"].index("B") for p in programs]


def test_the_ladder_begins_with_1f1b_and_runs_further_ahead_from_rung_to_rung(averaging: PlanFile) -> None:
    rungs = penstock.ladder(averaging, staleness=1)
    pipelines = len(averaging.plan.pipelines)
    assert len(rungs) == 4
    assert sorted(warm_ups(rungs[0])) == sorted([4, 3, 2, 1] * pipelines)
    assert [max(warm_ups(rung)) for rung in rungs] == [4, 5, 6, 7]
    for rung in rungs:
        check_programs(rung)
        assert {(program.staleness, program.pipelines) for program in rung} == {(1, pipelines)}
        for first, other in zip(rungs[0], rung, strict=True):
            assert sorted(first.instructions()) == sorted(other.instructions())
            assert replace(first, prologue=()) == replace(other, prologue=())


def test_the_ladder_ends_where_memory_does(averaging: PlanFile) -> None:
    """With what the plan itself needs, and not a byte more: δ = 0 is all that fits."""
    timeline = judge(averaging).timeline
    assert timeline is not None
    topology = averaging.request.topology
    assert not isinstance(topology, str)
    assert topology.uniform is not None
    needed = timeline.peak_memory_bytes
    tight = topology.model_copy(update={"uniform": topology.uniform.model_copy(update={"memory_bytes": needed})})
    memory = averaging.request.memory.model_copy(update={"headroom_bytes": 0})
    request = averaging.request.model_copy(update={"topology": tight, "memory": memory})
    plan = averaging.plan.model_copy(update={"request_hash": request.content_hash(), "prediction": None})
    assert len(penstock.ladder(PlanFile(plan=plan, request=request))) == 1


@pytest.mark.parametrize(
    ("planner", "rule"),
    [("pipedream", "weight_stashing"), ("pipedream-2bw", "double_buffered"), ("wpipe", "double_grouped")],
)
def test_plans_without_a_flush_become_programs_of_any_length(planner: str, rule: str) -> None:
    file = planned(planner, rule)
    for batches in (4, 400):
        programs = penstock.programs(file, batches=batches)
        assert {(p.update_rule, p.batches) for p in programs} == {(rule, batches)}
        assert [Program.from_json(p.to_json()) for p in programs] == programs
    with pytest.raises(UnsupportedRequest, match="has no number of advance forwards"):
        penstock.ladder(file)
    with pytest.raises(InvalidPlan, match="does not verify"):
        penstock.programs(
            PlanFile(plan=file.plan.model_copy(update={"update_rule": "synchronous"}), request=file.request)
        )
