"""The global batch size of a text that leaves it to its trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_texts import parsed

from penstock.cli.main import main

MICRO = "--micro-batch-size 2 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 4"
TITAN = "[training]\nlocal_batch_size = 3\n{}[parallelism]\ntensor_parallel_degree = 2\n"
SPEED = '{{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, {}"pipeline": {{"stages": 2}}}}'


@pytest.mark.parametrize(
    ("form", "text", "batch"),
    [
        pytest.param("megatron", f"{MICRO} --global-batch-size 6", 6, id="megatron says it"),
        pytest.param("megatron", MICRO, 2 * 16 // 8, id="megatron: a micro-batch a replica"),
        pytest.param("megatron", "--pipeline-model-parallel-size 2", None, id="megatron without micro-batches"),
        pytest.param("torchtitan", TITAN.format("global_batch_size = 48\n"), 48, id="torchtitan says it"),
        pytest.param("torchtitan", TITAN.format(""), 3 * 8, id="torchtitan: the local batch of each replica"),
        pytest.param("torchtitan", TITAN.format("global_batch_size = -1\n"), 3 * 8, id="torchtitan: -1 is the same"),
        pytest.param("torchtitan", "[parallelism]\ntensor_parallel_degree = 2\n", None, id="torchtitan without local"),
        pytest.param("torchtitan", TITAN.format("").replace("= 2", "= 3"), None, id="degrees that do not divide"),
        pytest.param("deepspeed", SPEED.format('"train_batch_size": 32, '), 32, id="deepspeed says it"),
        pytest.param("deepspeed", SPEED.format(""), 2 * 4 * 8, id="deepspeed: accumulation of each replica"),
        pytest.param("deepspeed", SPEED.format('"train_batch_size": "auto", '), 2 * 4 * 8, id="deepspeed: auto"),
        pytest.param("ranges", '{"layers": []}', None, id="ranges have no default"),
    ],
)
def test_a_batch_that_is_left_out_is_the_trainers_own(form: str, text: str, batch: int | None) -> None:
    assert parsed(form, text).batch(16) == batch
    if batch is not None and "says it" not in text:
        assert parsed(form, text).batch() in (None, batch)


def test_the_command_judges_the_default_and_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n[training]\nlocal_batch_size = 2\n'
        '[parallelism]\ndata_parallel_shard_degree = -1\n[activation_checkpoint]\nmode = "full"\n'
    )
    arguments = ["import", "layout", str(path), "--from", "torchtitan", "--cluster", "2x4xH100", "--alone"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "no global batch size in the text: judged are 16 samples a step" in shown
    assert "the model has 6.164 million parameters" in shown
    assert main([*arguments, "--nodes", "node1"]) == 0
    assert "judged are 8 samples a step" in capsys.readouterr().out
    path.write_text("[parallelism]\ndata_parallel_shard_degree = -1\n")
    assert main([*arguments, "--example", "gpt"]) == 65
    assert "does not say the global batch size" in (error := capsys.readouterr().err)
    assert "--global-batch-size" in error
