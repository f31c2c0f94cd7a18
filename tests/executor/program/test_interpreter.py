"""Runs with any stages: a run's first gradients and loss equal one process's (design, promise 6)."""

from __future__ import annotations

from typing import Any

import pytest
import small_jobs
import torch
from pipelines import Part, programs_of
from rank_pool import SEED, RankPool, differences

from penstock.executor.run.chain import Chain
from penstock.executor.run.check import TOLERANCE
from penstock.executor.run.plain_training import Recipe, ReferenceTrainer

TWO = [Part(3, (0,)), Part(3, (1,))]
THREE = [Part(2, (0,)), Part(2, (1,)), Part(2, (2,))]


# Promise 6, first half: nothing apart.
EXACT = [
    pytest.param("plain", TWO, 4, {}, id="one-to-one"),
    pytest.param("plain", THREE, 4, {"warmup": (4, 4, 4)}, id="gpipe"),
    pytest.param("plain", [Part(6, (0,))], 3, {}, id="one-stage"),
    pytest.param("uneven64", THREE, 5, {}, id="micro-batches-of-5-and-4"),
    pytest.param(
        "plain",
        [Part(2, (0,)), Part(1, (1,)), Part(1, (0,)), Part(2, (1,))],
        2,
        {"rows": ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]},
        id="interleaved",
    ),
    pytest.param(
        "plain", [Part(3, (0,)), Part(3, (0,))], 2, {"rows": ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]}, id="one-device"
    ),
    pytest.param("plain", [Part(3, (0,), recompute=((0, 2),)), Part(3, (1,))], 4, {}, id="recompute"),
    pytest.param("plain", [Part(3, (0,)), Part(3, (1,), recompute=((3, 5),))], 4, {}, id="recompute-last-stage"),
    pytest.param("dropout", TWO, 4, {}, id="dropout"),
    pytest.param("dropout", [Part(3, (0,), recompute=((0, 2),)), Part(3, (1,))], 4, {}, id="dropout-recompute"),
    pytest.param(
        "dropout", [Part(3, (0,), recompute=((1, 1),)), Part(3, (1,), recompute=((4, 5),))], 4, {}, id="dropout-ranges"
    ),
    pytest.param("frozen_front", [Part(1, (0,)), Part(2, (1,)), Part(2, (2,))], 3, {}, id="frozen"),
    pytest.param("encoder_decoder", [Part(3, (0,)), Part(2, (1,)), Part(1, (2,))], 3, {}, id="encoder-decoder"),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("job", "parts", "count", "more"), EXACT)
def test_plain_stages_are_0_apart(pool: RankPool, job: str, parts: list[Part], count: int, more: Any) -> None:
    programs = programs_of(getattr(small_jobs, job), parts, count, **more)
    assert differences(pool.train(programs, job))[0] == 0.0


REORDERED = "0F0 0F1 0F2 0F3 {} 0B0 0B1 0B2 0B3"

