"""What ranks that share layers hold, storage by storage, against what the judge counts of one of their GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from mesh_cases import BATCH, MICRO_BATCHES, Case, lowered
from rank_pool import RankPool

from penstock.schemas.program import SHARDINGS, WITHIN_PASSES
from penstock.solvers.costs.memory import activation_bytes, static_bytes, weight_bytes

HERE = Path(__file__).parent
CLOSE = 0.03
_SHARED = [
    (2, 1, 1, 1, "none"),
    (2, 1, 1, 2, "none"),
    (2, 1, 1, 2, "optimizer"),
    (1, 1, 1, 2, "optimizer"),
    (1, 2, 1, 1, "none"),
    (2, 2, 1, 1, "optimizer"),
    *((tensor, 1, 1, 2, sharding) for tensor in (2, 1) for sharding in SHARDINGS),
]


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
    made = lowered(case)
    done = world.train(
        made.programs, f"mesh_jobs:{job}_float32", steps=2, directory=str(HERE), check=False, count_memory=True
    )
    (stage,) = made.allocation.stages
    parts = static_bytes(made.cells, stage)
    static = at_step = parts.total
    if sharding == "parameters_kept":
        own = weight_bytes(made.cells, stage).owned * made.cells.memory.gradient_factor
        at_step = parts.optimizer + -(-own // replicas)
    rows = BATCH // MICRO_BATCHES // case.degrees.meshes // (replicas if sharding in WITHIN_PASSES else 1)
    each = activation_bytes(made.cells, stage, rows)
    for program, one in zip(made.programs, done, strict=True):
        assert one["kind"] == "done", one
        held = {index: size for step, index, size in one["held"] if step == 1}
        kinds = [(word.kind, word.micro_batch) for word in program.instructions()]
        assert held[kinds.index(("F", 2))] == pytest.approx(static + 2 * each, rel=CLOSE)
        assert held[kinds.index(("STEP", 0))] == pytest.approx(at_step, rel=CLOSE)
