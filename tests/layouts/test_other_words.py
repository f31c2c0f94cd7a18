"""Words of NeMo for Megatron's flags, and flags of other trainers that grew out of Megatron-LM."""

from __future__ import annotations

from typing import Any

import pytest
from layout_texts import parsed, profile_said

from penstock.examples import catalogue
from penstock.layouts.megatron.flags import Flags
from penstock.layouts.megatron.model import shape_said
from penstock.questions.by_name import import_layout
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.shapes.parameters import total

NEMO = """
trainer: {odd_parallel_setting: 3}
model:
  micro_batch_size: 1
  global_batch_size: 16
  tensor_model_parallel_size: 2
  num_layers: 4
  hidden_size: 512
  ffn_hidden_size: 1536
  num_attention_heads: 8
  encoder_seq_length: 256
  position_embedding_type: rope
  normalization: rmsnorm
  bias: False
  activation: fast-swiglu
  share_embeddings_and_output_weights: False
  vocab_size: 1024
  megatron_amp_O2: True
  odd_parallel_setting: 3
  optim: {name: distributed_fused_adam, overlap_grad_sync: true, grad_sync_dtype: bf16}
"""
FLAGS = """
    --micro-batch-size 1 --global-batch-size 16 --num-layers 4 --hidden-size 512 --ffn-hidden-size 1536
    --num-attention-heads 8 --seq-length 256 --position-embedding-type rope --vocab-size 1024
"""


def judged(text: str, **values: str) -> LayoutImported:
    topology = catalogue.cluster("1x8xH100")
    profile = profile_said("megatron", text, "train", ["H100"], values=values, compare=False)
    question = {"schema_version": 1, "profile": profile, "topology": topology, "global_batch_size": 16}
    fields: dict[str, Any] = {"format": "megatron", "layout": text, "source": "train", "request": question}
    return import_layout(LayoutRequest.parse({"schema_version": 1, **fields, "compare": False, "values": values}))


def test_nemos_words_mean_megatrons_switches() -> None:
    shape = shape_said(Flags(NEMO, "nemo.yaml"), "nemo")
    assert (shape.gated, shape.attention_biases) == (True, "none")
    assert total(shape) == 2 * 1024 * 512 + 4 * (4 * 512**2 + 3 * 512 * 1536 + 2 * 512) + 512
    plain = NEMO.replace("fast-swiglu", "gelu").replace("distributed_fused_adam", "fused_adam")
    assert not shape_said(Flags(plain, "nemo.yaml"), "nemo").gated
    answer = judged(NEMO)
    assert "the model has 14.68 million parameters" in answer.sentences
    assert any(each.startswith("--use-distributed-optimizer") for each in answer.assumptions)
    assert answer.request.memory.gradient == "parameter"
    assert not any(each.startswith("--use-distributed-optimizer") for each in judged(plain).assumptions)


def test_unknown_settings_of_a_configuration_are_listed() -> None:
    (listed,) = [each for each in judged(NEMO).assumptions if each.startswith("no flags of Megatron's")]
    assert listed.endswith("by their names 1 of these may change the answer: odd_parallel_setting, megatron_amp_O2")
    manifest = "apiVersion: v1\nkind: Job\nspec: {args: ['--num-layers', '4', '--hidden-size=512']}\n"
    assert Flags(manifest, "job.yaml").unknown == ()
    assert Flags("model: &whole\n  odd: 1\n  again: *whole\n", "loop.yaml").unknown == ("odd",)


@pytest.mark.parametrize(
    ("flags", "named", "remedy"),
    [
        pytest.param(
            "--num-experts 8 --moe-expert-parallel-size 4 --expert-interval 2",
            ["--moe-expert-parallel-size 4", "--expert-interval 2"],
            "--given expert-model-parallel-size=… --given moe-layer-freq=…",
            id="experts",
        ),
        pytest.param(
            "--pp-partition-method 'type:transformer|embedding'",
            ["--pp-partition-method type:transformer|embedding"],
            "--given pipeline-model-parallel-layout=…",
            id="cut",
        ),
        pytest.param(
            "--zero-stage=$ZERO --ds-sequence-parallel-size 1",
            ["--zero-stage $ZERO"],
            "--given use-distributed-optimizer=…",
            id="sharding",
        ),
    ],
)
def test_flags_by_which_another_trainer_decides_the_layout_are_refused(
    flags: str, named: list[str], remedy: str
) -> None:
    with pytest.raises(UnsupportedRequest, match="a Megatron-DeepSpeed script") as caught:
        Flags(f"deepspeed pretrain_gpt.py --deepspeed {FLAGS} {flags}", "train.sh")
    assert [fault.detail for fault in caught.value.faults] == named
    assert all(fault.pointer.startswith("line ") for fault in caught.value.faults)
    assert remedy in str(caught.value.remedy)