CLOSE = [
    pytest.param("plain", [Part(3, (0, 1)), Part(3, (2,))], 3, {}, id="many-to-one"),
    pytest.param("plain64", [Part(3, (0,)), Part(3, (1, 2))], 3, {}, id="one-to-many"),
    pytest.param("plain64", [Part(2, (0, 1)), Part(2, (2, 3, 4)), Part(2, (5,))], 3, {}, id="2-3-1"),
    pytest.param("plain", [Part(2, (0, 1, 2)), Part(4, (3, 4))], 2, {"bucket_bytes": 2000}, id="buckets"),
    pytest.param("plain64", [Part(2, (0, 1)), Part(4, (2,))], 2, {"overlap": False}, id="no-overlap"),
    pytest.param("uneven64", [Part(3, (0, 1, 2)), Part(3, (3, 4))], 5, {}, id="uneven-rows-two-classes"),
    pytest.param(
        "plain64", [Part(3, (0, 1), "round_robin"), Part(3, (2,))], 4, {"warmup": (2, 1)}, id="round-robin-to-one"
    ),
    pytest.param(
        "uneven64", [Part(3, (0,)), Part(3, (1, 2), "round_robin")], 5, {"warmup": (3, 2)}, id="one-to-round-robin"
    ),
    pytest.param(
        "plain64", [Part(3, (0, 1), "round_robin"), Part(3, (2, 3))], 4, {"warmup": (4, 1)}, id="round-robin-to-rows"
    ),
    pytest.param(
        "plain64",
        [Part(2, (0, 1)), Part(2, (2,)), Part(2, (0,))],
        2,
        {"rows": ["0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]},
        id="replica-and-later-stage-on-one-device",
    ),
    pytest.param(
        "plain64",
        [Part(2, (0, 1)), Part(4, (0, 1))],
        2,
        {"rows": ["0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"] * 2},
        id="local-slices",
    ),
    pytest.param(
        "plain64",
        [Part(2, (0,)), Part(2, (1,)), Part(2, (0,))],
        4,
        {"rows": [REORDERED.format("2F2 2B2 2F0 2B0 2F3 2B3 2F1 2B1"), "1F2 1F0 1F3 1F1 1B2 1B0 1B3 1B1"]},
        id="last-stage-out-of-order",
    ),
    pytest.param("residual", [Part(2, (0,)), Part(2, (1,)), Part(1, (2,)), Part(3, (3,))], 3, {}, id="skip-passed-on"),
    pytest.param(
        "residual64",
        [Part(3, (0, 1)), Part(1, (2,), recompute=((3, 3),)), Part(4, (3, 4), recompute=((4, 4), (6, 7)))],
        3,
        {"bucket_bytes": 1000},
        id="skip-replicas-recompute",
    ),
    pytest.param(
        "residual64", [Part(4, (0,)), Part(4, (0,))], 3, {"rows": ["0F0:3 1F0:3 1B0:3 0B0:3"]}, id="skip-local"
    ),
    pytest.param("encoder_decoder", [Part(2, (0, 1)), Part(4, (2, 3))], 2, {}, id="encoder-decoder-replicas"),
    pytest.param("masked64", [Part(2, (0,)), Part(2, (1, 2))], 4, {}, id="terms-differ-by-sample"),
    pytest.param(
        "dropout64", [Part(3, (0, 1), recompute=((0, 2),)), Part(3, (2, 3, 4))], 2, {}, id="dropout-replicas-recompute"
    ),
    pytest.param("frozen_front", [Part(3, (0, 1)), Part(2, (2, 3))], 2, {}, id="frozen-replicas"),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("job", "parts", "count", "more"), CLOSE)
def test_replicas_and_orders_stay_within_rounding(
    pool: RankPool, job: str, parts: list[Part], count: int, more: Any
) -> None:
    small_job = getattr(small_jobs, job)
    gradients, loss = differences(pool.train(programs_of(small_job, parts, count, **more), job))
    assert gradients <= TOLERANCE[small_job.dtype]
    assert loss <= TOLERANCE[small_job.dtype]


def test_every_step_trains_what_one_process_trains(pool: RankPool) -> None:
    """Five steps with an optimizer, replicas and dropout: the losses follow a plain loop's."""
    programs = programs_of(small_jobs.masked64, [Part(2, (0, 1)), Part(2, (2,))], 3)
    losses = pool.train(programs, "masked64", steps=5)[0]["losses"]
    assert losses == pytest.approx(plain_losses(small_jobs.masked64, 5), rel=1e-11)


def plain_losses(job: Any, steps: int) -> list[float]:
    """Train in a plain loop: whole batches, the mean loss, the job's optimizer; only the layers are the executor's."""
    chain = Chain(job)
    modules = [chain.build_layer(i, SEED) for i in range(len(chain.specs))]
    optimizer = job.optimizer([p for module in modules for p in module.parameters()])
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total, count = whole_batch(job, chain, modules, step)
        (total / count).backward()
        optimizer.step()
        losses.append(float(total.detach()) / count)
    return losses


def whole_batch(job: Any, chain: Chain, modules: list[torch.nn.Module], step: int) -> tuple[torch.Tensor, int]:
    env, targets = job.batch(step, range(job.batch_size))
    for spec, module in zip(chain.specs, modules, strict=True):
        results = module(*[env[name] for name in spec.reads])
        env |= dict(zip(spec.writes, results if isinstance(results, tuple) else (results,), strict=True))
    return job.loss({name: env[name] for name in job.outputs}, targets)


@pytest.mark.parametrize("job", ["uneven64", "masked64", "residual64"])
def test_the_reference_is_the_gradient_of_the_mean_over_the_global_batch(job: str) -> None:
    """Against autograd on the whole batch at once, whatever count the reference expects."""
    small_job = getattr(small_jobs, job)
    chain = Chain(small_job)
    (program,) = programs_of(small_job, [Part(len(chain.specs), (0,))], 5)
    gradients: dict[str, torch.Tensor] = {}
    recipe = Recipe("synchronous", ((0, len(chain.specs) - 1),), program.row_classes)
    trainer = ReferenceTrainer(
        chain, recipe, seed=SEED, expected_count=7.0, on_update=lambda _, __, values: gradients.update(values)
    )
    mean = trainer.train(0)
    modules = [chain.build_layer(i, SEED) for i in range(len(chain.specs))]
    total, count = whole_batch(small_job, chain, modules, 0)
    (total / count).backward()
    assert mean == pytest.approx(float(total.detach()) / count, rel=1e-12)
    for spec, module in zip(chain.specs, modules, strict=True):
        for name, parameter in module.named_parameters():
            wanted = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            torch.testing.assert_close(gradients[f"{spec.name}.{name}"], wanted, rtol=1e-11, atol=1e-12)


def test_the_check_sees_a_layer_that_mixes_samples(pool: RankPool) -> None:
    """Batch normalisation over half a micro-batch is another function: replicas by rows cannot train it."""
    programs = programs_of(small_jobs.normalised, [Part(2, (0, 1)), Part(1, (2,))], 2)
    assert differences(pool.train(programs, "normalised"))[0] > 1e-4


def test_a_trace_has_every_instruction_in_a_common_clock(pool: RankPool) -> None:
    """Ranks that say they are on different hosts measure their clocks' distance; here it is next to nothing."""
    programs = programs_of(small_jobs.plain, TWO, 3)
    results = pool.train(programs, "plain", steps=2, trace_steps=1, host_of_rank=["a", "b"])
    for program, result in zip(programs, results, strict=True):
        (trace,) = [event["rank_trace"] for event in result["events"] if event["kind"] == "trace"]
        assert trace["step"] == 1
        wanted = [str(one).partition("@")[0] for one in program.instructions()]
        assert [event["instruction"] for event in trace["events"]] == wanted
        times = [t for event in trace["events"] for t in (event["start_ns"], event["end_ns"])]
        assert times == sorted(times)
        assert times[-1] < 10**10
    first, second = [
        {event["instruction"]: event for event in result["events"][-1]["rank_trace"]["events"]} for result in results
    ]
    slack_ns = 10**7
    for m in range(3):
        assert first[f"0SEND_F{m}"]["start_ns"] <= second[f"1F{m}"]["start_ns"] + slack_ns
        assert second[f"1SEND_B{m}"]["start_ns"] <= first[f"0B{m}"]["start_ns"] + slack_ns
