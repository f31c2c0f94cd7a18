"""Whether ranks have the devices that the plan names, with the memory that it takes: asked before anything is built."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock.executor.runtime.interface import Runtime
from penstock.facts.device_table import CPU, is_other_hardware
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import Program

_GIB = 2**30
_PROCESSES = ("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")


class _Found(NamedTuple):
    """What a rank found. ``planned``: the plan's device, with what the plan takes of it."""

    rank: int
    gpu: str | None
    kind: str
    planned: str
    planned_kind: str | None
    needed_bytes: int
    free_bytes: int
    total_bytes: int


def refuse_other_devices(runtime: Runtime, program: Program, *, kinds_differ: bool = False) -> str | None:
    """Raise UnsupportedRequest on every rank where one has another kind of GPU, or less memory, than the plan takes.

    ``kinds_differ``: other kinds are all right, and returned as a sentence: times will differ. What is no GPU, or of no
    plan, is not asked. Collective.
    """
    needs, memory = program.needs, runtime.memory
    own = _Found(
        program.rank,
        runtime.gpu,
        runtime.kind,
        program.device,
        None if needs is None else needs.kind,
        0 if needs is None else needs.memory_bytes,
        0 if runtime.gpu is None else memory.free_bytes(),
        0 if runtime.gpu is None else memory.total_bytes(),
    )
    everyone: list[Any] = [None] * program.world_size
    dist.all_gather_object(everyone, own)
    on_gpus: list[_Found] = [one for one in everyone if one.gpu is not None]
    for gpu in dict.fromkeys(one.gpu for one in on_gpus):
        _refuse_memory([one for one in on_gpus if one.gpu == gpu])
    try:
        _refuse_kinds(on_gpus)
    except UnsupportedRequest as error:
        if not kinds_differ:
            raise
        return f"{error.detail}: times differ from the prediction"
    return None


def _refuse_kinds(found: Sequence[_Found]) -> None:
    for one in found:
        # A plan of CPUs may be tried on GPUs, where it is asked for: what it takes is not what they lack.
        if one.planned_kind not in (None, CPU) and is_other_hardware(one.planned_kind, one.kind):
            raise UnsupportedRequest(
                f"rank {one.rank} is to be {one.planned}, a {one.planned_kind} in the plan, and has a {one.kind}",
                remedy="plan for the kind of GPU that is there, or start the rank where the plan's is",
            )


def _refuse_memory(ranks: Sequence[_Found]) -> None:
    """Of the ranks on one GPU."""
    needed = sum({one.planned: one.needed_bytes for one in ranks}.values())
    free, total = min(one.free_bytes for one in ranks), ranks[0].total_bytes
    if needed <= free:
        return
    numbers = ", ".join(str(one.rank) for one in ranks)
    who = f"rank {numbers} needs" if len(ranks) == 1 else f"ranks {numbers}, on one GPU, need"
    said = f"{who} {needed / _GIB:.1f} GiB by the plan's prediction; the GPU has {total / _GIB:.1f} GiB"
    if needed > total:
        raise UnsupportedRequest(said, remedy="plan with the memory that the GPU has, or with more stages")
    others = _processes()
    named = f": {others}" if others else ""
    raise UnsupportedRequest(
        f"{said}, of which {free / _GIB:.1f} GiB are free{named}",
        remedy="end what else runs on the GPU, or plan with a headroom (memory.headroom_bytes)",
    )


def _processes() -> str:
    """Who has memory of this machine's GPUs, as ``nvidia-smi`` knows it; it does not know processes of containers."""
    try:
        answer = subprocess.run(_PROCESSES, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return "; ".join(lines[:4]) if answer.returncode == 0 else ""
