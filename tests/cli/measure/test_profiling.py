"""``penstock profile`` of transformers that are not run: by name, by a Hugging Face model's configuration."""

from __future__ import annotations

import json
import os
import pty
import sys
from pathlib import Path
from subprocess import PIPE, run

import pytest

from penstock.cli.main import main
from penstock.schemas.profile import ModelProfile

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}


def test_the_other_framework_of_a_known_transformer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "p.json"
    arguments = ["--example", "llama-3-8b", "--framework", "megatron", "--kind", "H100", "--micro-batch-size", "2"]
    assert main(["profile", *arguments, "-o", str(target)]) == 0
    profile = ModelProfile.read(target)
    assert (profile.framework, profile.device_kinds) == ("megatron", ("H100",))
    assert [measurement.micro_batch_size for measurement in profile.measurements] == [2]
    assert [each.degrees.tensor for each in profile.variants or () if each.degrees.context == 1] == [2, 4, 8]
    assert "llama-3-8b: 34 layers, 33 cuts" in capsys.readouterr().out


def test_a_configuration_of_a_hugging_face_model(tmp_path: Path) -> None:
    config, target = tmp_path / "config.json", tmp_path / "p.json"
    config.write_text(json.dumps(GPT2))
    assert main(["profile", "--hf", str(config), "--sequence-length", "512", "-o", str(target)]) == 0
    profile = ModelProfile.read(target)
    assert profile.framework == "torch"
    assert profile.shape is not None
    assert profile.shape.sequence_length == 512
    (tie,) = profile.shared_parameters
    assert tie.layers == (0, 13)


