"""Random requests and instances that several tests plan."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from problems import make_problem

from penstock.solvers.model.problem import Pin, Problem

NODES = ((1, 1, 1), (1,) * 4, (1,) * 6, (2, 2), (2, 2, 2), (2, 2, 2, 2), (4, 2), (3, 3), (4, 4), (2, 1, 1), (3, 2, 1))
SCALE_NS = 1_000_000
"""The devices of each node of requests on narrow cables, and the mean time of a layer's forward pass."""


def instance(seed: int, count: int = 12, number: int = 4, **changes: Any) -> Problem:
    """Draw SOLVERS F: two nodes of two devices, unequal layers, transfers and all-reduces of different weight."""
    draw = np.random.default_rng(seed)
    forward = np.exp(draw.normal(0, 0.5, count)) * 25_000
    weights = np.exp(draw.normal(0, 0.8, count)) * np.linspace(0.3, 2, count) * draw.choice([200_000, 10**6, 4 * 10**6])
    sent = np.exp(draw.normal(0, 0.4, count - 1)) * np.linspace(2, 0.5, count - 1) * draw.choice([40_000, 160_000])
    settings: dict[str, Any] = {
        "boundary_bytes": sent.astype(int).tolist(),
        "parameter_bytes": weights.astype(int).tolist(),
        "nodes": (2, 2),
        "inside_bytes_per_s": 10**10,
        "between_bytes_per_s": int(draw.choice([1, 3, 10])) * 10**9,
        "global_batch_size": 12 * number,
        "micro_batch_sizes": (12,),
        "transfer": "spp",
        "overlap_all_reduce": False,
        "memory_bytes": 2**45,
    }
    return make_problem(forward.astype(int).tolist(), **(settings | changes))


def random_request(seed: int, layers: int = 5, devices: int = 4) -> Problem:
    """Draw a few layers on a few devices, with any rule, network and memory size that the bound supports."""
    rng = random.Random(seed)
    count = rng.randint(2, layers)
    nodes = rng.choice([n for n in ((1, 1), (2, 1), (3,), (2, 2), (4,), (1, 1, 1, 1), (3, 1)) if sum(n) <= devices])
    scale = rng.choice([1, 3, 20])
    size = rng.choice([2, 3, 4, 5, 8])
    mixed = rng.random() < 0.25
    shared = rng.random() < 0.4
    return make_problem(
        [rng.randint(1, 30) for _ in range(count)],
        [rng.randint(1, 60) for _ in range(count)],
        [rng.randint(0, 12) * scale for _ in range(count - 1)],
        [rng.randint(0, 40) * scale for _ in range(count)],
        backward_bytes=[rng.randint(0, 12) * scale for _ in range(count - 1)],
        stash_bytes=[rng.randint(0, 30) for _ in range(count)],
        workspace_bytes=rng.choice([0, 20]),
        update_ns=rng.randint(0, 5),
        memory_bytes=rng.choice([2**40, 2**40, rng.randint(60, 400) * scale]),
        context_bytes=rng.choice([0, 10]),
        nodes=nodes,
        kinds=[rng.choice(["cpu", "quick"]) for _ in range(sum(nodes))] if mixed else None,
        speed={"quick": 1.7} if mixed else None,
        between_bytes_per_s=rng.choice([10**9, 3 * 10**8, 5 * 10**7]),
        latency_ns=rng.choice([0, 0, 3]),
        form=rng.choice(["pairs", "ports", "bus"]),
        full_duplex=rng.random() < 0.5,
        global_batch_size=size,
        micro_batch_sizes=rng.choice([(1,), (2,), (1, 2), (3,), (size,)]) if size > 2 else (1, 2),
        shared=shared,
        channel=rng.choice(["half", "full", "none"]),
        transfer=rng.choice(["nic", "spp", "dapple", "madpipe"]),
        all_reduce=rng.choice(["flat", "hierarchical", "dapple"]),
        bucket_bytes=rng.choice([1, 60, 10**6]),
        overlap_all_reduce=rng.random() < 0.7,
        state_factor=rng.choice([0, 2]),
        shard_states=rng.random() < 0.3,
        count_buffers=rng.random() < 0.7,
        recompute=rng.choice(["never", "never", "auto", "always"]),
        linear=rng.random() < 0.5,
        shared_parameters=(("tied", (0, count - 1), 30),) if rng.random() < 0.3 else (),
        cuttable=[rng.random() < 0.85 for _ in range(count - 1)],
        lanes=1 + seed % 3,
    )


