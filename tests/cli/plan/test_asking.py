"""The model of a request: by a Hugging Face model's configuration, and by another framework than the shipped one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}
OPTIONS = ["--cluster", "1x4xA100", "-b", "16", "--planner", "gpipe"]


def _profile(path: Path) -> ModelProfile:
    profile = PlanFile.read(path).request.profile
    assert isinstance(profile, ModelProfile)
    return profile


def test_a_plan_for_a_hugging_face_model(tmp_path: Path) -> None:
    config, plan = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text(json.dumps(GPT2))
    assert main(["plan", "--hf", str(config), "--framework", "megatron", *OPTIONS, "-o", str(plan)]) == 0
    profile = _profile(plan)
    assert (profile.name, profile.framework, len(profile.layers)) == ("gpt2", "megatron", 14)


def test_a_plan_says_how_a_configuration_of_another_family_is_read(tmp_path: Path) -> None:
    config, plan = tmp_path / "config.json", tmp_path / "plan.json"
    llama = {
        "model_type": "house",
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": {"quant_method": "fp8"},
    }
    sizes = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1024}
    config.write_text(json.dumps({**llama, **sizes, "vocab_size": 1024}))
    assert main(["plan", "--hf", str(config), *OPTIONS, "-o", str(plan)]) == 0
    assumptions = PlanFile.read(plan).plan.assumptions
    assert "the family 'house' is read as 'llama', by the architecture that config.json names" in assumptions
    assert "the quantization in config.json is left out: training is in bf16" in assumptions


def test_a_plan_for_a_shipped_transformer_at_another_length(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", "--example", "gpt2-small", "--sequence-length", "512", *OPTIONS, "-o", str(plan)]) == 0
    shape = _profile(plan).shape
    assert shape is not None
    assert shape.sequence_length == 512


def test_one_option_takes_all_degrees_that_have_short_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = tmp_path / "short.json", tmp_path / "long.json"
    words = ["plan", "--example", "gpt2-small", *OPTIONS]
    assert main([*words, "--tensor", "1,2", "--context", "1", "--sharding", "none", "-o", str(plans[0])]) == 0
    assert main([*words, "--degrees", "tensor=1,2:context=1:sharding=none", "-o", str(plans[1])]) == 0
    short, long = (PlanFile.read(path).request for path in plans)
    assert short == long
    assert short.sharding == "none"
    capsys.readouterr()
    assert main([*words, "--tensor", "2", "--degrees", "tensor=1"]) == 64
    assert "tensor is given by --tensor as well" in capsys.readouterr().err
    assert main([*words, "--degrees", "tensor"]) == 64
    assert "'tensor' is not AXIS=VALUES, such as tensor=4,8" in capsys.readouterr().err


def test_what_is_no_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"vocab_size": 50257}))
    assert main(["plan", "--hf", str(config), *OPTIONS]) == 65
    assert "has no 'model_type'" in capsys.readouterr().err
    assert main(["plan", "--hf", str(config), "--example", "gpt2-small", *OPTIONS]) == 64
    assert "either --example or --hf, not both" in capsys.readouterr().err
