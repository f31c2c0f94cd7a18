"""Configurations as trainers print them in their logs: each is read as the file that it came from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from layout_texts import parsed, profile_said
from test_trainers import imported, stages_of

from penstock.layouts.megatron.flags import Flags
from penstock.schemas.errors import InvalidDocument

pytestmark = pytest.mark.tier("ci")

DEFAULTS: dict[str, Any] = {
    "add_bias_linear": True,
    "decoder_num_layers": None,
    "decoder_seq_length": None,
    "encoder_num_layers": 8,
    "encoder_seq_length": 64,
    "expert_model_parallel_size": 1,
    "fp8": None,
    "gradient_accumulation_fusion": True,
    "group_query_attention": False,
    "gtp_weight_remat_size": 1,
    "hybrid_attention_ratio": 0.0,
    "kv_lora_rank": 32,
    "moe_flex_dispatcher_backend": "deepep",
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "multi_latent_attention": False,
    "num_experts": None,
    "num_layers": 8,
    "num_query_groups": 1,
    "optimizer": "adam",
    "overlap_p2p_comm": False,
    "recompute_granularity": None,
    "recompute_modules": ["core_attn"],
    "seq_length": 64,
    "tensor_model_parallel_size": 1,
    "tensor_parallel_num_weight_shards": 1,
    "use_distributed_optimizer": False,
    "virtual_pipeline_model_parallel_size": None,
}
"""Some of the arguments that Megatron-LM prints, as validate_args leaves them: facts of its release of 2026."""
TWO_RANKS = {"pipeline_model_parallel_size": 2, "micro_batch_size": 2, "global_batch_size": 16}


def printed(mark: str = "", **arguments: Any) -> str:
    """Return Megatron's list of arguments, each line after a launcher's mark."""
    values = DEFAULTS | arguments
    listed = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    head, foot = f"{'-' * 24} arguments {'-' * 24}", f"{'-' * 20} end of arguments {'-' * 21}"
    return "\n".join(f"{mark}{line}" for line in ("using world size: 4", head, *listed, foot, "iteration 1/ 5"))


def script(**arguments: Any) -> str:
    """Return the flags that say the same."""
    flags = (f"--{name.replace('_', '-')} {'' if value is True else value}" for name, value in arguments.items())
    return f"torchrun pretrain_gpt.py --num-layers 8 {' '.join(flags)}"


@pytest.mark.parametrize("mark", ["", "[default0]:", "0: "])
@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ({}, {}),
        ({"use_distributed_optimizer": True}, {"use_distributed_optimizer": True}),
        (
            {"num_layers_per_virtual_pipeline_stage": 2},
            {
                "num_layers_per_virtual_pipeline_stage": 2,
                "overlap_p2p_comm": True,
                "virtual_pipeline_model_parallel_size": 2,
            },
        ),
        ({"bf16": True}, {"bf16": True, "accumulate_allreduce_grads_in_fp32": True}),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        ({"pipeline_model_parallel_layout": "Et*4|t*4L"}, {"pipeline_model_parallel_layout": "Et*4|t*4L"}),
    ],
)
def test_megatrons_arguments_are_read_as_its_flags(mark: str, flags: dict[str, Any], arguments: dict[str, Any]) -> None:
    log = printed(mark, **TWO_RANKS, **arguments)
    mine, theirs = imported("megatron", log), imported("megatron", script(**TWO_RANKS, **flags))
    assert mine.plan.pipelines == theirs.plan.pipelines
    assert mine.plan.prediction == theirs.plan.prediction
    assert mine.request.memory == theirs.request.memory
    (remark,) = set(mine.assumptions) - set(theirs.assumptions)
    assert remark == "read from the arguments that Megatron printed, its defaults among them"
    assert parsed("megatron", log).batch() == 16


def test_the_model_of_a_log_is_that_of_its_script() -> None:
    """Latent attention, and experts after one dense layer."""
    latent = {"multi_latent_attention": True, "q_lora_rank": 96, "kv_lora_rank": 64}
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 512, "vocab_size": 1000}
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "expert_model_parallel_size": 2}
    arguments = {**TWO_RANKS, **sizes, **latent, **experts, "seq_length": 64, "tensor_model_parallel_size": 2}
    log = printed(**arguments, moe_layer_freq=[0, 1, 1, 1, 1, 1, 1, 1], moe_token_dispatcher_type="alltoall")
    flags = script(**arguments, moe_layer_freq="[0,1,1,1,1,1,1,1]")
    assert parsed("megatron", log, "run.log").degrees() == parsed("megatron", flags, "run.log").degrees()
    profiles = [profile_said("megatron", text, "train.sh", ["H100"], compare=False) for text in (log, flags)]
    assert profiles[0].shape == profiles[1].shape is not None


def test_what_megatron_was_not_told_is_settled_by_its_defaults() -> None:
    """A script without a dispatcher has the all-gather, which is not what plans are judged with."""
    assert Flags(printed(**TWO_RANKS, num_experts=8), "run.log").changing() == ["moe-token-dispatcher-type"]
    assert Flags(printed(**TWO_RANKS), "run.log").changing() == []
    assert Flags(printed(**TWO_RANKS, tensor_parallel_num_weight_shards=2), "run.log").changing() != []


def test_of_several_starts_the_last_one_counts_and_faults_name_its_line() -> None:
    first, second = printed(**TWO_RANKS), printed(**{**TWO_RANKS, "pipeline_model_parallel_size": 4})
    assert len(stages_of(imported("megatron", f"{first}\n{second}"))) == 4
    wrong = printed(**{**TWO_RANKS, "pipeline_model_parallel_size": "two"})
    line = next(n for n, text in enumerate(f"{first}\n{wrong}".splitlines(), 1) if text.endswith(" two"))
    with pytest.raises(InvalidDocument, match=f"line {line}, "):
        imported("megatron", f"{first}\n{wrong}")


def test_torchtitans_configuration_in_a_log() -> None:
    config = {"parallelism": {"pipeline_parallel_degree": 2}, "training": {"local_batch_size": 8}, "debug": {"seed": 1}}
    head = "[titan] 2026-11-28 10:00:00,000 - root - INFO - Running with configs: "
    lines = f"{head}{json.dumps(config, indent=2)}".splitlines()
    log = "\n".join(f"[rank0]:{line}" for line in ["starting", *lines, "[titan] step:  1  loss: 8.1"])
    mine, theirs = (imported("torchtitan", text) for text in (log, json.dumps(config)))
    assert mine.plan.pipelines == theirs.plan.pipelines
    assert mine.assumptions == theirs.assumptions


def test_deepspeeds_configuration_in_a_log() -> None:
    config = {"train_batch_size": 16, "pipeline": {"stages": 2, "partition": "uniform"}}
    text = json.dumps(config, indent=4, separators=(",", ":"))
    log = f"[INFO] [config.py:1000:print]   optimizer_name ...... adam\n[INFO] [config.py:986:print]   json = {text}\n"
    assert stages_of(imported("deepspeed", log)) == stages_of(imported("deepspeed", text)) == [(0, 4), (5, 9)]
    assert parsed("deepspeed", log).batch() == 16
    with pytest.raises(InvalidDocument):
        imported("deepspeed", log.replace("}\n", "\n"))
