"""The choice of a run's transport among the ones its programs were lowered for, by the devices of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist

from penstock.executor.run.rank_programs import common_transports
from penstock.executor.runtime.interface import Runtime
from penstock.executor.transport.gloo import GlooTransport
from penstock.executor.transport.nccl import NcclTransport, connect_edges
from penstock.executor.transport.rendezvous import SETUP_LIMIT
from penstock.executor.transport.staged import StagedTransport
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import Program, Transport

Kind = Literal["gloo", "gloo-staged", "nccl"]
KINDS: tuple[Kind, ...] = get_args(Kind)
AUTO = "auto"


class Place(NamedTuple):
    """A rank's device and transports.

    ``gpu`` is equal for all ranks on one GPU, and None on a CPU. ``carried``: the transports for which all programs of
    the rank were lowered.
    """

    wanted: str
    gpu: str | None
    carried: tuple[Transport, ...]


def agree_on_transport(wanted: str, runtime: Runtime, programs: Sequence[Program]) -> Kind:
    """Choose the transport of this run, the same on every rank; collective. ``programs``: this rank's programs.

    ``auto``: ``gloo`` where all ranks compute on CPUs, ``nccl`` where each has a separate GPU and all programs were
    lowered for it, otherwise ``gloo-staged``. Raises UnsupportedRequest on every rank when the devices or the programs
    do not allow the requested transport.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, Place(wanted, runtime.gpu, common_transports(programs)))
    return choose(everyone)


def choose(places: Sequence[Place]) -> Kind:
    """Choose the transport for ranks at these places. Raises UnsupportedRequest as ``agree_on_transport`` does."""
    requested = sorted({place.wanted for place in places})
    if len(requested) > 1 or requested[0] not in (AUTO, *KINDS):
        raise UnsupportedRequest(
            f"the ranks request the transports {requested}; all ranks need the same known transport",
            remedy=f"one of {', '.join((AUTO, *KINDS))}",
        )
    gpus = [place.gpu for place in places]
    on_cpus = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    for_gloo_alone = [rank for rank, place in enumerate(places) if "nccl" not in place.carried]
    if requested[0] == AUTO:
        if len(on_cpus) == len(gpus):
            return "gloo"
        return "gloo-staged" if on_cpus or for_gloo_alone or len(set(gpus)) < len(gpus) else "nccl"
    kind = next(kind for kind in KINDS if kind == requested[0])
    if kind == "nccl":
        _refuse_nccl(gpus, on_cpus)
        if for_gloo_alone:
            raise UnsupportedRequest(
                f"the programs of rank {for_gloo_alone[0]} were lowered for gloo alone: over NCCL, which has no tags, "
                "their messages could be confused",
                remedy="lower the plan for the transport nccl, or leave the transport at auto",
            )
    if kind == "gloo" and len(on_cpus) < len(gpus):
        rank = next(rank for rank, gpu in enumerate(gpus) if gpu is not None)
        raise UnsupportedRequest(
            f"rank {rank} computes on a GPU, whose memory gloo cannot reach",
            remedy="transport gloo-staged, or nccl if each rank has a separate GPU",
        )
    return kind


def _refuse_nccl(gpus: Sequence[str | None], on_cpus: Sequence[int]) -> None:
    if on_cpus:
        raise UnsupportedRequest(
            f"ranks {list(on_cpus)} compute on CPUs, which NCCL does not connect", remedy="gloo-staged"
        )
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first < rank:
            raise UnsupportedRequest(
                f"ranks {first} and {rank} share the GPU {gpu}; NCCL needs one for each rank", remedy="gloo-staged"
            )


def make_transport(
    kind: Kind, program: Program, runtime: Runtime, timeout: timedelta = SETUP_LIMIT
) -> GlooTransport | StagedTransport | NcclTransport:
    """Create the transport of one rank; collective for ``nccl``."""
    if kind == "nccl":
        return connect_edges(program, runtime, timeout)
    if kind == "gloo-staged":
        return StagedTransport(runtime)
    return GlooTransport()
