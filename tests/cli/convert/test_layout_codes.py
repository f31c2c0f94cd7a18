"""``penstock import layout`` ends with a code that tells what is wrong with a layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.examples import catalogue

LAST = len(catalogue.profile("gpt2-small").layers) - 1


@pytest.mark.parametrize(
    ("layers", "model", "code", "words"),
    [
        pytest.param([[0, 6], [7, LAST]], "gpt2-small", 0, "per global batch", id="fits"),
        pytest.param([[0, 6], [7, LAST]], "gpt2-xl", 65, "the last one is 49", id="other layers"),
        pytest.param([[0, 6], [8, LAST]], "gpt2-small", 65, "layer 7 is the next", id="a gap"),
    ],
)
def test_layouts(
    layers: list[list[int]], model: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"layers": layers, "num_micro_batches": 4}))
    arguments = [
        "import",
        "layout",
        str(layout),
        "--from",
        "ranges",
        "--example",
        model,
        "--cluster",
        "1x2xV100",
        "-b",
        "8",
    ]
    assert main([*arguments, "--alone"]) == code
    streams = capsys.readouterr()
    assert words in streams.out + streams.err


def test_an_unknown_trainer_is_said_before_what_its_layout_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "layout", "train.sh", "--from", "megatrn", "--cluster", "1x2xV100"]) == 64
    assert "'megatrn' is none of megatron, torchtitan, deepspeed, ranges" in capsys.readouterr().err


def test_a_layout_that_does_not_fit_is_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = len(catalogue.profile("gpt2-xl").layers) - 1
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"layers": [[0, last - 1], [last, last]], "num_micro_batches": 1}))
    arguments = ["--from", "ranges", "--example", "gpt2-xl", "--cluster", "1x2xV100", "-b", "8", "--alone"]
    assert main(["import", "layout", str(layout), *arguments]) == 3
    assert "does not fit" in capsys.readouterr().out


def test_a_layout_that_cannot_be_simulated_is_65(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.layouts.drawn.unreachable", lambda *_arguments: "no path from node0/0 to node0/1")
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps({"layers": [[0, 6], [7, LAST]], "num_micro_batches": 4}))
    arguments = ["--from", "ranges", "--example", "gpt2-small", "--cluster", "1x2xV100", "-b", "8", "--alone"]
    assert main(["import", "layout", str(layout), *arguments]) == 65
    assert "cannot be simulated: no path" in capsys.readouterr().err


FLAGS = "pretrain_gpt.py --num-layers 32 --micro-batch-size 1 --global-batch-size 16 \\\n"
BOTH = FLAGS + "--num-layers-per-virtual-pipeline-stage 2 \\\n--pipeline-model-parallel-layout 'Et*16|t*16L'"
LARGE = "torchrun --nnodes 2 --nproc-per-node 8 " + FLAGS + "--tensor-model-parallel-size 4"


SMALL = (
    "torchrun --nnodes 1 --nproc-per-node 4 pretrain_gpt.py \\\n"
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    "--seq-length 512 --vocab-size 512 --bf16 --micro-batch-size 1 --global-batch-size 16 \\\n"
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
)


def test_a_better_layout_is_said_in_the_files_own_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two GPUs for each layer of a small model are a waste; with a limit, all of the trainer's plans are searched."""
    script, best, flags = tmp_path / "small.sh", tmp_path / "best.json", tmp_path / "best.sh"
    script.write_text(SMALL)
    arguments = ["import", "layout", str(script), "--from", "megatron", "--cluster", "1x4xA100"]
    assert main([*arguments, "--max-plans", "3", "--best", str(best)]) == 0
    output = capsys.readouterr().out
    for choice in ("plain layout of megatron", "within what megatron can express at any degrees", "without limits"):
        assert f"best {choice}" in output
    assert "in small.sh for the best " in output
    assert "--tensor-model-parallel-size 1: small.sh, line 3, has 2" in output
    assert main(["export", str(best), "--to", "megatron", "--against", str(script), "-o", str(flags)]) == 0
    changed = output.partition("in small.sh for the best ")[2].splitlines()[1:-1]
    assert changed
    assert all(line.strip() in flags.read_text() for line in changed)
    assert main([*arguments, "--alone"]) == 0
    assert "in small.sh" not in capsys.readouterr().out


def test_all_that_a_script_leaves_open_is_asked_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks and degrees, the batch, and the sizes of the model where no option names one."""
    script = tmp_path / "train.sh"
    sizes = "--hidden-size $H --num-attention-heads 32 --seq-length 4096 --vocab-size 32000"
    degrees = "--pipeline-model-parallel-size $1 --tensor-model-parallel-size ${TP}"
    script.write_text(f"pretrain_gpt.py --num-layers 32 {sizes} {degrees} --micro-batch-size 1 --global-batch-size $B")
    arguments = ["import", "layout", str(script), "--from", "megatron", "--cluster", "1x8xH100", "--alone"]
    assert main(arguments) == 65
    assert "--given 1=… --given TP=… --given B=… --given H=…;" in capsys.readouterr().err
    assert main([*arguments, "-b", "16", "--example", "llama-3-8b"]) == 65
    assert "--given 1=… --given TP=…;" in capsys.readouterr().err
    values = [word for name in ("1=2", "TP=2", "B=16", "H=4096") for word in ("--given", name)]
    assert main([*arguments, *values]) in (0, 3)


@pytest.mark.parametrize(
    ("flags", "cluster", "words"),
    [
        pytest.param(
            FLAGS + "--tensor-model-parallel-size 3",
            "1x6xH100",
            ["train.sh has --tensor-model-parallel-size 3", "3 does not divide 32", "line 2, column 30"],
            id="a product that the model cannot have",
        ),
        pytest.param(
            BOTH,
            "1x8xH100",
            ["line 2", "--num-layers-per-virtual-pipeline-stage 2", "layout Et*16|t*16L (line 3, column 35)"],
            id="contradicting flags",
        ),
        pytest.param(
            FLAGS + "--pipeline-model-parallel-size 5",
            "1x5xH100",
            ["train.sh", "line 2", "--pipeline-model-parallel-size 5: 32 layers cannot be split evenly over 5"],
            id="layers that do not share",
        ),
        pytest.param(
            LARGE + " --pipeline-model-parallel-size 4",
            "1x8xH100",
            [
                "train.sh: the layout contradicts itself or the request: 8 GPUs in 2 groups of 4 "
                "cannot be split into 4",
                "--nnodes 2 (line 1, column 19) and --nproc-per-node 8",
                "start 16 devices; judged is a job on 8",
                "line 2, column 63: --pipeline-model-parallel-size 4",
            ],
            id="another size of the cluster",
        ),
        pytest.param(
            FLAGS + "--hidden-size 2048",
            "1x8xH100",
            ["train.sh has 1 fault", "line 2, column 15: --hidden-size is 2048; the profile has 4096"],
            id="another model",
        ),
    ],
)
def test_bad_input_is_said_with_file_line_flag_and_values(
    flags: str, cluster: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.sh").write_text(flags)
    arguments = ["--from", "megatron", "--example", "llama-3-8b", "--cluster", cluster, "--alone"]
    assert main(["import", "layout", str(tmp_path / "train.sh"), *arguments]) == 65
    message = capsys.readouterr().err
    assert [each for each in words if each not in message] == [], message
