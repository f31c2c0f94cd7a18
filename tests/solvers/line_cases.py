"""Small allocations with separate devices and limits in flight for each stage, for the suffix and tabu searches."""

from __future__ import annotations

import random
from typing import Literal

from problems import make_problem, straight

from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem

Channel = Literal["half", "full", "none"]


def limited_line(
    forward: list[int],
    backward: list[int],
    out: list[int],
    home: list[int],
    limits: list[int],
    batches: int,
    channel: Channel = "half",
) -> tuple[Problem, Allocation]:
    """Build a line of one layer per stage, with memory for exactly ``limits[s]`` micro-batches in flight."""
    stages = len(forward)
    problem = make_problem(
        forward,
        backward,
        out,
        backward_bytes=home,
        stash_bytes=1000,
        count_buffers=False,
        nodes=(1,) * stages,
        memory_bytes=[1000 * limit for limit in limits],
        global_batch_size=batches,
        channel=channel,
    )
    return problem, straight(problem, batches)


def random_line(seed: int, most_batches: int = 8, channel: Channel | None = None) -> tuple[Problem, Allocation]:
    """Draw 2 to 4 stages and 3 to ``most_batches`` micro-batches; limits are S - s, random, or absent."""
    rng = random.Random(seed)
    stages, batches = rng.randint(2, 4), rng.randint(3, most_batches)
    forward = [rng.randint(1, 30) for _ in range(stages)]
    backward = [2 * f if rng.random() < 0.5 else rng.randint(1, 60) for f in forward]
    out = [rng.choice([0, rng.randint(1, 30), rng.randint(1, 30)]) for _ in range(stages - 1)]
    home = [x if rng.random() < 0.6 else rng.randint(0, 30) for x in out]
    some = [rng.randint(1, batches) for _ in range(stages)]
    limits = rng.choice([[stages - s for s in range(stages)], some, [batches] * stages])
    return limited_line(forward, backward, out, home, limits, batches, channel or rng.choice(["half", "full", "none"]))