def test_a_job_at_degrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned from, as a computed profile is."""
    target, plan = tmp_path / "p.json", tmp_path / "plan.json"
    arguments = ["--job", "examples.llama:tiny", "--analytic", "H100", "--tensor", "2", "--tensor", "1"]
    assert main(["profile", *arguments, "-o", str(target)]) == 0
    assert [each.degrees.tensor for each in ModelProfile.read(target).variants or ()] == [2]
    arguments = ["--profile", str(target), "--cluster", "1x4xH100", "-b", "16", "--tensor", "2", "--planner", "even"]
    assert main(["plan", *arguments, "-o", str(plan)]) == 0
    assert json.loads(plan.read_text())["plan"]["degrees"]["tensor"] == 2
    capsys.readouterr()
    arguments = ["--job", "paper_models.gnmt:tiny", "--analytic", "H100", "--tensor", "2"]
    assert main(["profile", *arguments, "-o", str(target)]) == 65
    assert (
        "layer 'encoder.embedding' cannot be divided by tensor 2: its LayerSpec has no `parallel`"
        in capsys.readouterr().err
    )


def test_a_profile_goes_to_no_terminal_and_says_at_once_what_is_loaded(tmp_path: Path) -> None:
    """A terminal would be filled; before PyTorch is loaded there is a line of progress."""
    program = [sys.executable, "-m", "penstock.cli.main", "profile"]
    inner, outer = pty.openpty()
    try:
        shown = run([*program, "--example", "gpt2-small"], stdout=outer, stderr=PIPE, text=True, check=False)
    finally:
        os.close(inner)
        os.close(outer)
    assert shown.returncode == 64
    assert "name the file of the profile, such as -o profile.json" in shown.stderr
    loads = run([*program, "--job", "absent:job", "-o", str(tmp_path / "p.json")], stderr=PIPE, text=True, check=False)
    first, *rest = loads.stderr.splitlines()
    assert first.endswith("s: loading PyTorch and the job 'absent:job'")
    assert rest == [
        "penstock: there is no module 'absent' for the job 'absent:job'",
        "  try: --directory DIR names the directory that holds it; or install its package",
    ]
    assert loads.returncode == 64


@pytest.mark.tier("nightly")
def test_a_configuration_is_traced_from_the_modules_of_its_library(tmp_path: Path) -> None:
    config, target = tmp_path / "config.json", tmp_path / "p.json"
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config.write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **small}))
    arguments = ["--traced", "--sequence-length", "32", "--kind", "H100", "--tensor", "2", "--context", "2"]
    assert main(["profile", "--hf", str(config), *arguments, "-o", str(target)]) == 0
    profile = ModelProfile.read(target)
    assert profile.shape is not None
    assert (profile.framework, profile.parameter_dtype, profile.shape.sequence_length) == ("torch", "bf16", 32)
    degrees = [(each.degrees.tensor, each.degrees.context, each.boundary) for each in profile.variants or ()]
    assert degrees == [(2, 1, "whole"), (1, 2, "sharded"), (2, 2, "whole")]
    assert "a block without experts keeps" in profile.assumptions[-1]
    assert [measurement.micro_batch_size for measurement in profile.measurements] == [1, 2, 4, 8]


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing --job, --example or --hf"),
        (["--job", "a:b", "--hf", "config.json"], "either --job or --hf, not both"),
        (["--example", "gpt2-small", "--hf", "config.json"], "either --example or --hf, not both"),
        (["--job", "a:b", "--expert", "auto"], "with --job give --analytic and numbers"),
        (["--hf", "config.json", "--traced", "--context", "auto"], "with --traced give numbers such as 1,2,4"),
        (["--job", "a:b", "--framework", "torch"], "--framework and options like it go with --example or --hf"),
        (["--example", "gpt2-small", "--traced"], "--traced goes with --hf, without --example"),
        (["--hf", "config.json", "--traced", "--framework", "torch"], "--traced goes with --hf, without --framework"),
        (["--example", "gpt2-small", "--dtype", "fp8"], "--example and --hf compute costs in bf16, not in fp8"),
        (["--job", "a:b", "--tensor", "2"], "--tensor goes with --job and --analytic, or with --traced"),
        (["--job", "a:b", "--analytic", "H100", "--tensor", "all"], "'all' is not a list of numbers such as 1,2,4,8"),
    ],
)
def test_one_model_is_asked_for(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 64
    assert words in capsys.readouterr().err


def test_an_unknown_framework_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--example", "llama-3-8b", "--framework", "jax", "-o", str(tmp_path / "p.json")]
    assert main(["profile", *arguments]) == 65
    assert "the framework 'jax' is none of megatron, torch" in capsys.readouterr().err


def test_context_degrees_are_those_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "p.json"
    arguments = ["profile", "--example", "llama-3-8b", "--framework", "megatron", "--kind", "H100", "-o", str(target)]

    def contexts(*more: str) -> set[int]:
        assert main([*arguments, *more]) == 0
        return {each.degrees.context for each in ModelProfile.read(target).variants or ()}

    assert contexts() == {1, 2}
    assert contexts("--context", "auto") == {1, 2}
    assert contexts("--context", "1,4") == {1, 4}
    assert contexts("--sequence-length", "32768") == {1, 2, 4, 8}
    assert contexts("--sequence-length", "32768", "--context", "1") == {1}
    assert contexts("--context", "2", "--context-kind", "all-to-all") == {1, 2}
    assert any("all_to_all" in each for each in ModelProfile.read(target).assumptions)
    for more, words in (
        (["--context", "3"], "2 × context 3 does not divide a sequence of 8192 tokens"),
        (["--context", "16", "--context-kind", "all-to-all"], "tensor 1 × context 16 = 16 does not divide 8 key and"),
        (["--context-kind", "p2p"], "the kind of context parallelism 'p2p' is none of ring, all-gather, all-to-all"),
        (["--context", "many"], "'many' is neither auto nor numbers such as 1,2,4,8"),
    ):
        assert main([*arguments, *more]) in (64, 65)
        assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.tier("nightly")
def test_routing_of_tokens_is_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "p.json"
    arguments = ["profile", "--framework", "megatron", "--kind", "H100", "-o", str(target)]

    def forward_ns(*more: str) -> int:
        assert main([*arguments, "--example", "qwen3-30b-a3b", *more]) == 0
        variants = ModelProfile.read(target).variants or ()
        (variant,) = [each for each in variants if each.degrees.expert == 8 and each.degrees.tensor == 1]
        return sum(layer.forward_ns for layer in variant.measurements[0].layers)

    even = forward_ns("--expert", "8")
    assert even < forward_ns("--expert", "8", "--routing-imbalance", "1.5")
    assert "the busiest GPU's experts get 1.5 times the mean" in " ".join(ModelProfile.read(target).assumptions)
    assert even < forward_ns("--expert", "8", "--capacity-factor", "2")
    moe, dense = ["--example", "qwen3-30b-a3b"], ["--example", "llama-3-8b"]
    for more, words in (
        ([*moe, "--routing-imbalance", "0.5"], "routing imbalance 0.5 is not possible"),
        ([*moe, "--routing-imbalance", "17"], "an expert of qwen3-30b-a3b gets at most all tokens, 16 times its even"),
        ([*moe, "--routing-imbalance", "nan"], "routing imbalance nan is not possible"),
        ([*moe, "--capacity-factor", "0"], "capacity factor 0 is not possible"),
        ([*moe, "--capacity-factor", "1", "--routing-imbalance", "2"], "exclude each other"),
        ([*dense, "--capacity-factor", "1"], "llama-3-8b has no experts, so capacity factor 1 would have no effect"),
        (["--job", "x.py", "--capacity-factor", "0"], "not with --job"),
    ):
        assert main([*arguments, *more]) in (64, 65)
        assert words in " ".join(capsys.readouterr().err.split())


def test_the_level_of_computed_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, times = tmp_path / "p.json", []
    for model in (["--example", "gpt2-small"], ["--job", "examples.llama:tiny", "--dtype", "bf16"]):
        for level in ("runs", "kernels"):
            arguments = [*model, "--kind", "H100", "--micro-batch-size", "8", "--level", level]
            assert main(["profile", *arguments, "-o", str(target)]) == 0
            times.append(sum(layer.forward_ns for layer in ModelProfile.read(target).measurements[0].layers))
    assert times[1] < times[0]
    assert times[3] < times[2]
    capsys.readouterr()
    for refused, words in (
        (["--example", "gpt2-small", "--kind", "H100", "--level", "layers"], "'layers' is none of runs, kernels"),
        (["--job", "examples.llama:tiny", "--level", "kernels"], "a job is measured"),
    ):
        assert main(["profile", *refused, "-o", str(target)]) == 64
        assert words in capsys.readouterr().err
    assert main(["profile", "--example", "gpt2-small", "--level", "kernels", "-o", str(target)]) == 64
    assert "table has no level 'kernels' of A100" in capsys.readouterr().err
