"""Ranks that share layers, with everything that a run has besides: what they train is what one process trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensor_jobs
import torch
from pipelines import Part, programs_of
from rank_pool import SEED, RankPool

from penstock.executor.run.chain import Chain
from penstock.executor.stage.stage_module import back_loss
from penstock.schemas.program import SHARDINGS
from penstock.solvers.schedules.zero_bubble import zb_h1

LAYERS = 6
WHOLE = [Part(LAYERS, (0,))]
TWO = [Part(3, (0,)), Part(3, (1,))]
KEPT = [Part(3, (0,)), Part(3, (1, 2))]
PAIR = [Part(LAYERS, (0, 1))]
RECOMPUTED = [Part(3, (0,), "rows", ((0, 1),)), Part(3, (1,), "rows", ((3, 5),))]


def checked(results: list[dict[str, Any]]) -> None:
    for one in results:
        assert one["kind"] == "done", one
        assert one["gradient_check"] <= 1e-12
        assert one["loss_check"] <= 1e-12


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("parts", "how"),
    [
        pytest.param(TWO, {}, id="across-stages"),
        pytest.param(WHOLE, {}, id="within-a-stage"),
        pytest.param(PAIR, {"shard_states": True, "bucket_bytes": 20_000}, id="states-shared-out"),
        pytest.param(TWO, {"schedule": zb_h1}, id="zero-bubble"),
        pytest.param(RECOMPUTED, {}, id="recomputed"),
        pytest.param(PAIR, {"sharding": "gradients"}, id="gradients-shared-out"),
        pytest.param(PAIR, {"sharding": "parameters"}, id="parameters-shared-out"),
        pytest.param(KEPT, {"sharding": "parameters_kept", "bucket_bytes": 20_000}, id="parameters-kept"),
    ],
)
def test_tied_weights_and_clipping_at_tensor_2(pool: RankPool, parts: list[Part], how: dict[str, Any]) -> None:
    """Embedding and scores are one weight, of which each rank has a part; what clips shows that the norm is right."""
    programs = programs_of(tensor_jobs.tied, parts, 2, tensor=2, norm=True, **how)
    checked(pool.train(programs, "tensor_jobs:tied", steps=3, options={"clip_norm": 0.5}))


@pytest.mark.tier("nightly")
def test_the_norm_at_tensor_2_is_torchs(pool: RankPool, tmp_path: Path) -> None:
    """Parts count on every rank, what ranks have alike once; states shared out or not."""
    job = tensor_jobs.gpt
    chain = Chain(job)
    modules = [chain.build_layer(i, SEED) for i in range(LAYERS)]
    inputs, targets = job.batch(0, range(job.batch_size))
    x = next(iter(inputs.values()))
    for module in modules:
        x = module(x)
    back_loss(*job.loss({"x": x}, targets))
    gradients = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    wanted = float(torch.nn.utils.get_total_norm(gradients))
    ways: list[dict[str, Any]] = [{"shard_states": False}, {"shard_states": True}]
    for number, how in enumerate((*ways, *({"sharding": sharding} for sharding in SHARDINGS))):
        programs = programs_of(job, PAIR, 2, tensor=2, norm=True, **how)
        path = tmp_path / f"{number}.jsonl"
        options = {"clip_norm": 0.5, "metrics_path": str(path)}
        checked(pool.train(programs, "tensor_jobs:gpt", steps=1, options=options))
        first = json.loads(path.read_text().splitlines()[0])
        assert first["grad_norm"] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_at_tensor_2_and_with_shardings(pool: RankPool, precision: str) -> None:
    """Losses equal one rank's in the same precision, to its rounding; fp16 under a scale of the loss."""
    options = {"precision": precision, "clip_norm": 0.5}
    losses = []
    for parts, how in ((WHOLE, {}), (PAIR, {"tensor": 2}), *((PAIR, {"sharding": each}) for each in SHARDINGS)):
        programs = programs_of(tensor_jobs.gpt_single, parts, 2, norm=True, **how)
        results = pool.train(programs, "tensor_jobs:gpt_single", steps=3, options=options, check=parts is PAIR)
        assert all(one["kind"] == "done" for one in results), results
        losses.append(results[0]["losses"])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=2e-3)
    assert results[0]["gradient_check"] <= results[0]["gradient_tolerance"]


@pytest.mark.tier("nightly")
def test_evaluation_at_tensor_2(pool: RankPool) -> None:
    results = []
    for parts, tensor in ((WHOLE, 1), (TWO, 2)):
        programs = programs_of(tensor_jobs.gpt, parts, 2, tensor=tensor)
        done = pool.train(programs, "tensor_jobs:gpt", steps=2, options={"evaluate_every": 1}, check=False)
        assert all(one["kind"] == "done" for one in done), done
        results.append([event["loss"] for one in done for event in one["events"] if event["kind"] == "evaluation"])
    assert len(results[0]) == 2
    assert results[1] == pytest.approx(results[0], rel=1e-12)
