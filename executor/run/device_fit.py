"""A check that ranks have the devices and the memory that the plan needs, before anything is built."""

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


class _RankDevice(NamedTuple):
    """A rank's device. ``planned``: the plan's device; ``needed_bytes``: the memory that the plan needs of it."""

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

    ``kinds_differ``: accept other kinds, and return a sentence that times will differ. Devices other than GPUs, and
    plans without kinds, are not checked. Collective.
    """
    needs, memory = program.needs, runtime.memory
    local = _RankDevice(
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
    dist.all_gather_object(everyone, local)
    on_gpus: list[_RankDevice] = [one for one in everyone if one.gpu is not None]
    for gpu in dict.fromkeys(one.gpu for one in on_gpus):
        _refuse_memory([one for one in on_gpus if one.gpu == gpu])
    try:
        _refuse_kinds(on_gpus)
    except UnsupportedRequest as error:
        if not kinds_differ:
            raise
        return f"{error.detail}: times differ from the prediction"
    return None


def _refuse_kinds(ranks: Sequence[_RankDevice]) -> None:
    for one in ranks:
        # A plan for CPUs may run on GPUs on request; their kinds are then not compared.
        if one.planned_kind not in (None, CPU) and is_other_hardware(one.planned_kind, one.kind):
            raise UnsupportedRequest(
                f"rank {one.rank} is planned for {one.planned}, of kind {one.planned_kind}, but its GPU is of kind "
                f"{one.kind}",
                remedy=f"plan for GPUs of kind {one.kind}, or start the rank on a GPU of kind {one.planned_kind}",
            )


def _refuse_memory(ranks: Sequence[_RankDevice]) -> None:
    """Raise UnsupportedRequest where the ranks on one GPU need more memory than is free."""
    needed = sum({one.planned: one.needed_bytes for one in ranks}.values())
    free, total = min(one.free_bytes for one in ranks), ranks[0].total_bytes
    if needed <= free:
        return
    numbers = ", ".join(str(one.rank) for one in ranks)
    who = f"rank {numbers} needs" if len(ranks) == 1 else f"ranks {numbers}, on one GPU, need"
    message = f"{who} {needed / _GIB:.1f} GiB by the plan's prediction; the GPU has {total / _GIB:.1f} GiB"
    if needed > total:
        raise UnsupportedRequest(message, remedy="plan with the memory that the GPU has, or with more stages")
    others = _processes()
    named = f": {others}" if others else ""
    raise UnsupportedRequest(
        f"{message}, of which {free / _GIB:.1f} GiB are free{named}",
        remedy="end other processes on the GPU, or plan with a headroom (memory.headroom_bytes)",
    )


def _processes() -> str:
    """List the processes with memory of this machine's GPUs, by ``nvidia-smi``, which omits processes in containers."""
    try:
        answer = subprocess.run(_PROCESSES, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return "; ".join(lines[:4]) if answer.returncode == 0 else ""
