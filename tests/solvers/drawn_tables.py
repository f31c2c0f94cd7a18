"""Random tables of measured collectives: some spans and operations, a few sizes each; times may fall with the size."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

from penstock.solvers.model.degrees import Operation
from penstock.solvers.model.problem import MeasuredCollective, Problem


def drawn_table(rng: random.Random, most_bytes: int, most_ns: int, devices: int = 4, nodes: int = 4) -> list[Any]:
    """Draw entries in the form of a topology's, each span, operation and size at most once."""
    rows = []
    spans = [(p, q) for p in range(1, devices + 1) for q in range(1, nodes + 1) if p * q > 1]
    for p, q in rng.sample(spans, rng.randint(1, len(spans))):
        for operation in rng.sample(get_args(Operation), rng.randint(1, 5)):
            for size in rng.sample(range(1, most_bytes), rng.randint(1, 4)):
                row = {"operation": operation, "devices_per_node": p, "nodes": q, "size_bytes": size}
                rows.append(row | {"time_ns": rng.randint(1, most_ns)})
    return rows


def with_table(problem: Problem, seed: int, most_bytes: int, most_ns: int) -> Problem:
    """Return the problem with a random table of measured collectives."""
    rows = drawn_table(random.Random(f"table {seed}"), most_bytes, most_ns)
    return replace(problem, collectives=tuple(MeasuredCollective(**row) for row in rows))
