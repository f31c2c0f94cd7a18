"""Jobs of Hugging Face configurations that ranks train, against the library's own whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.cli.main import main
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import load_job
from penstock.schemas.errors import InvalidDocument, ModelMismatch

TINY = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "mistral": {**TINY, "sliding_window": 5},
    "mixtral": {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3": {**TINY, "head_dim": 16},
}
LENGTH = 16
ROWS = range(3)


def written(directory: Path, family: str, **more: Any) -> str:
    """Write a config.json of this family; return the reference of its job."""
    values = {"model_type": family, **FAMILIES.get(family, TINY), **more}
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return f"hf:config.json@{LENGTH}"


def whole_name(layer: str, name: str) -> str:
    """Return the library's name, in its whole model, for parameter ``name`` of one of our layers."""
    if layer == "embedding":
        return name.replace("base.", "model.", 1)
    if layer == "head":
        return name.replace("norm.", "model.norm.", 1) if name.startswith("norm.") else name
    return name.replace("base.layers.0.", f"model.layers.{layer.removeprefix('block.')}.", 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_compute_what_the_librarys_whole_model_does(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    job = load_job(written(tmp_path, family), tmp_path)
    chain = Chain(job)
    layers = [chain.build_layer(i) for i in range(len(chain.specs))]
    values = {"model_type": family, **FAMILIES[family]}
    whole: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), attn_implementation="eager")
    expected_parameters = dict(whole.named_parameters())
    with torch.no_grad():
        for spec, layer in zip(chain.specs, layers, strict=True):
            for name, parameter in layer.named_parameters():
                expected_parameters.pop(whole_name(spec.name, name)).copy_(parameter)
    assert not expected_parameters
    inputs, targets = job.batch(0, ROWS)
    assert inputs["x"].unique().numel() > LENGTH
    x = inputs["x"]
    for layer in layers:
        x = layer(x)
    loss, count = job.loss({"x": x}, targets)
    expected = functional.cross_entropy(
        whole(input_ids=inputs["x"], use_cache=False).logits.flatten(0, 1), targets.flatten()
    )
    assert float(loss.detach()) / count == pytest.approx(float(expected.detach()), rel=1e-6)


def test_soft_caps_of_attention_are_not_trained(tmp_path: Path) -> None:
    job = load_job(written(tmp_path, "gemma2", head_dim=8), tmp_path)
    with pytest.raises(ModelMismatch, match=r"Gemma2Attention caps its scores, which Penstock cannot train"):
        Chain(job).infer_shapes(range(1))


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("reference", "text", "why"),
    [
        ("hf:config.json", None, "cannot read the configuration 'config.json'"),
        ("hf:config.json", "[1]", "holds list, not the object of a config.json"),
        ("hf:config.json@long", "{}", "has the sequence length 'long'"),
        ("hf:config.json", '{"model_type": "vit"}', "cannot build a causal language model"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, reference: str, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidDocument, match=why):
        load_job(reference, tmp_path)


def test_a_run_has_one_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(tmp_path / "config.json")
    assert main(["run", "plan.json", "--job", "a:b", "--hf", config]) == 64
    assert "Invalid value for --job: not with --hf" in capsys.readouterr().err
    assert main(["run", "plan.json"]) == 64
    assert "MODULE:ATTRIBUTE of a training job, or --hf" in capsys.readouterr().err
    assert main(["run", "plan.json", "--server", "http://x", "--hf", config]) == 64
    assert "agents know jobs by keys" in capsys.readouterr().err
