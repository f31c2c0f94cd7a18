"""Exports at all degrees under torchtitan's two newest releases: every rank has the plan's modules and groups."""

from __future__ import annotations

from typing import Any

import pytest
from drawn_plans import MODELS, PLANS, Drawn, neighbours, plan_of
from installed import under
from test_torchtitan_split import FULL, expected

from penstock.exporting.layouts import layout_text
from penstock.layouts.torchtitan.model_parts import HEADS
from penstock.layouts.torchtitan.torchtitan import SCHEDULES
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.schedules.trainer_orders import ranks_of_stages

pytestmark = pytest.mark.timeout(900)


def exported(seed: int, release: str) -> tuple[Drawn, str] | None:
    """Return a plan and its file; None for whole replicas whose experts need more GPUs than torchtitan has for them."""
    drawn = plan_of(seed, "torchtitan")
    if drawn.degrees.expert <= drawn.degrees.mesh or drawn.file.plan.sharding == "optimizer":
        return drawn, layout_text(drawn.file, "torchtitan", release)
    if release == "0.2" and drawn.ranks > 1:  # written as FSDP
        return drawn, layout_text(drawn.file, "torchtitan", release)
    with pytest.raises(UnsupportedRequest, match="it spreads experts over these GPUs only"):
        layout_text(drawn.file, "torchtitan", release)
    return None


@pytest.mark.parametrize("release", sorted(HEADS))
def test_every_rank_is_what_the_plan_says(release: str, pytestconfig: pytest.Config) -> None:
    tier = pytestconfig.getoption("tier")
    plans = [case for seed in range(PLANS) if (case := exported(seed, release)) is not None]
    assert len(plans) > 0.7 * PLANS
    layers = [MODELS[drawn.profile.name] for drawn, _text in plans]
    cases = [
        {"text": text, "layers": number, "world": len(drawn.world)}
        for (drawn, text), number in zip(plans, layers, strict=True)
    ]
    question = {"release": release, "cases": cases}
    answers = under(FULL[release], "torchtitan_splits.py", question, tier)
    for (drawn, _text), number, case in zip(plans, layers, answers, strict=True):
        compare_stages(drawn, number, case, HEADS[release])
        compare_groups(drawn, case)
        assert (case["micro_batch"], case["global"]) == (drawn.rows, drawn.file.plan.global_batch_size)
        assert case["local"] == drawn.rows * (drawn.number if drawn.ranks > 1 else 1)


def compare_stages(drawn: Drawn, layers: int, answer: dict[str, Any], head: str) -> None:
    rank_of = ranks_of_stages(SCHEDULES[answer["schedule"]], drawn.ranks, drawn.chunks)
    for rank, stages in enumerate(answer["ranks"]):
        names_of = {index: {name.rpartition(".")[0] for name in names} for index, names in stages}
        assert names_of == {
            s: set(expected(stage, layers + 1, head)) for s, stage in enumerate(drawn.stages) if rank_of[s] == rank
        }


def compare_groups(drawn: Drawn, answer: dict[str, Any]) -> None:
    each = len(drawn.world) // drawn.ranks
    for process, groups in enumerate(answer["groups"]):
        dense, sparse = (drawn.degrees.tensor, drawn.degrees.context), (drawn.degrees.expert,)
        assert groups == {
            "tp": neighbours(drawn, process, dense, [0]),
            "cp": neighbours(drawn, process, dense, [1]),
            "batch": neighbours(drawn, process, dense, [2]),
            "loss": neighbours(drawn, process, dense, [1, 2]),
            "ep": neighbours(drawn, process, sparse, [0]),
            "pp": [process % each + r * each for r in range(drawn.ranks)],
        }