def test_a_degree_of_one_is_none_also_by_a_variable() -> None:
    script = 'EP=1\nif [ $EP -gt 1 ]; then\n  MORE="--expert-interval 2"\nfi\n'
    flags = Flags(
        f"{script}deepspeed train.py --deepspeed {FLAGS} --moe-expert-parallel-size ${{EP}} $MORE", "train.sh"
    )
    assert flags.number("num-layers") == 4
    one = judged(f"{FLAGS} --num-experts 1")
    assert one.plan == judged(FLAGS).plan


def test_what_is_said_in_megatrons_words_is_read_and_the_trainer_is_named() -> None:
    text = (
        f"deepspeed train.py --deepspeed --deepspeed_config c.json --num-experts 8 --moe-expert-parallel-size 4 {FLAGS}"
    )
    answer = judged(text, **{"expert-model-parallel-size": "4"})
    assert answer.plan.degrees is not None
    assert answer.plan.degrees.expert == 4
    (sentence,) = [each for each in answer.assumptions if each.startswith("the script is Megatron-DeepSpeed's")]
    assert "(--deepspeed, --deepspeed-config)" in sentence
    assert not any(each.startswith("no flags of Megatron's") for each in answer.assumptions)
    launched = judged(f"cd /data && deepspeed train.py {FLAGS}").assumptions
    assert any(each.startswith("the script is Megatron-DeepSpeed's: its own flags and its") for each in launched)
    assert not any("Megatron-DeepSpeed" in each for each in judged(f"python deepspeed_train.py {FLAGS}").assumptions)


def test_how_tensors_of_experts_are_split_is_ignored_without_experts() -> None:
    dense = f"{FLAGS} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 4"
    assert parsed("megatron", dense, "train.sh").degrees().expert_tensor == 1
    assert judged(dense).plan.degrees is not None
    assert parsed("megatron", f"{dense} --num-experts 8", "train.sh").degrees().expert_tensor == 4
    assert parsed("megatron", dense, "train.sh").degrees(experts=True).expert_tensor == 4


@pytest.mark.parametrize(
    ("flags", "has_experts"),
    [
        ("--tensor-model-parallel-size 2", False),
        ("--expert-model-parallel-size 8", True),
        ("--tensor-model-parallel-size 2 --moe-grouped-gemm", True),
        ("--expert-model-parallel-size 8 --num-experts 8", False),
    ],
)
def test_a_model_in_another_file_is_asked_for_with_its_experts(flags: str, has_experts: bool) -> None:
    with pytest.raises(InvalidDocument) as caught:
        shape_said(Flags(f"source model.sh; train ${{MODEL[@]}} {flags}", "train.sh"), "train")
    assert ("--given num-experts=… --given moe-router-topk=…" in str(caught.value.remedy)) == has_experts


def test_sizes_that_a_recipe_hands_to_a_helper_are_read() -> None:
    text = """
from nemo.collections.llm.recipes.some_model import pretrain_recipe
from helpers import set_sizes

def recipe():
    tp_size = 2
    made = pretrain_recipe(performance_mode=True)
    made = set_sizes(made, "pre_train", num_nodes=1, mbs=1, gbs=128, tp_size=tp_size, pp_size=4, cp_size=1, vp_size=3)
    return made
"""
    flags = Flags(text, "recipe.py")
    numbers = {
        "tensor-model-parallel-size": 2,
        "pipeline-model-parallel-size": 4,
        "num-virtual-stages-per-pipeline-rank": 3,
        "micro-batch-size": 1,
        "global-batch-size": 128,
    }
    assert {name: flags.number(name) for name in numbers} == numbers
    assert flags.on("use-distributed-optimizer")
    assert any("recipes of NeMo set use_distributed_optimizer" in each for each in flags.remarks())
