"""Programs post receives where the simulator's reference implementation counts them from."""

from __future__ import annotations

import random

from random_plans import random_allocation, random_orders, random_pattern, random_problem
from reference_measures import posted_times
from reference_simulator import Reference, run_periodic_reference, run_reference

from penstock.schemas.errors import PenstockError
from penstock.schemas.program import KINDS, Program
from penstock.solvers.lowering import lower
from penstock.solvers.model.unroll import unroll

READ_BY = {"RECV_F": ("F",), "RECV_B": ("B", "I")}


def posted_after(program: Program) -> dict[tuple[str, int, int], int]:
    """Count the operations that a rank has run when it posts a receive, by (word, stage, micro-batch)."""
    counts: dict[tuple[str, int, int], int] = {}
    done = 0
    for one in program.instructions():
        if one.kind in KINDS:
            done += 1
        elif one.kind in READ_BY:
            assert counts.setdefault((one.kind, one.stage, one.micro_batch), done) == done
    return counts


def agrees(reference: Reference, programs: list[Program], names: list[str]) -> int:
    """Compare the posting times of all receives, and return how many were compared."""
    posted, seen = posted_times(reference), 0
    for program in programs:
        lane = next(
            i for i, row in enumerate(reference.orders.rows) if program.device in [names[d] for d in row.devices]
        )
        row = [tuple(op) for op in reference.orders.rows[lane].operations.tolist() if op[0] < len(KINDS)]
        place = {(KINDS[kind], s, m): (kind, s, m) for kind, s, m in row}
        for (word, s, m), done in posted_after(program).items():
            operation = next(place[kind, s, m] for kind in READ_BY[word] if (kind, s, m) in place)
            expected = reference.end[lane, row[done - 1]] if done else 0
            assert posted[lane, operation] == expected
            seen += 1
    return seen


def test_programs_of_flushed_steps_post_where_the_reference_counts_from() -> None:
    seen = 0
    for seed in range(80):
        rng = random.Random(seed)
        problem = random_problem(rng)
        allocation = random_allocation(rng, problem)
        orders = random_orders(rng, allocation)
        try:
            programs = lower(problem, allocation, orders)
        except PenstockError:
            continue
        reference = run_reference(problem, allocation, orders)
        seen += 0 if reference.deadlock else agrees(reference, programs, [device.name for device in problem.devices])
    assert seen > 90


def test_programs_without_a_flush_post_where_the_reference_counts_from() -> None:
    seen = 0
    for seed in range(24):
        rng = random.Random(seed)
        problem = random_problem(rng)
        allocation, pattern, rule, _ = random_pattern(rng, problem)
        rounds = unroll(problem, allocation, pattern, rule).rounds
        try:
            programs = lower(problem, allocation, pattern, update_rule=rule, batches=rounds)
        except PenstockError:
            continue
        reference = run_periodic_reference(problem, allocation, pattern, rule)
        seen += 0 if reference.deadlock else agrees(reference, programs, [device.name for device in problem.devices])
    assert seen > 36
