"""Random clusters of every form, each with a model at some degrees: times, bytes and collectives are drawn."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from problems import make_network, make_problem

from penstock.solvers.model.degrees import CellMeasured, Collective, Degrees, Variant
from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import Problem

UNIT = 5040
"""Divisor of all bandwidths, so that the part of each of up to 10 lanes is a whole number."""


def drawn_network(rng: random.Random, nodes: int, size: int) -> Network:
    """Draw nodes around a switch or in racks, with cards or without, GPUs with separate cables, rails, or a matrix."""
    form = rng.choice(("star", "racks", "cards", "own", "rails", "matrix"))
    lanes = rng.choice((2, 4, 8)) if form == "cards" else 1
    form = rng.choice(("star", "racks")) if form == "cards" else form
    names = [f"n{i}/{j}" for i in range(nodes) for j in range(size)]
    hosts = tuple(f"n{i}" for i in range(nodes))
    inside = Inside(rng.choice(("pairs", "ports", "bus")), _rate(rng), rng.randrange(50), rng.random() < 0.5)
    full = rng.random() < 0.5

    def cable(a: str, b: str, rate: int, late: int) -> Cable:
        return Cable(a, b, rate, late, full, lanes if a in hosts else 1)

    rate, up, late = _rate(rng), _rate(rng), rng.randrange(50)
    cables: list[Cable] = []
    if form == "star":
        cables = [cable(host, "switch", rate, late) for host in hosts]
    elif form == "racks":
        cables = [cable(host, f"rack{i // 2}", rate, late) for i, host in enumerate(hosts)]
        cables += [cable(f"rack{i}", "spine", up, late) for i in range(-(-nodes // 2))]
    elif form == "own":
        cables = [cable(name, "switch", rate, late) for name in names]
    elif form == "rails":
        cables = [cable(f"n{i}/{j}", f"rail{j}", rate, late) for i in range(nodes) for j in range(size)]
        cables += [cable(f"rail{j}", "spine", up, late) for j in range(size)]
    network = make_network([size] * nodes)
    matrix = late_ns = None
    if form == "matrix":
        shape = (len(names), len(names))
        matrix = np.array([[_rate(rng) for _ in names] for _ in names], dtype=np.int64)
        late_ns = np.array([[rng.randrange(50) for _ in names] for _ in names], dtype=np.int64)
        matrix[np.eye(*shape, dtype=bool)] = 0
    return replace(
        network,
        insides=(inside,) * nodes,
        cables=tuple(cables),
        matrix_bytes_per_s=matrix,
        matrix_latency_ns=late_ns,
        resources=[],
        _ids={},
        _routes={},
        _paths={},
        _narrowest={},
    )


def _rate(rng: random.Random) -> int:
    return UNIT * rng.randrange(1, 10**6)


def drawn_problem(rng: random.Random, degrees: Degrees, layers: int = 4) -> Problem:
    """Draw a problem with a variant of the model at these degrees besides degree 1."""
    size = degrees.tensor * rng.choice((1, 2))
    nodes = rng.choice((1, 2, 3, 4)) * max(1, degrees.cell // size)
    network = drawn_network(rng, nodes, size)

    def some(most: int, count: int = layers) -> np.ndarray:
        return np.array([rng.randrange(most) for _ in range(count)], dtype=np.int64)

    def prefix(values: np.ndarray) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(values)))

    problem = make_problem(
        [1000] * layers,
        boundary_bytes=10_000,
        parameter_bytes=10_000,
        stash_bytes=1000,
        network=network,
        global_batch_size=rng.choice((4, 6, 8)),
        micro_batch_sizes=(1, 2, 4),
        shared=rng.random() < 0.5,
        transfer="nic",
        all_reduce=rng.choice(("flat", "hierarchical")),
        state_factor=rng.choice((0, 2)),
        context_bytes=7,
    )
    backward = some(2000)
    points = tuple(
        CellMeasured(
            rows, some(1000) * rows, backward * rows, backward // 2 * rows, some(500) * rows, some(100) * rows,
            tuple(tuple(_collective(rng, degrees, rows) for _ in range(rng.randrange(3))) for _ in range(layers)),
        )
        for rows in (1, 8)
    )  # fmt: skip
    parameters = prefix(some(10_000))
    variant = Variant(
        degrees=degrees,
        parameter_bytes=parameters,
        trainable_bytes=parameters,
        expert_bytes=prefix(np.diff(parameters) // rng.choice((1, 2, 10**6))),
        update_ns=prefix(some(100)),
        boundary_tensors=tuple((("x", rng.randrange(5000), rng.randrange(5000)),) for _ in range(layers - 1)),
        shared_parameters=(),
        measured={"cpu": points},
    )
    return replace(problem, variants=(variant,))


def _collective(rng: random.Random, degrees: Degrees, rows: int) -> Collective:
    sizes = {"tensor": degrees.tensor, "context": degrees.context, "expert": degrees.expert_group}
    over = rng.choice([name for name, size in sizes.items() if size > 1])
    operation = rng.choice(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"))
    phase = rng.choice(("forward", "backward"))
    return Collective(phase, operation, over, rows * rng.randrange(10**6), rng.randrange(1, 4), rng.randrange(2000))