def four_devices(seed: int, count: int = 8, **changes: Any) -> Problem:
    """Draw eight layers on two nodes of two devices, with free memory factors and micro-batch sizes."""
    draw = np.random.default_rng(seed)
    settings: dict[str, Any] = {
        "boundary_bytes": draw.integers(0, 900_000, count - 1).tolist(),
        "parameter_bytes": draw.integers(0, 9_000_000, count).tolist(),
        "stash_bytes": draw.integers(0, 1_000_000, count).tolist(),
        "nodes": (2, 2),
        "inside_bytes_per_s": 8 * 10**9,
        "between_bytes_per_s": 10**9,
        "global_batch_size": 16,
        "micro_batch_sizes": (),
        "shared": bool(seed % 2),
        "transfer": "nic",
        "recompute": "auto",
        "state_factor": 2,
        "update_ns": 10_000,
    }
    return make_problem(draw.integers(100_000, 3_000_000, count).tolist(), **(settings | changes))


def narrow_request(seed: int, most_layers: int = 12, most_devices: int = 8, **changes: Any) -> Problem:
    """Return the request of a seed, whose transfers over a cut take a quarter to two even shares of the work."""
    rng = random.Random(seed)
    nodes = rng.choice([each for each in NODES if sum(each) <= most_devices])
    devices, layers = sum(nodes), rng.randint(4, most_layers)
    forward = [rng.randint(SCALE_NS // 2, 3 * SCALE_NS // 2) for _ in range(layers)]
    share = 3 * sum(forward) / devices * rng.choice([0.25, 0.5, 1.0, 2.0]) / 2
    tight = rng.random() < 0.5
    kept = 10**8 if tight else rng.choice([10**5, 10**6, 10**7])
    room = 4 * kept * (-(-layers // devices) + rng.randint(0, 2)) + kept if tight else 2**50
    kinds = [rng.choice(["cpu", "quick"]) for _ in nodes] if rng.random() < 0.3 else None
    settings: dict[str, Any] = {
        "nodes": nodes,
        "kinds": kinds and [kind for kind, size in zip(kinds, nodes, strict=True) for _ in range(size)],
        "speed": {"quick": 1.6},
        "inside_bytes_per_s": 10**11,
        "between_bytes_per_s": 10**9,
        "form": rng.choice(["pairs", "ports", "bus"]),
        "full_duplex": rng.random() < 0.5,
        "global_batch_size": rng.choice([8, 16, 24]),
        "micro_batch_sizes": rng.choice([(1,), (1, 2), (1, 2, 4), ()]),
        "shared": rng.random() < 0.7,
        "channel": rng.choice(["half", "full"]),
        "transfer": rng.choice(["nic", "nic", "spp", "dapple"]),
        "all_reduce": rng.choice(["flat", "hierarchical"]),
        "overlap_all_reduce": rng.random() < 0.7,
        "memory_bytes": room,
        "state_factor": 2,
        "recompute": rng.choice(["never", "auto"]),
        "stash_bytes": kept // 20 if rng.random() < 0.5 else 0,
        "boundary_bytes": [int(share * rng.uniform(0.5, 1.5)) for _ in range(layers - 1)],
        "parameter_bytes": [int(kept * rng.uniform(0.5, 1.2)) for _ in range(layers)],
    }
    problem = make_problem(forward, **(settings | changes))
    if rng.random() < 0.2:
        first = rng.choice([0, layers - 1])
        allowed = frozenset(rng.sample(range(devices), rng.randint(1, devices - 1)))
        problem = replace(problem, pins=(Pin(first, first, allowed),))
    return problem
