"""Megatron-Core's flags of a pipeline, written as a shell array. ``reading.py`` reads them."""

from __future__ import annotations

import shlex

from penstock.layouts.drawn import Expressed
from penstock.layouts.megatron.written import Flag, flags_of


def write(plan: Expressed) -> str:
    """Return shell arrays, to be sourced: ``LAUNCH_ARGS`` for torchrun, ``PIPELINE_ARGS`` for the training script."""
    remarks = [f"# {line}" for line in plan.remarks()]
    lines = [*remarks, *_launch(plan), "PIPELINE_ARGS=(", *(f"    {_shell(flag)}" for flag in flags_of(plan)), ")", ""]
    return "\n".join(lines)


def _launch(plan: Expressed) -> list[str]:
    """Return torchrun's options, where every node has equally many processes and each is one GPU."""
    each = {count for _name, count in plan.nodes}
    if plan.gpus > 1 or len(each) > 1:
        return []
    return [f"LAUNCH_ARGS=(--nnodes {len(plan.nodes)} --nproc-per-node {each.pop()})"]


def _shell(flag: Flag) -> str:
    words = flag.value if isinstance(flag.value, tuple) else () if flag.value is True else (str(flag.value),)
    return " ".join([f"--{flag.name}", *map(shlex.quote, words)])
