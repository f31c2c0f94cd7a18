"""A plan as Megatron-Core's flags, in the order of their names in a file; ``bridge`` has the same as attributes.

.. [1] Megatron-Core, ``model_parallel_config.py``, ``transformer/transformer_config.py``,
   ``distributed/distributed_data_parallel_config.py``.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.convert.trainers import MODULES
from penstock.layouts.drawn import Expressed
from penstock.layouts.megatron.cuts import FIRST, LAST, MTP, PER_STAGE, STAGES, WITH_EMBEDDING, WITH_LOSS
from penstock.layouts.megatron.layout_string import print_layout
from penstock.layouts.megatron.names import CONTEXT, DEGREES, EXPERT, EXPERT_TENSOR, GROUP, LAYOUT, RANKS, TENSOR
from penstock.schemas.transformers.degrees import ContextKind, Sharding

CONTEXT_KINDS: dict[ContextKind, str] = {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}
WRITTEN = (
    *DEGREES,
    "sequence-parallel",
    "cp-comm-type",
    "moe-token-dispatcher-type",
    "moe-grouped-gemm",
    "moe-expert-capacity-factor",
    "moe-pad-expert-input-to-capacity",
    RANKS,
    LAYOUT,
    GROUP,
    "num-layers",
    MTP,
    "micro-batch-size",
    "global-batch-size",
    "recompute-granularity",
    "recompute-method",
    "recompute-num-layers",
    "recompute-modules",
    "overlap-grad-reduce",
    "use-distributed-optimizer",
    "overlap-param-gather",
    "use-megatron-fsdp",
    "data-parallel-sharding-strategy",
    "accumulate-allreduce-grads-in-fp32",
    "grad-reduce-in-bf16",
)
"""Flags that may be written; a flag of these that a file leaves out has to be left out of a script as well."""
REPLACED = (
    *(FIRST, LAST, PER_STAGE, STAGES, WITH_EMBEDDING, WITH_LOSS),
    *("recompute-activations", "moe-layer-recompute", "overlap-moe-expert-parallel-comm", "delay-wgrad-compute"),
    *("use-tp-pp-dp-mapping", "num-distributed-optimizer-instances", "hierarchical-context-parallel-sizes"),
)
"""Flags that no file has, and that would make another layout of a file."""


FSDP_STRATEGIES: dict[Sharding, str] = {"gradients": "optim_grads", "parameters": "optim_grads_params"}
"""Megatron's names for what its FSDP shares out besides optimizer states."""


class Flag(NamedTuple):
    """A flag without its dashes; ``value`` of a switch is True."""

    name: str
    value: int | float | str | tuple[str, ...] | bool


def flags_of(plan: Expressed) -> list[Flag]:
    """Return the flags of a plan, in the order of files, with degrees where each device is one GPU."""
    assert plan.roles is not None
    flags = _degrees(plan)
    flags.append(Flag(RANKS, plan.ranks))
    if plan.ranks > 1:
        flags.append(Flag(LAYOUT, print_layout(plan.stages, plan.roles)))
    if plan.order == "interleaved" and plan.group != plan.ranks:
        flags.append(Flag(GROUP, plan.group))
    flags.append(Flag("num-layers", plan.roles.number))
    if plan.roles.mtp:
        flags.append(Flag(MTP, plan.roles.mtp))
    flags += [Flag("micro-batch-size", plan.rows), Flag("global-batch-size", plan.global_batch_size)]
    return [*flags, *_recomputed(plan), *_data_parallel(plan)]


def _degrees(plan: Expressed) -> list[Flag]:
    """Return the flags of degrees; Megatron's expert tensor degree is its tensor degree by default."""
    if plan.gpus > 1:
        return []
    degrees, experts = plan.degrees, plan.profile.shape.experts if plan.profile.shape is not None else None
    flags = [Flag(TENSOR, degrees.tensor)]
    if degrees.tensor > 1:
        flags.append(Flag("sequence-parallel", True))
    if degrees.context > 1:
        flags.append(Flag(CONTEXT, degrees.context))
        flags.append(Flag("cp-comm-type", CONTEXT_KINDS[plan.context_kind or "ring"]))
    if experts is None:
        return flags
    flags += [Flag(EXPERT, degrees.expert), Flag(EXPERT_TENSOR, degrees.expert_tensor)]
    flags += [Flag("moe-token-dispatcher-type", "alltoall"), Flag("moe-grouped-gemm", True)]
    if experts.capacity_factor is not None:
        flags.append(Flag("moe-expert-capacity-factor", experts.capacity_factor))
        flags.append(Flag("moe-pad-expert-input-to-capacity", True))
    return flags


def _recomputed(plan: Expressed) -> list[Flag]:
    if plan.modules:
        return [Flag("recompute-granularity", "selective"), Flag("recompute-modules", modules_in_words(plan))]
    if plan.recompute.method == "none":
        return []
    method, layers = plan.recompute
    values = {"granularity": "full", "method": method, "num-layers": layers}
    return [Flag(f"recompute-{name}", value) for name, value in values.items()]


def modules_in_words(plan: Expressed) -> tuple[str, ...]:
    """Return Megatron's names of modules.

    The feed-forward is ``moe`` in layers with experts, ``mlp`` in layers without.
    """
    experts = plan.profile.shape.experts if plan.profile.shape is not None else None
    words: list[str] = []
    for module in plan.modules:
        if module == "mlp" and experts is not None:
            words += ["mlp", "moe"] if experts.dense_layers else ["moe"]
        else:
            words.append(MODULES["megatron"][module])
    return tuple(words)


def _data_parallel(plan: Expressed) -> list[Flag]:
    """Return the flags of data parallelism.

    A plan's time does not contain the gather of sharded parameters, which overlaps where the reduction does.
    """
    names = ["overlap-grad-reduce"] if plan.overlap else []
    if plan.shard_states:
        names += ["use-distributed-optimizer", *(["overlap-param-gather"] if plan.overlap else [])]
    fsdp = []
    if plan.sharding in FSDP_STRATEGIES:
        fsdp = [
            Flag("use-megatron-fsdp", True),
            Flag("data-parallel-sharding-strategy", FSDP_STRATEGIES[plan.sharding]),
        ]
    dtype = plan.profile.parameter_dtype
    if dtype != "fp32" and plan.gradient == "fp32":
        names.append("accumulate-allreduce-grads-in-fp32")
    elif dtype == "bf16":
        names.append("grad-reduce-in-bf16")
    return [*(Flag(name, True) for name in names), *fsdp]
