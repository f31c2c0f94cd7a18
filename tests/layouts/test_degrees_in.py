"""Layouts that are read with their degrees: the plan, the model from the flags, what is asked for, recipes by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from layout_texts import profile_said

from penstock.cli.main import main
from penstock.examples import catalogue
from penstock.layouts.megatron.irrelevant_flags import IRRELEVANT
from penstock.layouts.megatron.names import READ
from penstock.layouts.megatron.other_flags import CHANGING, HARMLESS
from penstock.planning.inputs import find_shape
from penstock.questions.by_name import import_layout
from penstock.questions.layouts import plan_file
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest
from penstock.schemas.errors import InvalidDocument, PenstockError, UnsupportedRequest
from penstock.schemas.plan import Plan
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.shapes.profiles import profile_of

LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 14336 --seq-length 8192 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 128256 --hidden-dropout 0"
)
EXPERTS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --vocab-size 32000 --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 512 --hidden-dropout 0"
)
RECIPES = """
from megatron.bridge import common

MICRO = 2


def _layout(ranks, chunks=None):
    return {(2, 1): [["embedding"] + ["decoder"] * 3, ["decoder"] * 5 + ["loss"]]}.get((ranks, chunks or 1))


def small_config():
    cfg = common()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 1
    cfg.train.global_batch_size = 16
    cfg.train.micro_batch_size = MICRO
    return cfg


def large_config():
    cfg = small_config()
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_layout = _layout(cfg.model.pipeline_model_parallel_size)
    cfg.ddp.use_distributed_optimizer = True
    return cfg
