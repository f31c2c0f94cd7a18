"""A comparison of all ranks before anything is built: one plan, one job, equal settings.

Devices, transports (`choice`), time limits and places of files may differ. So may the reference by which a host loads
the job: only the job's name and the samples of its batches are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock.executor.run.job import Job
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import Program
from penstock.schemas.ranks.assignment import RankAssignment

_REMEDY = "lower the programs of all ranks from one plan, and start all ranks with the same settings"
_SETTINGS = ("plan_hash", "steps", "first_step", "segments", "seed", "check", "trace_steps")
_FIELDS = (
    *("global_batch_size", "row_classes", "update_rule", "batches", "pipelines", "staleness"),
    *("sharding", "shard_states", "groups"),
)
_DEGREES = ("tensor", "context", "expert", "expert_tensor")

_Stage = tuple[int, int, int]
"""The number of a program, a pipeline and a stage."""


class _Part(NamedTuple):
    """Values of a rank by name, and the layers ``(first, last)`` of each of its stages."""

    rank: int
    values: dict[str, Any]
    stages: dict[_Stage, tuple[int, int]]


def refuse_other_place(program: Program, assignment: RankAssignment) -> None:
    """Raise InvalidDocument where a program is for another rank, or for another number of ranks, than assigned."""
    place, expected = (program.rank, program.world_size), (assignment.rank, assignment.world_size)
    if place != expected:
        raise InvalidDocument(
            f"the program is for rank {place[0]} of {place[1]}, but was given to rank {expected[0]} of {expected[1]}",
            remedy=_REMEDY,
        )


def refuse_disagreement(programs: Sequence[Program], assignment: RankAssignment, options: RunOptions, job: Job) -> None:
    """Raise InvalidDocument on every rank alike, with two ranks that do not belong to one run.

    Collective. ``programs``: this rank's programs.
    """
    part = _Part(
        programs[0].rank,
        _values(programs, assignment, options, job),
        {
            (number, stage.pipeline, stage.stage): (stage.first, stage.last)
            for number, program in enumerate(programs)
            for stage in program.stages
        },
    )
    everyone: list[Any] = [None] * programs[0].world_size
    dist.all_gather_object(everyone, part)
    first, *others = everyone
    for other in others:
        _refuse_other_values(other, first)
    _refuse_other_cuts(everyone)


def _values(programs: Sequence[Program], assignment: RankAssignment, options: RunOptions, job: Job) -> dict[str, Any]:
    values: dict[str, Any] = {"job": job.name, "job's batch_size": job.batch_size, "programs": len(programs)}
    values |= {name: getattr(assignment, name) for name in _SETTINGS}
    values |= {f"options.{name}": value for name, value in options.model_dump(mode="json").items()}
    for number, program in enumerate(programs):
        of = f" of program {number}" if number else ""
        values |= {f"{name}{of}": getattr(program, name) for name in _FIELDS}
        values |= {f"{name} degree{of}": getattr(program.mesh, name, 1) for name in _DEGREES}
    return values


def _refuse_other_values(other: _Part, first: _Part) -> None:
    for name, value in first.values.items():
        if other.values.get(name) != value:
            raise InvalidDocument(
                f"rank {other.rank} has {name} {other.values.get(name)!r}, rank {first.rank} has {value!r}",
                remedy=_REMEDY,
            )


def _refuse_other_cuts(everyone: Sequence[_Part]) -> None:
    """Raise InvalidDocument where ranks have different layers of a stage, or the stages of a pipeline leave a gap."""
    cuts: dict[_Stage, tuple[tuple[int, int], int]] = {}
    for part in everyone:
        for stage, layers in part.stages.items():
            others, rank = cuts.setdefault(stage, (layers, part.rank))
            if others != layers:
                raise InvalidDocument(
                    f"stage {stage[-1]} has layers {_span(layers)} on rank {part.rank}, but {_span(others)} on rank "
                    f"{rank}",
                    remedy=_REMEDY,
                )
    for (stage, (layers, rank)), (after, (others, other)) in pairwise(sorted(cuts.items())):
        if stage[:-1] == after[:-1] and others[0] != layers[1] + 1:
            raise InvalidDocument(
                f"stage {stage[-1]} has layers {_span(layers)} on rank {rank}, and stage {after[-1]} has "
                f"{_span(others)} on rank {other}: they do not follow each other",
                remedy=_REMEDY,
            )


def _span(layers: tuple[int, int]) -> str:
    return f"{layers[0]}…{layers[1]}"
