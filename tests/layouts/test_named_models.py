"""The model that a torchtitan configuration names, and what its degrees shard."""

from __future__ import annotations

import pytest
from layout_texts import profile_said

from penstock.examples import catalogue
from penstock.layouts.torchtitan.models import FLAVORS
from penstock.questions.by_name import import_layout
from penstock.schemas.api.layouts import LayoutRequest
from penstock.schemas.errors import InvalidDocument, PenstockError, UnsupportedRequest
from penstock.schemas.request import PlanRequest

TOML = """[model]
name = "{name}"
flavor = "{flavor}"
[training]
global_batch_size = 8
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
"""
PYTHON = """from torchtitan.trainer import Trainer
from . import model_registry
from .model import {model}

def small() -> Trainer.Config:
    spec = model_registry("{flavor}", attn_backend="flex")
    return Trainer.Config(
        model_spec=spec,
        training=TrainingConfig(local_batch_size=1, seq_len=4096),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
    )

def large():
    config = small()
    config.model_spec = model_registry("70B")
    return config
"""


def named_shape(text: str, **more: object) -> tuple[str, int, int]:
    """Name, transformer layers and tokens of a sample of the profile that a configuration makes."""
    profile = profile_said("torchtitan", text, "train", ["H100"], compare=False, **more)  # type: ignore[arg-type]
    assert profile.shape is not None
    assert profile.framework == "torch"
    assert {each.degrees.tensor for each in profile.variants or ()} == {2}
    return profile.shape.name, profile.shape.layers, profile.shape.sequence_length


def test_a_configuration_of_either_release_names_its_model() -> None:
    assert named_shape(TOML.format(name="llama3", flavor="8B_flex")) == ("llama3-8B", 32, 4096)
    assert named_shape(TOML.format(name="qwen3", flavor="0.6B")) == ("qwen3-0.6B", 28, 4096)
    python = PYTHON.format(model="Llama3Model", flavor="8B")
    assert named_shape(python, config="small") == ("llama3-8B", 32, 4096)
    assert named_shape(python, config="large") == ("llama3-70B", 80, 4096)
    oss = PYTHON.format(model="GptOssModel", flavor="20b")
    assert named_shape(oss, config="small") == ("gpt_oss-20b", 24, 4096)
    flags = "--model.name llama3 --model.flavor 8B --training.seq_len 4096 --parallelism.tensor_parallel_degree 2"
    assert named_shape(flags) == ("llama3-8B", 32, 4096)
    overrides = {"model.name": "llama3", "model.flavor": "8B"}
    bare = TOML.partition("[training]")[2]
    assert named_shape(f"[training]{bare}", values=overrides) == ("llama3-8B", 32, 4096)


def test_a_family_is_not_taken_for_another_one() -> None:
    """Names begin alike, and a file may import several families."""
    python = PYTHON.format(model="Model", flavor="4B")
    assert named_shape(python.replace("def small", "def qwen3_small"), config="qwen3_small") == ("qwen3-4B", 36, 4096)
    vision = python.replace("def small", "def qwen3_vl_small").replace("= small", "= qwen3_vl_small")
    with pytest.raises(InvalidDocument, match="model qwen3_vl 4B is unknown"):
        named_shape(vision, config="qwen3_vl_small")
    several = "from torchtitan.models.qwen3 import a\nfrom torchtitan.models.gpt_oss import b\n" + python
    with pytest.raises(InvalidDocument, match=r"it has no model\.name"):
        named_shape(several, config="small")
    assert named_shape(several, config="small", values={"model.name": "qwen3"}) == ("qwen3-4B", 36, 4096)
    fused = python.replace('"4B"', '"8B_flex_flash"')
    assert named_shape(fused.replace("Model\n", "Qwen3Model\n"), config="small") == ("qwen3-8B", 36, 4096)


def test_without_a_length_a_sample_has_torchtitans_own() -> None:
    text = TOML.format(name="llama3", flavor="8B").replace("seq_len = 4096\n", "")
    assert named_shape(text)[2] == 2048


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            TOML.format(name="llama3", flavor="9B"),
            "train, line 3: torchtitan's model llama3 9B is unknown; .* 8B, 70B, 405B",
        ),
        (
            TOML.format(name="llama9", flavor="8B"),
            "line 3: torchtitan's model llama9 8B is unknown; known are llama3, qwen3, ",
        ),
        (TOML.format(name="llama4", flavor="17bx16e"), "line 3: llama4 17bx16e has layers of several kinds"),
        (TOML.replace('flavor = "{flavor}"', "").format(name="llama3"), "train does not say the model: .*model.flavor"),
        (PYTHON.format(model="Model", flavor="8B"), "train does not say the model: it has no model.name"),
    ],
)
def test_a_model_that_is_not_known_is_refused(text: str, why: str) -> None:
    with pytest.raises((InvalidDocument, UnsupportedRequest), match=why):
        named_shape(text, config="small" if text.startswith("from") else None)


def test_a_profile_that_contradicts_the_model_is_refused() -> None:
    request = PlanRequest(
        profile=catalogue.profile("llama-3-70b"), topology=catalogue.cluster("1x8xH100"), global_batch_size=8
    )
    text = TOML.format(name="llama3", flavor="8B").replace("4096", "8192")
    with pytest.raises(PenstockError) as caught:
        import_layout(LayoutRequest(format="torchtitan", layout=text, request=request, compare=False), workers=1)
    sentences = [f"{fault.pointer}: {fault.detail}" for fault in caught.value.faults]
    assert "line 3: model.flavor 8B of llama3 has hidden 4096; the profile has 8192" in sentences
    assert "line 3: model.flavor 8B of llama3 has 32 layers; the profile has 80" in sentences


@pytest.mark.parametrize(
    ("pipeline", "sharding", "memory"), [(1, "parameters", "over_replicas"), (2, None, "over_replicas")]
)
def test_gpus_that_share_a_sequence_share_out_states_too(pipeline: int, sharding: str | None, memory: str) -> None:
    """FSDP's groups are sharding × context, whatever the degree of sharding is."""
    text = TOML.format(name="llama3", flavor="8B") + (
        f"context_parallel_degree = 4\ndata_parallel_shard_degree = 1\npipeline_parallel_degree = {pipeline}\n"
    )
    cluster = catalogue.cluster(f"{pipeline}x8xH100")
    request = PlanRequest(
        profile=profile_said("torchtitan", text, "train", ["H100"], compare=False),
        topology=cluster,
        global_batch_size=8,
    )
    result = import_layout(LayoutRequest(format="torchtitan", layout=text, request=request, compare=False), workers=1)
    assert any("4 GPUs that share a sequence" in each for each in result.assumptions)
    assert result.request.memory.optimizer_sharding == memory
    assert result.plan.sharding == sharding
    plain = text.replace("context_parallel_degree = 4", "context_parallel_degree = 1").replace(
        "shard_degree = 1", "shard_degree = 1\ndata_parallel_replicate_degree = 4"
    )
    whole = request.model_copy(update={"profile": profile_said("torchtitan", plain, "t", ["H100"], compare=False)})
    bare = import_layout(LayoutRequest(format="torchtitan", layout=plain, request=whole, compare=False), workers=1)
    assert (bare.request.memory.optimizer_sharding, bare.plan.sharding) == ("none", None)


def test_every_flavor_has_a_shape_of_its_own() -> None:
    shapes = [shape for flavors in FLAVORS.values() for shape in flavors.values()]
    assert len({shape.name for shape in shapes}) == len(shapes) >= 20