"""


def model(flags: str, **more: Any) -> ModelProfile:
    return profile_said("megatron", flags, "train.sh", ["H100"], compare=False, **more)


def judged(
    form: str, text: str, profile: ModelProfile, cluster: str = "1x8xH100", batch: int = 16, **more: Any
) -> LayoutImported:
    request = PlanRequest(
        schema_version=1, profile=profile, topology=catalogue.cluster(cluster), global_batch_size=batch
    )
    question = LayoutRequest(
        schema_version=1, format=form, layout=text, source="train.sh", request=request, compare=False, **more
    )
    return import_layout(question, workers=1)


def stages(result: LayoutImported) -> list[tuple[tuple[int, int], int]]:
    return [(stage.layers, len(stage.devices)) for stage in result.plan.pipelines[0].stages]


def test_the_model_of_the_flags_is_the_shipped_one() -> None:
    shape = model(LLAMA).shape
    assert shape is not None
    assert shape == find_shape("llama-3-8b", 8192).model_copy(update={"name": "train"})


def test_experts_and_latent_attention_are_read_with_megatrons_defaults() -> None:
    latent = "--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 64 --v-head-dim 64"
    dense = "--moe-layer-freq ([0]*2+[1]*6) --moe-shared-expert-intermediate-size 256 --ffn-hidden-size 2048"
    shape = model(f"{EXPERTS} {latent} {dense}").shape
    assert shape is not None
    assert shape.experts is not None
    assert shape.latent is not None
    assert (shape.experts.dense_layers, shape.experts.shared_ffn, shape.experts.ffn) == (2, 256, 512)
    assert (shape.latent.rotary_width, shape.head_width, shape.ffn) == (64, 128, 2048)
    gpt = model("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 1000").shape
    assert gpt is not None
    assert (gpt.ffn, gpt.gated, gpt.norm, gpt.positions, gpt.attention_biases, gpt.tied, gpt.dropout) == (
        256, False, "layer", 128, "all", True, 0.1)  # fmt: skip
    with pytest.raises(UnsupportedRequest, match="puts dense layers after"):
        model(f"{EXPERTS} --moe-layer-freq 2")


def test_what_the_flags_do_not_say_of_the_model_is_asked_for_at_once() -> None:
    flags = "--num-layers 8 --num-attention-heads 16 --hidden-size $H"
    with pytest.raises(InvalidDocument, match="--given H=…"):
        model(flags)
    with pytest.raises(InvalidDocument, match="no --seq-length, --vocab-size"):
        model(flags, values={"H": "1024"})
    shape = model(flags, values={"H": "1024", "seq-length": "512", "vocab-size": "1000"}).shape
    assert shape is not None
    assert (shape.hidden, shape.sequence_length) == (1024, 512)
    with pytest.raises(InvalidDocument, match="no variable or flag 'HH'"):
        model(flags, values={"HH": "1024"})


BOTH = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 "
    "--use-distributed-optimizer --overlap-grad-reduce --bf16"
)


def test_degrees_are_those_of_the_plan() -> None:
    text = f"torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py {LLAMA} {BOTH} --global-batch-size 16"
    result = judged("megatron", text, model(text))
    assert result.plan.degrees is not None
    assert result.plan.degrees.tensor == 2
    assert stages(result) == [((0, 16), 4), ((17, 33), 4)]
    assert result.plan.pipelines[0].stages[0].devices == ("node0/0", "node0/1", "node0/2", "node0/3")
    assert result.plan.num_micro_batches == 8
    assert not any("flags start" in each for each in result.assumptions)
    assert not result.faults
    Plan.model_validate(plan_file(result).plan.model_dump())
    whole = judged("megatron", text.replace("--use-distributed-optimizer ", ""), model(text))
    assert result.plan.prediction is not None
    assert whole.plan.prediction is not None
    assert result.plan.prediction.peak_memory_bytes < whole.plan.prediction.peak_memory_bytes


def test_a_layout_without_degrees_is_judged_at_1_and_compared_with_all_that_a_request_leaves_open() -> None:
    request = PlanRequest(
        profile=catalogue.profile("gpt"),
        topology=catalogue.cluster("1x2xV100"),
        global_batch_size=16,
        degrees="auto",
        sharding="auto",
        termination={"effort": "quick"},
    )
    question = LayoutRequest(format="megatron", layout="Et*4|t*4L", request=request)
    answer = import_layout(question, workers=1)
    assert answer.plan.degrees is None
    assert len(stages(answer)) == 2
    assert next(one.scope for one in answer.plan.certificates) == "all plans of this request"
    assert {one.choice for one in answer.rivals} == {
        "plain layout of megatron at any degrees",
        "within what megatron can express at any degrees",
        "without limits",
    }


def test_modules_that_are_recomputed_take_time_and_free_memory() -> None:
    text = f"{LLAMA} {BOTH} --recompute-granularity selective --recompute-modules core_attn mlp \\\n --lr 1"
    profile = model(text)
    again = judged("megatron", text, profile)
    plain = judged("megatron", text.replace(" core_attn mlp", " core_attn"), profile)
    assert again.plan.prediction is not None
    assert plain.plan.prediction is not None
    assert again.plan.prediction.time_per_global_batch_ns > plain.plan.prediction.time_per_global_batch_ns
    with pytest.raises(InvalidDocument, match="has 'mlps', which is not one of core_attn"):
        judged("megatron", text.replace(" mlp ", " mlps "), profile)


def test_experts_spread_over_replicas() -> None:
    text = f"{EXPERTS} --expert-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 1"
    result = judged("megatron", text, model(text))
    assert result.plan.degrees is not None
    assert (result.plan.degrees.expert, result.plan.degrees.expert_tensor, result.plan.num_micro_batches) == (4, 1, 4)
    degrees = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"
    text = f"{EXPERTS} {degrees} --pipeline-model-parallel-size 2 --micro-batch-size 1"
    profile = model(text)
    both = judged("megatron", text, profile)
    assert both.plan.degrees is not None
    assert both.plan.degrees.expert_tensor == 2
    with pytest.raises(UnsupportedRequest, match="need sequence parallelism"):
        judged("megatron", text.replace("--sequence-parallel ", ""), profile)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 3, and no trainer has such a layout"),
        ("--expert-model-parallel-size 2", "expert 2: train has no experts"),
        ("--context-parallel-size 8", "the profile 'train' has no costs at context 8"),
    ],
)
def test_degrees_that_cannot_be_are_refused_with_flag_and_place(flags: str, words: str) -> None:
    text = f"{LLAMA} --micro-batch-size 1\\\n {flags}"
    with pytest.raises(PenstockError) as caught:
        judged("megatron", text, model(LLAMA))
    assert words in str(caught.value)
    assert "train.sh has" in str(caught.value)
    assert caught.value.faults[0].pointer.startswith("line 2, column ")


def test_open_values_are_asked_for_at_once_and_given() -> None:
    text = f"{LLAMA} --pipeline-model-parallel-size $PP --tensor-model-parallel-size ${{TP}} --micro-batch-size $MBS"
    profile = model(LLAMA + " --tensor-model-parallel-size 2")
    with pytest.raises(InvalidDocument, match="has 2 faults") as caught:
        judged("megatron", text, profile)
    assert "--given PP=… --given TP=…" in str(caught.value.remedy)
    result = judged("megatron", text, profile, values={"PP": "2", "TP": "2"})
    assert any("--micro-batch-size $MBS, line 1" in each and "not read" in each for each in result.assumptions)
    assert len(stages(result)) == 2


@pytest.mark.tier("ci")
def test_the_command_needs_no_model_where_the_flags_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"{LLAMA} {BOTH.replace('parallel-size 2 --sequence', 'parallel-size $PP --sequence')}")
    command = ["import", "layout", str(script), "--from", "megatron", "--cluster", "1x8xH100", "-b", "16", "--alone"]
    assert main(command) == 65
    assert "--given PP=" in capsys.readouterr().err
    assert main([*command, "--given", "PP=2", "-o", str(tmp_path / "plan.json")]) == 0
    assert main(["verify", str(tmp_path / "plan.json")]) == 0
    assert main([*command, "--given", "PP"]) == 64
    shipped = [*command, "--example", "llama-3-8b", "--given", "PP=2", "--json"]
    capsys.readouterr()
    assert main(shipped) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["degrees"]["tensor"] == 2


def test_every_flag_is_in_one_class() -> None:
    assert not READ & CHANGING.keys()
    assert not IRRELEVANT & (READ | CHANGING.keys())
    assert HARMLESS.keys() <= CHANGING.keys()
    result = judged("megatron", f"{LLAMA} --save-interval 3 --no-save-optim --frobnicate 2 --fp8 e4m3", model(LLAMA))
    (unknown,) = [each for each in result.assumptions if each.startswith("no flags of Megatron's")]
    assert unknown.endswith(": --frobnicate")
    (changing,) = [each for each in result.assumptions if each.startswith("not understood")]
    assert changing.endswith("--fp8 (matrix products in 8 bits)")


def test_recipes_are_read_by_name() -> None:
    profile = model(EXPERTS.partition("--num-experts")[0] + " --tensor-model-parallel-size 2")
    with pytest.raises(InvalidDocument, match="has 2 configurations: small_config, large_config") as caught:
        judged("megatron", RECIPES, profile)
    assert "--config small_config" in str(caught.value.remedy)
    result = judged("megatron", RECIPES, profile, config="large_config")
    assert stages(result) == [((0, 3), 4), ((4, 9), 4)]
    assert result.plan.num_micro_batches == 4
    assert result.request.memory.optimizer_sharding == "over_replicas"
    assert any("not read" in each and "common()" in each for each in result.assumptions)
    assert [layers for layers, _devices in stages(judged("megatron", RECIPES, profile, config="small_config"))] == [
        (0, 9)
    ]
    with pytest.raises(InvalidDocument, match="did you mean 'large_config'"):
        judged("megatron", RECIPES, profile, config="larg_config")
    elsewhere = RECIPES + "\n\ndef other_config():\n    return common()\n"
    with pytest.raises(
        InvalidDocument, match=r"other_config sets neither degrees .* other files set them \(it is made by common"
    ):
        judged("megatron", elsewhere, profile, config="other_config")
    computed = RECIPES.replace("_layout(cfg.model.pipeline_model_parallel_size)", "common.layout(2)")
    with pytest.raises(InvalidDocument, match=r"it is computed, common.layout\(\)"):
        judged("megatron", computed, profile, config="large_config")


def test_lists_and_texts_that_a_recipe_makes_are_read() -> None:
    profile = model(EXPERTS.partition("--num-experts")[0] + " --tensor-model-parallel-size 2")
    for expression in (
        '[list(each) for each in [["embedding"] + ["decoder"] * 3, ["decoder"] * 5 + ["loss"]] if each]',
        '"|".join(["Et*3", "t*5L"])',
    ):
        text = RECIPES.replace("_layout(cfg.model.pipeline_model_parallel_size)", expression)
        assert stages(judged("megatron", text, profile, config="large_config")) == [((0, 3), 4), ((4, 9), 4)]


def test_recomputed_modules_of_layers_that_are_not_modelled_are_named() -> None:
    flags = f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 16"
    flags += " --recompute-granularity selective --recompute-modules mhc moe_act"
    result = judged("megatron", flags, model(flags))
    assert any("judged as if absent: mhc" in each for each in result.assumptions)
    assert result.plan.pipelines[0].stages[0].recompute.modules == ("moe_act",)  # type: ignore[union-attr]
    with pytest.raises(InvalidDocument, match="has 'moe_atc', which is not one of"):
        judged("megatron", flags.replace("moe_act", "moe_atc"), model(EXPERTS))


TITAN = """
from torchtitan.trainer import Trainer


