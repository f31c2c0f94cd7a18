"""The memory of ranks that share layers, storage by storage, against the simulator's count for one of their GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mesh_cases import BATCH, MICRO_BATCHES, Case, contracted, lowered
from rank_pool import RankPool

from penstock.schemas.program import SHARDINGS, WITHIN_PASSES, Program
from penstock.solvers.costs.memory import activation_bytes, static_bytes, weight_bytes
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.problem import Problem

HERE = Path(__file__).parent
CLOSE = 0.03
_ALL = ("none", "optimizer", *SHARDINGS)
_SHARED = [
    (2, 1, 1, 1, "none"),
    (2, 1, 1, 2, "none"),
    (2, 1, 1, 2, "optimizer"),
    (1, 1, 1, 2, "optimizer"),
    (1, 2, 1, 1, "none"),
    (2, 2, 1, 1, "optimizer"),
    *((tensor, 1, 1, 2, sharding) for tensor in (2, 1) for sharding in SHARDINGS),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("job", "tensor", "context", "expert", "replicas", "sharding", "recompute"),
    [
        *((job, *how, "none") for job in ("llama", "gpt") for how in _SHARED),
        ("moe", 1, 1, 2, 1, "none", "none"),
        ("moe", 1, 1, 2, 1, "optimizer", "none"),
        ("moe", 2, 1, 2, 1, "none", "none"),
        *(("moe", 1, 1, 2, 1, sharding, "none") for sharding in WITHIN_PASSES),
        ("moe", 2, 1, 2, 2, "parameters_kept", "none"),
        ("llama", 2, 1, 1, 1, "none", "attention"),
        ("llama", 1, 2, 1, 1, "none", "attention"),
        ("gpt", 2, 1, 1, 1, "none", "modules"),
        ("moe", 1, 1, 2, 1, "none", "modules"),
    ],
)
def test_ranks_hold_what_is_counted_after_two_micro_batches_and_at_the_step(
    world: RankPool, job: str, tensor: int, context: int, expert: int, replicas: int, sharding: str, recompute: str
) -> None:
    """In the second step, when the optimizer has its states; parameters kept until the step are let go of before it."""
    case = Case(job, "float32", tensor, context, expert, replicas, 1, sharding, "gpipe", recompute)
    case_plan = lowered(case)
    done = world.train(
        case_plan.programs, f"mesh_jobs:{job}_float32", steps=2, directory=str(HERE), check=False, count_memory=True
    )
    (stage,) = case_plan.allocation.stages
    static = static_bytes(case_plan.cells, stage).total
    at_step = counted_at_step(case_plan.cells, stage, case)
    rows = BATCH // MICRO_BATCHES // case.degrees.meshes // (replicas if sharding in WITHIN_PASSES else 1)
    each = activation_bytes(case_plan.cells, stage, rows)
    for program, one in zip(case_plan.programs, done, strict=True):
        bytes_at = held_by(program, one)
        assert bytes_at["F", 2] == pytest.approx(static + 2 * each, rel=CLOSE)
        assert bytes_at["STEP", 0] == pytest.approx(at_step, rel=CLOSE)


def counted_at_step(cells: Problem, stage: Stage, case: Case) -> int:
    """Return the simulator's count when the optimizer steps, without parameters kept until then and their gradients."""
    parts = static_bytes(cells, stage)
    if case.sharding != "parameters_kept":
        return parts.total
    gradient_bytes = weight_bytes(cells, stage).owned * cells.memory.gradient_factor
    return parts.optimizer + -(-gradient_bytes // case.replicas)


def held_by(program: Program, done: dict[str, Any]) -> dict[tuple[str, int], int]:
    """Return the bytes that a rank held in its second step at each instruction, by its kind and micro-batch."""
    assert done["kind"] == "done", done
    words = [(word.kind, word.micro_batch) for word in program.instructions()]
    return {words[index]: size for step, index, size in done["held"] if step == 1 and index < len(words)}


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    ("job", "tensor", "expert", "replicas", "sharding", "recompute"),
    [
        *((*at, 1, 2, how, "none") for at in (("llama", 2), ("gpt", 2), ("llama", 1)) for how in _ALL),
        ("tied", 2, 1, 1, "none", "none"),
        ("moe", 1, 2, 1, "none", "none"),
        ("moe", 1, 2, 1, "gradients", "none"),
        ("llama", 2, 1, 1, "none", "attention"),
        ("llama", 1, 1, 2, "parameters", "full"),
    ],
)
def test_under_autocast_ranks_hold_what_is_counted(
    world: RankPool, job: str, tensor: int, expert: int, replicas: int, sharding: str, recompute: str
) -> None:
    """Parameters in fp32, their copies in 16 bits, and what autocast leaves of activations, which profiles trace."""
    case = Case(job, "float32", tensor, 1, expert, replicas, 1, sharding, "gpipe", recompute)
    case_plan = lowered(case)
    how = {"options": {"precision": "bf16"}, "check": False, "count_memory": True}
    done = world.train(case_plan.programs, f"mesh_jobs:{job}_float32", steps=2, directory=str(HERE), **how)
    (stage,) = case_plan.allocation.stages
    cells = contracted(case, "bf16")
    static = static_bytes(cells, stage).total
    rows = BATCH // MICRO_BATCHES // case.degrees.meshes // (replicas if sharding in WITHIN_PASSES else 1)
    each = activation_bytes(cells, stage, rows)
    for program, one in zip(case_plan.programs, done, strict=True):
        bytes_at = held_by(program, one)
        assert bytes_at["F", 2] == pytest.approx(static + 2 * each, rel=CLOSE)
        assert bytes_at["STEP", 0] == pytest.approx(counted_at_step(cells, stage, case), rel=CLOSE)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(("tensor", "recompute"), [(2, "none"), (1, "full")])
def test_in_16_bits_autocasts_copies_come_and_go_with_parameters(world: RankPool, tensor: int, recompute: str) -> None:
    """Losses equal the ones of ranks that share out nothing, whose copies stay until the step."""
    losses = []
    for sharding in ("none", "parameters_kept", "parameters"):
        case = Case("llama", "float32", tensor, 1, 1, 2, 1, sharding, "gpipe", recompute)
        case_plan = lowered(case)
        how = {"options": {"precision": "bf16"}, "check": False, "count_memory": sharding != "none"}
        done = world.train(case_plan.programs, "mesh_jobs:llama_float32", steps=2, directory=str(HERE), **how)
        losses += [one["losses"] for one in done]
        if sharding == "none":
            continue
        (stage,) = case_plan.allocation.stages
        cells = contracted(case, "bf16")
        for program, one in zip(case_plan.programs, done, strict=True):
            bytes_at = held_by(program, one)
            grown = [bytes_at["F", number] - bytes_at["F", number - 1] for number in (1, 2)]
            if sharding == "parameters":
                assert bytes_at["F", 0] == pytest.approx(static_bytes(cells, stage).total, rel=CLOSE)
                assert grown[0] == pytest.approx(grown[1], rel=CLOSE)
            elif recompute == "none":
                assert grown[0] > 1.5 * grown[1]  # the copies
            assert bytes_at["STEP", 0] == pytest.approx(counted_at_step(cells, stage, case), rel=CLOSE)
    assert losses == [pytest.approx(losses[0], rel=1e-6)] * len(losses)
