"""Small random requests that leave degrees open: requests of the audit, with a model that some GPUs can share."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import get_args

import numpy as np
from random_requests import request_of

from penstock.schemas.transformers.degrees import ALONE
from penstock.solvers.model.degrees import (
    WITHIN,
    CellMeasured,
    CellModule,
    Choice,
    Collective,
    Degrees,
    Module,
    Sharding,
    Variant,
)
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Problem

DENSE = (Degrees(tensor=2), Degrees(tensor=4), Degrees(context=2), Degrees(tensor=2, context=2), Degrees(tensor=3))
EXPERT = (
    Degrees(expert=2),
    Degrees(expert=2),
    Degrees(expert=4),
    Degrees(tensor=2, expert=2),
    Degrees(context=2, expert=2),
    Degrees(tensor=2, expert_tensor=2),
    Degrees(tensor=2, expert=2, expert_tensor=2),
    Degrees(tensor=2, context=2, expert=2),
)
LAYERS, DEVICES = 4, 6


def open_request(seed: int, *, experts: bool = False, sharded: bool = False) -> Problem:
    """Draw a request with at most four layers, six GPUs, and two or three choices, some without GPU groups.

    ``experts``: degrees with groups of experts, whose GPU groups may have several meshes. ``sharded``: all GPUs share
    out gradients, or also parameters, or each stage shares out its parameters.
    """
    rng = random.Random(f"open {seed}{' experts' * experts}{' sharded' * sharded}")
    problem = _small(rng)
    degrees = rng.sample(EXPERT if experts else DENSE, rng.randint(1, 2))
    if experts:
        problem = _in_samples(rng, problem, max(each.meshes for each in degrees))
    open_to = [*([Degrees()] if rng.random() < 0.6 or len(degrees) == 1 else []), *degrees]
    shardings: list[Sharding | None] = rng.choice([[None], [None], ["none"], ["optimizer"], ["none", "optimizer"]])
    if sharded:
        batch = problem.num_devices * rng.randint(1, 3)
        problem = replace(problem, global_batch_size=batch, micro_batch_sizes=(), min_slice=1)
        shardings = rng.sample(("gradients", "parameters", "parameters_kept", "optimizer"), 2)
    return replace(
        problem,
        network=_divisible(problem.network),
        update_rules=problem.update_rules if seed % 8 == 7 else frozenset({"synchronous"}),
        variants=tuple(_variant(rng, problem, each) for each in degrees),
        choices=tuple(Choice(*each) for each in product(open_to, shardings))[:3],
        _costs={},
    )


def _in_samples(rng: random.Random, problem: Problem, meshes: int) -> Problem:
    """Multiply the samples, mostly so that the meshes of every GPU group get equally many."""
    if rng.random() < 0.1:
        return problem
    sizes = problem.micro_batch_sizes
    if rng.random() < 0.9:
        sizes = tuple(size * meshes for size in sizes)
    return replace(problem, global_batch_size=problem.global_batch_size * meshes, micro_batch_sizes=sizes)


def _small(rng: random.Random) -> Problem:
    """Draw one of the audit's requests that is small enough and has no codecs and no target."""
    while True:
        problem = request_of(rng.randrange(10**6))
        small = problem.num_layers <= LAYERS and problem.num_devices <= DEVICES
        if small and max(map(len, problem.nodes())) > 1 and problem.within is None and not problem.codec:
            return problem


def _divisible(network: Network) -> Network:
    """Make every bandwidth a multiple of 12, so that the lanes' parts are whole numbers."""
    insides = tuple(
        inside and inside._replace(bandwidth_bytes_per_s=12 * inside.bandwidth_bytes_per_s)
        for inside in network.insides
    )
    cables = tuple(cable._replace(bandwidth_bytes_per_s=12 * cable.bandwidth_bytes_per_s) for cable in network.cables)
    return replace(network, insides=insides, cables=cables, resources=[], _ids={}, _routes={}, _paths={}, _narrowest={})


