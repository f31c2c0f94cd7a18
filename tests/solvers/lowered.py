"""Helpers for tests of lowering: plain simulation of programs, and a check for plans that leave a replica idle."""

from __future__ import annotations

from collections.abc import Sequence

from reference_programs import Reference, verdict

from penstock.schemas.program import Program
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem


def ran(programs: Sequence[Program], transport: str = "gloo") -> Reference:
    """Run all programs to their end and return the run; check that every program survives JSON."""
    assert [Program.from_json(program.to_json()) for program in programs] == list(programs)
    assert verdict(programs, transport) == "ok"
    reference = Reference(programs, rendezvous=False)
    assert reference.run() == "ok"
    return reference


def starved(problem: Problem, allocation: Allocation, batches: int = 1) -> bool:
    """Return whether some replica has no row of the smallest micro-batch, or no micro-batch."""
    for s, stage in enumerate(allocation.stages):
        have = problem.global_batch_size // allocation.num_micro_batches
        if stage.dispatch == "round_robin":
            have = (batches - 1) * allocation.num_micro_batches + len(allocation.micro_batches(s))
        if stage.replicas > have:
            return True
    return False
