"""DAPPLE's five models with its batches, for the benchmarks of ``auto`` and of the request bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from papers.paper_models import profile

from penstock.importers.pipedream import read_profile
from penstock.schemas.profile import ModelProfile
from penstock.solvers.bounds.coverage import contiguous, features_of_candidate
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan

MODELS = {
    "vgg-19": ("vgg-19-pbs-32", 32, 1024),
    "gnmt-16": ("gnmt-32-pbs-64-simplified", 64, 1024),
    "bert-48": ("bert-48-pbs-2", 2, 64),
    "xlnet-36": ("xlnet-36-pbs-1", 1, 128),
    "amoebanet-36": ("amoeba-36-pbs-1", 1, 128),
}
"""A dict from models to the published text, the samples at which it was measured, and the global batch."""
OTHER_KINDS = "hetpipe,interleaved,zero-bubble,chimera"
"""The planners of other plans than one contiguous pipeline, which that bound does not cover."""


class Model(NamedTuple):
    """A model's profile, the samples at which it was measured, and its global batch."""

    name: str
    profile: ModelProfile
    rows: int
    batch: int


def models(folder: Path | None, names: Sequence[str] = tuple(MODELS)) -> Iterator[Model]:
    """Yield the models by the published texts in a folder, otherwise by the shipped analytic profiles."""
    for name in names:
        text, rows, batch = MODELS[name]
        model_profile = profile(name)
        if folder is not None:
            model_profile = read_profile((folder / f"{text}.txt").read_text(), name=name, micro_batch_size=rows)
        yield Model(name, model_profile, rows, batch)


def is_contiguous(problem: Problem, plan: JudgedPlan) -> bool:
    """Return whether the bound of contiguous pipelines covers the plan."""
    numbers = [plan.allocation.num_micro_batches]
    return features_of_candidate(problem, plan) <= contiguous(problem, numbers)


def tightened(problem: Problem) -> Problem:
    """Return the problem with memory such that the in-flight limits bind.

    Each device has 2.5 even shares of the states, and a micro-batch's stash.
    """
    rules = problem.memory
    states = int(problem.parameter_bytes[-1]) * (1 + rules.gradient_factor + rules.state_factor)
    rows = min(point.rows for points in problem.measured.values() for point in points)
    stash = int(problem.costs(problem.devices[0].kind, rows).stash_bytes[-1])
    memory = int(2.5 * states / problem.num_devices) + stash + rules.headroom_bytes
    devices = tuple(replace(d, memory_bytes=memory + d.context_bytes) for d in problem.devices)
    return replace(problem, devices=devices)
