"""Flags of other trainers that grew out of Megatron-LM, and NeMo's own words for Megatron's flags.

.. [1] Megatron-DeepSpeed, ``megatron/arguments.py``; NeMo 2.0, ``megatron_gpt_config.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.layouts.megatron.names import CONTEXT, EXPERT, LAYOUT, RANKS

DEEPSPEED = "Megatron-DeepSpeed"
INSTEAD = {
    "moe-expert-parallel-size": EXPERT,
    "expert-interval": "moe-layer-freq",
    "pp-partition-method": LAYOUT,
    "ds-sequence-parallel-size": CONTEXT,
    "zero-stage": "use-distributed-optimizer",
}
"""Flags of Megatron-DeepSpeed that decide a layout, and Megatron-LM's flag with the same or nearly the same meaning."""
_OF_DEEPSPEED = """
    deepspeed deepspeed-config deepspeed-mpi deepspeed-activation-checkpointing no-pipeline-parallel
    enable-expert-tensor-parallelism moe-train-capacity-factor moe-eval-capacity-factor moe-min-capacity moe-loss-coeff
    mlp-type topk use-tutel cpu-optimizer remote-device partition-activations contigious-checkpointing
    synchronize-each-layer universal-checkpoint checkpoint-in-cpu num-gpus num-nodes hostfile
"""
OF_DEEPSPEED = frozenset(_OF_DEEPSPEED.split())
"""Flags of Megatron-DeepSpeed and of its launcher that decide nothing that is read here."""
TELLING = re.compile(
    r"parallel|expert|partition|pipeline|stage|shard|zero|offload|recompute|checkpoint-act|degree|precision|dtype|optim"
)
"""Parts of names by which an unknown flag may well change an answer."""
_LAUNCHER = re.compile(r"(?m)(?:^|[;&|\"'(])[ \t]*deepspeed[ \t]")
_GATED = "(?:fast-)?(?:swiglu|geglu|reglu)"
_SHARDED = "distributed_fused_adam|mcore_distributed_optim"
BY_VALUE = (
    (rf"activation[\"']?[ \t]*[:=][ \t]*[\"']?{_GATED}(?![\w-])", "gated-linear-unit"),
    (rf"name[\"']?[ \t]*[:=][ \t]*[\"']?(?:{_SHARDED})(?![\w-])", "use-distributed-optimizer"),
    (r"bias[\"']?[ \t]*[:=][ \t]*[\"']?[Ff]alse(?![\w-])", "disable-bias-linear"),
)
"""NeMo's settings whose values mean a switch of Megatron."""
_BY_VALUE = tuple((re.compile(rf"(?<![\w$-]){pattern}"), flag) for pattern, flag in BY_VALUE)


def switches_by_value(text: str) -> list[tuple[str, int]]:
    """Return the switches that NeMo's settings mean, each with the place of the setting."""
    return [(flag, match.start()) for pattern, flag in _BY_VALUE for match in pattern.finditer(text)]


def deepspeed_said(text: str, names: Iterable[str]) -> str:
    """Return the sentence on a script of Megatron-DeepSpeed, from its text and its unknown flags; else no text."""
    flags = [name for name in names if name in OF_DEEPSPEED]
    if "deepspeed" not in flags and _LAUNCHER.search(text) is None:
        return ""
    listed = f" ({', '.join(f'--{name}' for name in flags)})" if flags else ""
    return (
        f"the script is {DEEPSPEED}'s: its own flags{listed} and its configuration are not read, and the stage of "
        f"ZeRO and what it offloads can change the answer; --{RANKS} and Megatron-LM's other flags are"
    )


def unknown_said(names: Iterable[str], most: int) -> str:
    """List unknown names, with names that may well change the answer first; no names give no text."""
    listed = sorted(names, key=lambda name: TELLING.search(name) is None)
    if not listed:
        return ""
    shown = ", ".join(listed[:most])
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    telling = [name for name in listed if TELLING.search(name)]
    doubt = f"; by their names {len(telling)} of these may change the answer" if telling else ""
    return f"no flags of Megatron's as far as known, and not read{doubt}: {shown}{more}"
