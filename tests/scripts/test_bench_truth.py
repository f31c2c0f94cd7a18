"""``scripts/bench-truth`` on published runs: what its readers take, as what a run is judged, when it says MISSED."""

from __future__ import annotations

from pathlib import Path

import pytest
import truth_bridge
import truth_mlperf
import truth_pairs
import truth_sailor
from truth_layouts import Run, calibrated, judged, spearman, waited_s

from penstock.examples.catalogue import shape
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of

SMALL = Run(shape("llama-3-8b"), 2, 8, "H100", 32, tensor=2, pipeline=4, virtual_stages=4)
LARGE = Run(shape("llama-3.1-405b"), 16, 8, "H100", 16, tensor=8, pipeline=8, virtual_stages=8, context=2)

MLPERF = "benchmark,gpu,gpus,gbs,ga,median_step_s,tp,cp,pp,vp,sequence\n"
BRIDGE = "System,#-GPUs,Precision,GBS,MBS,Sequence Length,TP,PP,CP,VP,Tokens / sec / GPU,release,model,FSDP,phase\n"
SAILOR = "case,layers,tp,dp,mbs,gbs,measured_s\n"


def _written(folder: Path, *lines: str) -> Path:
    path = folder / "rows.csv"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_calibrated_speed_is_the_one_that_a_time_was_made_with() -> None:
    assert calibrated(SMALL, judged(SMALL, 2.5).seconds) == pytest.approx(2.5, rel=1e-4)


def test_a_micro_batch_takes_what_the_layers_of_a_rank_compute_where_nothing_else_counts() -> None:
    """At a hundredth of the speed: 16 layers of 126 on each of 8 ranks, and 8 more micro-batches."""
    slow = 0.01
    more = LARGE._replace(batch=LARGE.batch + 8)
    model = profile_of(LARGE.shape, "megatron", ("H100",), degrees=DegreeOptions(tensor=(8,), context=(2,)))
    at = next(each for each in model.variants or () if each.degrees.tensor == 8 and each.degrees.context == 2)
    block = at.measurements[0].layers[1]
    expected = 16 * (block.forward_ns + block.backward_ns) / 1e9 / slow
    assert (judged(more, slow).seconds - judged(LARGE, slow).seconds) / 8 == pytest.approx(expected, rel=0.01)


def test_messages_are_waited_for_while_an_interleaved_pipeline_fills_and_drains() -> None:
    """Of 63 steps each: 8192 × 16384 elements of 16 bits on 16 GPUs, over half of 50 GB/s, and 10 us."""
    assert waited_s(LARGE) == pytest.approx(2 * 63 * (2 * 8192 * 16384 * 2 / 16 / 50e9 + 1e-5))
    inside = LARGE._replace(nodes=1, node_size=64, kind="GB200")
    assert waited_s(inside) == pytest.approx(2 * 63 * (2 * 8192 * 16384 * 2 / 16 / 900e9 + 5e-6))
    assert waited_s(LARGE._replace(virtual_stages=1)) == 0


@pytest.mark.tier("nightly")
def test_mlperf_calibrates_on_the_fewest_gpus_and_counts_misses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = [judged(run, 2.0).seconds for run in (LARGE, LARGE._replace(nodes=32))]

    def report(second: float) -> int:
        rows = [
            f"llama31_405b,NVIDIA H100-SXM5-80GB,256,16,8.0,{second},8,2,8,8,8192\n",
            f"llama31_405b,NVIDIA H100-SXM5-80GB,128,16,16.0,{seconds[0]},8,2,8,8,8192\n",
            "llama31_405b,NVIDIA B200,128,16,16.0,1,8,2,8,8,8192\n",
            "gpt3,NVIDIA H100-SXM5-80GB,128,16,16.0,1,8,2,8,8,8192\n",
        ]
        return truth_mlperf.report(_written(tmp_path, MLPERF, *rows))

    assert report(seconds[1]) == 0
    assert "128 GPUs calibrate 2.000 ×" in capsys.readouterr().out
    assert report(1.05 * seconds[1]) == 1, "the mean alone"
    assert report(1.08 * seconds[1]) == 2


@pytest.mark.tier("nightly")
def test_bridge_takes_the_newest_rows_and_leaves_out_what_is_fully_sharded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = (
        Run(shape("llama-3-70b"), 8, 8, "H100", 16, tensor=4, pipeline=8, virtual_stages=5),
        LARGE._replace(batch=8),
    )
    pace = [run.tokens / run.gpus / judged(run, 1.5).seconds for run in (small, large)]

    def report(factor: float) -> int:
        rows = [
            f"DGX-H100,64,FP8,16,1,8192,4,8,1,5,{pace[0]},26.10,LLAMA3_70B,0,Pre-Training Performance\n",
            "DGX-H100,64,FP8,16,1,8192,4,8,1,5,1,26.9,LLAMA3_70B,0,Pre-Training Performance\n",
            f"DGX-H100,128,FP8,8,1,8192,8,8,2,8,{factor * pace[1]},26.10,LLAMA3.1_405B,0,Pre-Training Performance\n",
            "DGX-GB200,64,FP8,16,2,8192,1,1,1,n/a,1,26.10,LLAMA3_70B,64,Pre-Training Performance\n",
            "DGX-GB200,256,FP8,16,1,8192,4,16,1,4,1,26.10,LLAMA3.1_405B,0,Pre-Training Performance\n",
            "DGX-H100,16,FP8,16,1,4096,1,1,1,n/a,1,26.10,Qwen3_30B_a3B,0,Pre-Training Performance\n",
        ]
        return truth_bridge.report(_written(tmp_path, BRIDGE, *rows))

    assert report(1.0) == 0
    printed = capsys.readouterr().out
    assert "calibrates 1.50 ×" in printed
    assert "not predicted: a row shards parameters (FSDP)" in printed
    assert "Qwen" not in printed
    assert report(1.2) == 1


def test_pairs_are_missed_where_the_published_order_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert truth_pairs.report(2.5) == 0
    first, *others = truth_pairs.PUBLISHED
    turned = (first, *((run, 2 * first[1] - reached) for run, reached in others))
    monkeypatch.setattr(truth_pairs, "PUBLISHED", turned)
    assert truth_pairs.report(2.5) == len(others)


def test_sailors_whole_plans_on_enough_nodes_are_ordered(tmp_path: Path) -> None:
    def report(*seconds: float) -> int:
        rows = [
            f"a/plan_config_N16_D8.json,16/18,4,8/8,4,256,{seconds[0]}\n",
            f"a/plan_config_N32_D8.json,7/9/9/9,4,8/8/8/8,4,256,{seconds[1]}\n",
            "a/plan_config_N16_D16.json,26,4,16,4,256,0.001\n",
            "a/plan_config_N8_D2.json,7/9/9/9,4,2/2/2/2,4,256,0.001\n",
        ]
        path = _written(tmp_path, SAILOR, *rows)
        assert len(truth_sailor.measured_rows(path)) == 2
        return truth_sailor.report(path)

    assert report(2.0, 1.0) == 0
    assert report(1.0, 2.0) == 1


def test_spearmans_correlation_is_that_of_the_orders() -> None:
    assert spearman([1, 2, 3, 4], [10, 200, 3000, 40_000]) == 1
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert spearman([1, 2, 3, 4], [2, 1, 3, 4]) == pytest.approx(0.8)