def debug() -> Trainer.Config:
    return Trainer.Config(
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 2048, max_context_length=2048),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=1),
        activation_checkpoint=FullAC.Config(),
    )


def deep() -> Trainer.Config:
    config = debug()
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.num_pp_microbatches = 4
    config.activation_checkpoint = None
    return config
"""


def test_torchtitans_configurations_are_read_by_name_and_count_tokens() -> None:
    shape = model(EXPERTS.partition("--num-experts")[0]).shape
    assert shape is not None
    profile = profile_of(shape, "torch", ["H100"], micro_batch_sizes=(1, 2))
    with pytest.raises(InvalidDocument, match="has 2 configurations: debug, deep"):
        judged("torchtitan", TITAN, profile)
    result = judged("torchtitan", TITAN, profile, config="deep")
    assert result.plan.degrees is not None
    assert result.plan.degrees.tensor == 2
    assert (len(stages(result)), result.plan.num_micro_batches) == (2, 4)
    assert result.plan.pipelines[0].stages[0].recompute == "none"
    debug = judged("torchtitan", TITAN, profile, config="debug")
    assert (len(stages(debug)), debug.plan.num_micro_batches) == (1, 2)
    assert debug.plan.pipelines[0].stages[0].recompute != "none"


def test_deepspeeds_configurations_need_no_pipeline_and_templates_say_their_names() -> None:
    profile = catalogue.profile("gpt2-small")
    zero = '{"stage": 3, "offload_optimizer": {"device": "cpu"}}'
    text = f'{{"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {zero}}}'
    with pytest.raises(InvalidDocument, match="names in the place of values: MICRO"):
        judged("deepspeed", text, profile, "1x4xA100")
    result = judged("deepspeed", text, profile, "1x4xA100", values={"MICRO": "2"})
    assert (len(stages(result)), result.plan.num_micro_batches) == (1, 2)
    assert result.plan.sharding == "parameters"
    assert not any("counted whole" in each for each in result.assumptions)
    assert any("on the host" in each for each in result.assumptions)
    with pytest.raises(InvalidDocument, match="stage is 2; PipelineModule takes 0 or 1"):
        judged("deepspeed", '{"num_stages": 2, "zero_optimization": {"stage": 2}}', profile, "1x4xA100")
