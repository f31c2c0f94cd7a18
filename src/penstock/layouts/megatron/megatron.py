"""Megatron-Core's flags of a pipeline, written as a shell array. ``reading.py`` reads them."""

from __future__ import annotations

import shlex

from penstock.layouts.drawn import Expressed
from penstock.layouts.megatron.layout_string import print_layout
from penstock.layouts.megatron.names import GROUP, LAYOUT, RANKS


def write(plan: Expressed) -> str:
    """A shell array ``PIPELINE_ARGS``, to be sourced and handed to the training script."""
    assert plan.roles is not None
    flags = [f"--{RANKS} {plan.ranks}"]
    if plan.ranks > 1:
        flags.append(f"--{LAYOUT} {shlex.quote(print_layout(plan.stages, plan.roles))}")
    if plan.order == "interleaved" and plan.group != plan.ranks:
        flags.append(f"--{GROUP} {plan.group}")
    flags += [
        f"--num-layers {plan.roles.number}",
        *([f"--mtp-num-layers {plan.roles.mtp}"] if plan.roles.mtp else []),
        f"--micro-batch-size {plan.rows}",
        f"--global-batch-size {plan.global_batch_size}",
    ]
    if plan.recompute.method != "none":
        method, layers = plan.recompute
        flags.append(f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}")
    flags += ["--overlap-grad-reduce"] if plan.overlap else []
    flags += ["--use-distributed-optimizer"] if plan.shard_states else []
    flags += _widths(plan)
    remarks = [f"# {line}" for line in plan.remarks()]
    return "\n".join([*remarks, "PIPELINE_ARGS=(", *(f"    {flag}" for flag in flags), ")", ""])


def _widths(plan: Expressed) -> list[str]:
    """How wide gradients are, for parameters of 16 bits."""
    dtype = plan.profile.parameter_dtype
    if dtype == "fp32":
        return []
    if plan.gradient == "fp32":
        return ["--accumulate-allreduce-grads-in-fp32"]
    return ["--grad-reduce-in-bf16"] if dtype == "bf16" else []
