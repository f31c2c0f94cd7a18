"""Exports under DeepSpeed's own ``PipelineModule``, ``TrainSchedule`` and configuration: every rank is the plan's."""

from __future__ import annotations

import pytest
from drawn_plans import PLANS, plan_of
from installed import RELEASES, under

from penstock.exporting.layouts import layout_text
from penstock.schemas.program import BACKWARD, FORWARD, parse_row

KINDS = {"F": FORWARD, "B": BACKWARD}
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("release", RELEASES["deepspeed"])
def test_every_rank_is_what_the_plan_says(release: str, pytestconfig: pytest.Config) -> None:
    tier = pytestconfig.getoption("tier")
    drawn = [plan_of(seed, "deepspeed") for seed in range(PLANS)]
    cases = [
        {
            "text": layout_text(each.file, "deepspeed"),
            "layers": len(each.profile.layers),
            "world": len(each.world),
        }
        for each in drawn
    ]
    answers = under(f"deepspeed-{release}", "deepspeed_referee.py", {"cases": cases}, tier)
    for plan, ranks in zip(drawn, answers, strict=True):
        each = len(plan.world) // plan.ranks
        rows = {device: row for row in plan.file.plan.schedule.rows for device in row.devices}
        for process, rank in enumerate(ranks):
            stage = process // each
            first, last = plan.stages[stage]
            assert rank["stage"] == stage
            assert rank["layers"] == list(range(first, last + 1))
            assert rank["peers"] == [stage * each + r for r in range(each)]
            assert rank["batch"] == [plan.file.plan.global_batch_size, plan.rows, plan.number]
            row = parse_row(rows[plan.world[process]].text, stage)
            assert [(KINDS[kind], stage, m) for kind, m in rank["order"]] == [tuple(operation) for operation in row]
            assert (rank["together"] > 0) == any(
                each.recompute != "none" for each in plan.file.plan.pipelines[0].stages
            )
            assert rank["zero"] == (plan.file.plan.sharding == "optimizer")
