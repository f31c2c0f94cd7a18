"""Megatron-Bridge's recipes: a plan as a Python function that changes a ``ConfigContainer``.

.. [1] Megatron-Bridge 0.3, ``training/config.py`` (ConfigContainer), ``recipes/``.
"""

from __future__ import annotations

from typing import Any

from penstock.layouts.drawn import Expressed
from penstock.layouts.megatron.cuts import FIRST, LAST, MTP, STAGES, WITH_EMBEDDING, WITH_LOSS
from penstock.layouts.megatron.names import CONTEXT, EXPERT, EXPERT_TENSOR, GROUP, LAYOUT, RANKS, TENSOR
from penstock.layouts.megatron.written import flags_of

_DOCUMENTED = """
For Megatron-Bridge 0.3. Import ``planned`` next to a recipe and hand it the recipe's configuration:

    config = planned(llama3_70b_pretrain_config())
"""
SETTINGS: dict[str, tuple[str, Any]] = {
    TENSOR: ("model.tensor_model_parallel_size", 1),
    "sequence-parallel": ("model.sequence_parallel", False),
    CONTEXT: ("model.context_parallel_size", 1),
    "cp-comm-type": ("model.cp_comm_type", None),
    EXPERT: ("model.expert_model_parallel_size", 1),
    EXPERT_TENSOR: ("model.expert_tensor_parallel_size", 1),
    RANKS: ("model.pipeline_model_parallel_size", 1),
    LAYOUT: ("model.pipeline_model_parallel_layout", None),
    STAGES: ("model.virtual_pipeline_model_parallel_size", None),
    GROUP: ("model.microbatch_group_size_per_vp_stage", None),
    FIRST: ("model.num_layers_in_first_pipeline_stage", None),
    LAST: ("model.num_layers_in_last_pipeline_stage", None),
    WITH_EMBEDDING: ("model.account_for_embedding_in_pipeline_split", False),
    WITH_LOSS: ("model.account_for_loss_in_pipeline_split", False),
    "recompute-granularity": ("model.recompute_granularity", None),
    "recompute-method": ("model.recompute_method", None),
    "recompute-num-layers": ("model.recompute_num_layers", None),
    "recompute-modules": ("model.recompute_modules", None),
    "micro-batch-size": ("train.micro_batch_size", None),
    "global-batch-size": ("train.global_batch_size", None),
    "use-distributed-optimizer": ("ddp.use_distributed_optimizer", False),
    "overlap-grad-reduce": ("ddp.overlap_grad_reduce", False),
    "overlap-param-gather": ("ddp.overlap_param_gather", False),
    "use-megatron-fsdp": ("ddp.use_megatron_fsdp", False),
    "data-parallel-sharding-strategy": ("ddp.data_parallel_sharding_strategy", "no_shard"),
    "accumulate-allreduce-grads-in-fp32": ("ddp.grad_reduce_in_fp32", False),
}
"""The attribute of each flag, and its value where a plan lacks the flag; else a recipe's own would stay."""
OF_EXPERTS = {
    "moe-token-dispatcher-type": "model.moe_token_dispatcher_type",
    "moe-grouped-gemm": "model.moe_grouped_gemm",
    "moe-expert-capacity-factor": "model.moe_expert_capacity_factor",
    "moe-pad-expert-input-to-capacity": "model.moe_pad_expert_input_to_capacity",
}
"""The attributes of flags that only models with experts have."""
_DEGREES = (TENSOR, "sequence-parallel", CONTEXT, "cp-comm-type", EXPERT, EXPERT_TENSOR)
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def write(plan: Expressed) -> str:
    """Return a module with one function, ``planned``, that sets the layout in a recipe's configuration."""
    assert plan.roles is not None
    title, *more = [line.replace("\\", "/").replace('"', "'") for line in plan.remarks()]
    lines = [f'"""{title}', "", *more, _DOCUMENTED + '"""', "", "import torch", "", ""]
    lines += [
        "def planned(config):",
        '    """The configuration with the layout of the plan; it is changed in place."""',
    ]
    lines += _check(plan.roles.number, plan.roles.mtp)
    lines += [f"    config.{name} = {value!r}" for name, value in settings_of(plan).items()]
    lines.append(f"    config.model.pipeline_dtype = torch.{_DTYPES[plan.profile.parameter_dtype]}")
    lines += [
        "    if config.optimizer is not None:",
        f"        config.optimizer.use_distributed_optimizer = {plan.shard_states}",
        "    if config.comm_overlap is not None:  # it would set these again",
        f"        config.comm_overlap.overlap_grad_reduce = {plan.overlap}",
        f"        config.comm_overlap.overlap_param_gather = {plan.overlap and plan.shard_states}",
        "    return config",
        "",
    ]
    return "\n".join(lines)


def settings_of(plan: Expressed) -> dict[str, Any]:
    """Return the attributes of the configuration with their values."""
    flags = {flag.name: list(flag.value) if isinstance(flag.value, tuple) else flag.value for flag in flags_of(plan)}
    if plan.chunks > 1:
        flags[STAGES] = plan.chunks
    settings = {name: attribute for name, attribute in SETTINGS.items() if plan.gpus == 1 or name not in _DEGREES}
    values = {attribute: flags.get(name, otherwise) for name, (attribute, otherwise) in settings.items()}
    return values | {attribute: flags[name] for name, attribute in OF_EXPERTS.items() if name in flags}


def _check(layers: int, mtp: int) -> list[str]:
    """Return lines that refuse a recipe of another model where it is changed, not where Megatron builds it."""
    return [
        f"    if (config.model.num_layers, config.model.mtp_num_layers or 0) != ({layers}, {mtp}):",
        f'        raise ValueError(f"the plan has {layers} layers, the recipe {{config.model.num_layers}}'
        f'; with {mtp} of {MTP.removesuffix("-num-layers")}, the recipe {{config.model.mtp_num_layers or 0}}")',
    ]