def _variant(rng: random.Random, problem: Problem, degrees: Degrees) -> Variant:
    """Draw a variant: about the degrees' part of all costs, and a few collectives."""
    part = rng.uniform(0.7, 1.6) / degrees.cell
    part_of_experts = rng.choice((0, 0.3, 0.9, 1)) if degrees.expert_group > 1 else 0
    knows_modules = rng.random() < 0.6

    def some(values: np.ndarray) -> np.ndarray:
        return np.array([int(each * part * rng.uniform(0.6, 1.4)) for each in values.tolist()], dtype=np.int64)

    def prefix(values: np.ndarray) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(values)))

    parameters = some(np.diff(problem.parameter_bytes))
    trained = np.diff(problem.trainable_bytes) > 0
    (points,) = problem.measured.values()
    measured = []
    for point in points:
        backward = some(point.backward_ns)
        weight = np.array([rng.randint(0, each) for each in backward.tolist()], dtype=np.int64)
        layers = tuple(_collectives(rng, degrees, point.rows) for _ in range(problem.num_layers))
        times = some(point.forward_ns), backward, weight
        sizes = some(point.stash_bytes), some(point.workspace_bytes)
        modules = _modules(rng, point.rows, degrees, times[0], sizes[0]) if knows_modules else {}
        measured.append(CellMeasured(point.rows, *times, *sizes, layers, modules))
    return Variant(
        degrees=degrees,
        parameter_bytes=prefix(parameters),
        trainable_bytes=prefix(parameters * trained),
        expert_bytes=prefix((parameters * part_of_experts).astype(np.int64) * trained),
        update_ns=prefix(some(np.diff(problem.update_ns))),
        boundary_tensors=tuple(
            tuple((name, -(-a // degrees.mesh), -(-b // degrees.mesh)) for name, a, b in cut)
            for cut in problem.boundary_tensors
        ),
        shared_parameters=tuple(
            (name, layers, -(-size // degrees.tensor)) for name, layers, size in problem.shared_parameters
        ),
        measured=dict.fromkeys(problem.measured, tuple(measured)),
    )


def _modules(
    rng: random.Random, rows: int, degrees: Degrees, forward: np.ndarray, stash: np.ndarray
) -> dict[Module, CellModule]:
    """Draw a part of each layer's forward and stash, and a few collectives; nested modules share their parent's."""
    modules: dict[Module, CellModule] = {}
    for module in (each for each in get_args(Module) if each not in ALONE):
        collectives = tuple(
            tuple(each for each in _collectives(rng, degrees, rows) if each.phase == "forward") for _ in stash.tolist()
        )
        whole = modules.get(WITHIN.get(module, module))
        stashes, forwards = (stash, forward) if whole is None else (whole.freed_bytes, whole.forward_ns)
        shares = [rng.uniform(0, 0.33) for _ in stash.tolist()]
        freed = np.array(
            [int(each * share) for each, share in zip(stashes.tolist(), shares, strict=True)], dtype=np.int64
        )
        times = np.array([int(each * rng.uniform(0, 0.5)) for each in forwards.tolist()], dtype=np.int64)
        collectives = collectives if whole is None else tuple(() for _ in collectives)
        modules[module] = CellModule(times, freed, collectives)
    return modules


def _collectives(rng: random.Random, degrees: Degrees, rows: int) -> tuple[Collective, ...]:
    sizes = {"tensor": degrees.tensor, "context": degrees.context, "expert": degrees.expert_group}
    names = [name for name, size in sizes.items() if size > 1]
    return tuple(
        Collective(
            rng.choice(("forward", "backward", "step")),
            rng.choice(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")),
            rng.choice(names),  # type: ignore[arg-type]
            rows * rng.randint(0, 60),
            rng.randint(1, 2),
            rng.choice((0, rng.randint(0, 20))),
        )
        for _ in range(rng.choice((0, 0, 1, 2)))
    )
