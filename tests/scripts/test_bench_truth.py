"""``scripts/bench-truth``: what its readers take, that a row's command prints the same time, and its scores by hand."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from truth import report, sailor, sources
from truth.__main__ import main as bench_truth
from truth.predicting import Predicted, anchored_speed, command_of, predicted
from truth.rows import PublishedLayout, PublishedStep, SkippedStep
from truth.scoring import RULES, regret_of, regrets, scored

from penstock.cli.main import main
from penstock.examples.catalogue import shape

PUBLISHED = (
    "source,model,seq,gbs,mbs,gpus,gpu_kind,tp,pp,vpp,cp,ep,dp,sharding,recompute,precision,measured,unit,note\n"
)
BRIDGE = "System,#-GPUs,Precision,GBS,MBS,Sequence Length,TP,PP,CP,VP,EP,Tokens / sec / GPU,release,phase,model,FSDP\n"
VTRAIN = "gpus,gbs,mbs,h,heads,L,seq,t,d,p,ms\n"
SAILOR = "case,layers,tp,dp,mbs,gbs,measured_s\n"
SMALL = shape("llama-3-8b").model_copy(update={"sequence_length": 2048})


def row(**changed: Any) -> PublishedStep:
    """Build a row of a small run on eight H100."""
    plain = PublishedStep("here", SMALL, "megatron", "H100", 8, 16, PublishedLayout(tensor=2, pipeline=2), 1.0)
    return plain._replace(**changed)


def folder(directory: Path, **files: str) -> Path:
    """Write files of a folder of measurements, by their names without the ending."""
    (directory / "truth").mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / "truth" / f"{name.replace('_', '-')}.csv").write_text(text, encoding="utf-8")
    return directory


def test_rows_that_are_not_predicted_are_named(tmp_path: Path) -> None:
    lines = (
        "github:a/b@x,llama-3-8b,2048,16,1,8,H100,2,1,1,1,1,4,optimizer,none,BF16,1.5,s/step,\n"
        "github:a/b@x,llama-3-8b,2048,16,1,8,H100,2,1,1,1,1,4,optimizer,none,BF16,1000,tokens/s/GPU,\n"
        "github:a/b@x,llama-3-8b,,16,1,8,H100,2,1,1,1,1,4,optimizer,none,BF16,1.5,s/step,\n"
        "github:a/b@x,llama-3-8b,2048,16,1,8,TPU v6e,2,1,1,1,1,4,optimizer,none,BF16,1.5,s/step,\n"
        "github:a/b@x,llama-3-8b,2048,16,1,8,H100,2,1,1,1,1,4,optimizer,none,BF16,1.5,s/step,DeepEP\n"
        "github:a/b@x,llama-9,2048,16,1,8,H100,2,1,1,1,1,4,optimizer,none,BF16,1.5,s/step,\n"
        "github:a/b@x,llama-3-8b,2048,16,1,8,a100_40gb,2,1,1,1,1,4,parameters,full,amp_fp8,1.5,s/step,\n"
    )
    rows, left_out = sources.rows_of(folder(tmp_path, published_2026=PUBLISHED + lines))
    assert [each.seconds for each in rows] == [1.5, 16 * 2048 / 8 / 1000, 1.5]
    assert rows[2].memory_bytes is not None
    assert rows[2].memory_bytes < 41 * 2**30
    assert (rows[2].kind, rows[2].precision, rows[2].layout.recompute) == ("A100", "FP8", "full")
    whys = [each.why for each in left_out if each.source == "a/b"]
    assert whys == ["a row without a sequence length", "TPUs", "DeepEP", "no shape of llama-9"]
    assert SkippedStep("megatron-bridge.csv", "no such file") in left_out


def test_parameters_that_a_row_prints_are_those_of_its_shape(tmp_path: Path) -> None:
    line = "github:a/b@x,llama-3-8b,2048,16,1,8,H100,2,1,1,1,1,4,optimizer,none,BF16,1.5,s/step,123 parameters\n"
    with pytest.raises(ValueError, match="llama-3-8b has 123 parameters, and its shape here 8030261248"):
        sources.rows_of(folder(tmp_path, published_2026=PUBLISHED + line))


def test_the_newest_release_of_pre_training_counts(tmp_path: Path) -> None:
    lines = (
        "DGX-H100,64,FP8,16,1,8192,4,8,1,5,n/a,100,26.10,Pre-Training Performance,LLAMA3_70B,0\n"
        "DGX-H100,64,FP8,16,1,8192,4,8,1,5,n/a,1,26.9,Pre-Training Performance,LLAMA3_70B,0\n"
        "DGX-GB200,64,FP8,16,2,8192,1,1,1,n/a,n/a,50,26.10,Pre-Training Performance,LLAMA3_70B,64\n"
        "DGX-H100,64,FP8,16,1,8192,4,8,1,5,n/a,1,26.11,LoRA,LLAMA3_70B,0\n"
    )
    rows, left_out = sources.rows_of(folder(tmp_path, megatron_bridge=BRIDGE + lines))
    first, sharded, *notes = rows
    assert first.seconds == 16 * 8192 / 64 / 100
    assert (first.layout, first.cluster) == (PublishedLayout(tensor=4, pipeline=8, chunks=5), "8x8xH100")
    assert (sharded.layout.sharding, sharded.cluster) == ("parameters", "1x64xGB200")
    assert {each.source for each in notes} == {"Megatron-Bridge, notes"}
    assert SkippedStep("Megatron-Bridge", "phase: LoRA") in left_out


@pytest.mark.parametrize(
    "published",
    [
        pytest.param(row(), id="a shipped model"),
        pytest.param(
            row(
                shape=shape("llama-3-8b"),
                framework="torch",
                target="torchtitan",
                layout=PublishedLayout(micro_batch=2, sharding="parameters", recompute="operators"),
            ),
            id="a shipped profile and a trainer",
        ),
        pytest.param(
            row(layout=PublishedLayout(tensor=2, context=4), context_kind="all_to_all"), id="shared sequences"
        ),
        pytest.param(
            row(
                shape=SMALL.model_copy(update={"name": "other", "layers": 4}),
                layout=PublishedLayout(sharding="parameters"),
            ),
            id="a model in a file",
        ),
        pytest.param(
            row(
                kind="A100",
                memory_bytes=40 * 2**30,
                framework="torch",
                layout=PublishedLayout(tensor=8, recompute="full"),
            ),
            id="a smaller board",
        ),
    ],
)
def test_a_rows_command_prints_the_same_time(
    published: PublishedStep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prediction = predicted(published)
    words = shlex.split(command_of(published, tmp_path))
    assert words[0] == "penstock"
    assert main([*words[1:], "--json", "--effort", "quick"]) == 0
    rows = json.loads(capsys.readouterr().out)
    (yours,) = (each for each in rows if each["planner"] == "yours")
    assert yours["iteration_ns"] / 1e9 == prediction.seconds


def test_an_anchored_speed_is_the_one_that_a_time_was_made_with() -> None:
    assert anchored_speed(row(seconds=predicted(row(), 2.5).seconds)) == pytest.approx(2.5, rel=1e-4)


def prediction(seconds: float, measured: float, micro_batch: int = 1, tensor: int = 1, **changed: Any) -> Predicted:
    """Build a prediction with a stated error of a tenth."""
    layout = PublishedLayout(micro_batch=micro_batch, tensor=tensor)
    return Predicted(row(seconds=measured, layout=layout, **changed), seconds, 0.1, 0, 0)


def test_scores_by_hand() -> None:
    """Three layouts of a group: 1 s and 1.04 s have no order; both are quicker than 2 s, one is predicted so."""
    rows = [prediction(1.05, 1.0), prediction(1.5, 1.04, 2), prediction(1.4, 2.0, 4)]
    scores = scored(rows)
    assert (scores.rows, scores.inside, scores.pairs, scores.right) == (3, 1, 2, 1)
    assert scores.signed == pytest.approx(0.05)
    assert scores.worst == pytest.approx(1.5 / 1.04 - 1)
    relative = scored([each._replace(row=each.row._replace(is_timed=False)) for each in rows])
    assert (relative.timed, relative.inside, relative.right) == (0, 0, 1)


def test_regret_is_that_of_the_chosen_layout() -> None:
    rows = [prediction(3.0, 1.0, 1, 2), prediction(1.0, 1.5, 2, 2), prediction(2.0, 3.0, 4, 1)]
    both = regrets([*rows, prediction(1.0, 1.0, batch=32)])
    assert both is not None
    chosen, rules = both
    assert (chosen.groups, chosen.mean) == (1, 0.5)
    assert [rules[name].mean for name in RULES] == [2.0, 2.0, 2.0, 0.0]
    assert regret_of([each.row for each in rows], rows[0].row.layout) == 0
    assert regrets(rows[:1]) is None


def test_choices_of_another_planner_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "8,32,4,1024,16,24,1024,2,2,2,200\n8,32,4,1024,16,24,1024,1,8,1,100\n8,64,4,1024,16,24,1024,1,8,1,100\n"
    data = folder(tmp_path, vtrain_one_node=VTRAIN + lines)
    assert bench_truth(["--data", str(data), "--groups"]) == 0
    (group,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (group["cluster"], group["global_batch_size"], len(group["layouts"])) == ("1x8xA100", 32, 2)
    choices = tmp_path / "choices.jsonl"
    choices.write_text(json.dumps({"group": group["group"], "layout": group["layouts"][0]}), encoding="utf-8")
    assert bench_truth(["--data", str(data), "--choices", str(choices)]) == 0
    assert "vTrain, one node: regret 100.0%, 100.0% (mean, 95 %) in 1 groups" in capsys.readouterr().out
    choices.write_text('{"group": "none", "layout": {}}\nno json\n', encoding="utf-8")
    assert bench_truth(["--data", str(data), "--choices", str(choices)]) == 1
    assert f"{choices}:1: not a choice of a group's layout: KeyError" in capsys.readouterr().out


def test_the_tables_of_a_small_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "8,32,4,1024,16,12,1024,2,2,2,200\n8,32,4,1024,16,12,1024,1,8,1,100\n16,64,4,1024,16,12,1024,16,1,1,9\n"
    data = folder(tmp_path, vtrain_one_node=VTRAIN + lines)
    assert bench_truth(["--data", str(data), "--commands", "--out", str(tmp_path / "out")]) == 1, "a row has no plan"
    printed = capsys.readouterr().out
    assert "vTrain, one node; A100, 16-bit" in printed
    assert "1 of vTrain, several nodes: gpt on 16: tensor 16 needs 16 GPUs in one node" in printed
    assert printed.count("  penstock compare --profile ") == 2


def test_without_measurements_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_truth([]) == 0
    assert "the measurements are not in the repository" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_truth(["--data", str(tmp_path / "absent")])
    assert "has no folder truth" in capsys.readouterr().err


def test_layouts_of_the_notes_are_in_the_published_order() -> None:
    base, *others = [predicted(each) for each in sources.NOTES]
    assert all(each.seconds > base.seconds for each in others)
    assert report.groups_of(sources.NOTES).keys() == {report.groups_of(sources.NOTES).popitem()[0]}


def test_sailors_whole_plans_on_enough_nodes_are_ordered(tmp_path: Path) -> None:
    def missed(*seconds: float) -> int:
        rows = [
            f"a/plan_config_N16_D8.json,16/18,4,8/8,4,256,{seconds[0]}\n",
            f"a/plan_config_N32_D8.json,7/9/9/9,4,8/8/8/8,4,256,{seconds[1]}\n",
            "a/plan_config_N16_D16.json,26,4,16,4,256,0.001\n",
            "a/plan_config_N8_D2.json,7/9/9/9,4,2/2/2/2,4,256,0.001\n",
        ]
        path = tmp_path / "sailor.csv"
        path.write_text(SAILOR + "".join(rows), encoding="utf-8")
        assert len(sailor.measured_rows(path)) == 2
        return sailor.report(path)

    assert missed(2.0, 1.0) == 0
    assert missed(1.0, 2.0) == 1


def test_spearmans_correlation_is_that_of_the_orders() -> None:
    assert sailor.spearman([1, 2, 3, 4], [10, 200, 3000, 40_000]) == 1
    assert sailor.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert sailor.spearman([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(0.8)
