"""Traverse tuning: the settings, their order, and one traversal on real ranks through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.planning.judge import judge
from penstock.planning.tune import fastest, settings, traverse
from penstock.questions.answer import plan
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import PlanFile


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tune") / "p.json")
    sizes = ["--micro-batch-size", "4", "--micro-batch-size", "8"]
    assert main(["profile", "--job", "examples.gpt:tiny", "--analytic", "V100", *sizes, "-o", path]) == 0
    return path


def planned(profile: str, sizes: list[int], stages: int = 2) -> PlanFile:
    """Return AvgPipe's plan of two stages, or of another number."""
    return plan(
        profile,
        "2xV100",
        global_batch_size=16,
        micro_batch_sizes=sizes,
        planner="avgpipe",
        update_rules=["elastic_averaging"],
        options={"stages": stages, "pipelines": 2},
    ).file


def test_every_setting_that_fits_is_a_plan_that_verifies(profile: str) -> None:
    candidates = settings(planned(profile, [4, 8]), 2)
    assert [(one.num_micro_batches, one.num_pipelines) for one in candidates] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert sum(one.by_profile for one in candidates) == 1
    for one in candidates:
        judgement = judge(one.file)
        assert judgement.faults == ()
        assert judgement.timeline.time_per_global_batch_ns == one.judged_ns
        assert len(one.file.plan.pipelines) == one.num_pipelines


def test_the_fastest_is_by_global_batch_not_by_iteration(profile: str) -> None:
    candidates = settings(planned(profile, [4, 8]), 2)
    iteration_ns = {(2, 1): 100, (2, 2): 190, (4, 1): 120, (4, 2): 191}

    def run(file: PlanFile) -> int:
        return iteration_ns[file.plan.num_micro_batches, len(file.plan.pipelines)]

    tried = list(traverse(candidates, run))
    assert [one.measured_ns for one in tried] == [100, 95, 120, 96]
    assert fastest(tried).setting == candidates[1]


def test_other_plans_have_no_degrees(profile: str) -> None:
    other = plan(profile, "2xV100", global_batch_size=16, planner="gpipe").file
    with pytest.raises(UnsupportedRequest, match="synchronous updates"):
        settings(other, 2)


@pytest.mark.tier("nightly")
def test_the_command_runs_each_setting_on_ranks(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, best = str(tmp_path / "plan.json"), str(tmp_path / "best.json")
    planned(profile, [8], stages=1).write(plan)
    assert main(["tune", plan, "--job", "examples.gpt:tiny", "--batches", "1", "-o", best]) == 0
    out = capsys.readouterr().out
    assert out.count("per global batch, judged") == 2
    assert "chosen by profile" in out
    written = PlanFile.read(best).plan
    assert f"fastest: 2 micro-batches, {len(written.pipelines)} pipelines" in out
