"""The plain trainers against the papers' equations, written out for a chain of scalars; and ``--check`` by any rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import rule_jobs
import torch
from paper_models import awd_lstm
from pipelines import Part, averaging_programs_of, periodic_programs_of, programs_of
from rank_pool import RankPool, differences
from repository import ROOT
from torch import Tensor, nn

from penstock.executor.run.chain import Chain
from penstock.executor.run.check import TOLERANCE
from penstock.executor.run.job import LayerSpec, SimpleJob
from penstock.executor.run.plain_training import Recipe, ReferenceTrainer

PAPERS = str(ROOT / "benchmarks/papers")
RATE, MOMENTUM = 0.05, 0.5
SAMPLES, LAYERS = 4, 4


def test_an_lstm_with_dropout_is_cut_as_one_process_trains_it(pool: RankPool) -> None:
    """An LSTM's result is not contiguous, a message's tensor is, and dropout draws by where numbers lie."""
    programs = programs_of(awd_lstm.tiny, [Part(2, (0,)), Part(3, (1,))], 4)
    gradients, loss = differences(pool.train(programs, "paper_models.awd_lstm:tiny", steps=2, directory=PAPERS))
    assert gradients <= TOLERANCE[torch.float32]
    assert loss <= TOLERANCE[torch.float32]


class Scale(nn.Module):
    """Multiplies by its one parameter."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def sample(batch: int, row: int) -> tuple[float, float]:
    """Return input and target."""
    return 1.0 + 0.1 * ((3 * batch + row) % 5), 0.7 - 0.05 * ((batch + row) % 3)


class Product(SimpleJob):
    """y = w_0 w_1 w_2 w_3 x, trained by the squared error."""

    def layers(self) -> Sequence[LayerSpec]:
        return [LayerSpec(f"scale{i}", lambda start=start: Scale(start)) for i, start in enumerate(START)]

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        pairs = torch.tensor([sample(step, row) for row in rows], dtype=torch.float64)
        return {"x": pairs[:, :1]}, pairs[:, 1:]

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        return ((outputs["x"] - targets) ** 2).sum(), len(targets)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=RATE, momentum=MOMENTUM)


START = (0.9, 1.1, 0.8, 1.2)
JOB = Product("product", batch_size=SAMPLES, seed=0)


def slope(weights: Sequence[float], batch: int, rows: Sequence[int]) -> list[float]:
    """Compute the derivative of the mean squared error over some rows, for each weight, by hand."""
    slopes = []
    for i in range(LAYERS):
        others = math.prod(w for j, w in enumerate(weights) if j != i)
        terms = [2 * (math.prod(weights) * x - y) * others * x for x, y in (sample(batch, row) for row in rows)]
        slopes.append(sum(terms) / len(terms))
    return slopes


def descend(w: list[float], gradient: Sequence[float], speed: list[float]) -> list[float]:
    """Step SGD with momentum; ``speed`` changes in place."""
    for i, g in enumerate(gradient):
        speed[i] = MOMENTUM * speed[i] + g
    return [a - RATE * b for a, b in zip(w, speed, strict=True)]


def by_batches(delays: Sequence[int], steps: int) -> list[float]:
    """Compute w^{t+1} = w^t - ν ∇f(w_i^{t - delay_i}); ``f`` is the mean over a global batch."""
    history, speed = [list(START)], [0.0] * LAYERS
    for t in range(steps):
        point = [history[max(0, t - delay)][i] for i, delay in enumerate(delays)]
        history.append(descend(history[t], slope(point, t, range(SAMPLES)), speed))
    return history[-1]


def by_micro_batches(steps: int) -> list[float]:
    """Compute PipeDream: w^{t+1} = w^t - ν ∇f(w_1^{t-N+1}, …, w_N^t), t counting micro-batches of two samples."""
    history, speed = [list(START)], [0.0] * LAYERS
    for t in range(2 * steps):
        point = [history[max(0, t - (LAYERS - 1 - i))][i] for i in range(LAYERS)]
        rows = range(2 * (t % 2), 2 * (t % 2) + 2)
        history.append(descend(history[t], slope(point, t // 2, rows), speed))
    return history[-1]


def averaged(steps: int) -> list[float]:
    """Compute AvgPipe with two models: x <- (1-α) x + α x~ + Δ, x~ <- x~ + ΣΔ / 2."""
    models, speeds, reference = [list(START), list(START)], [[0.0] * LAYERS, [0.0] * LAYERS], list(START)
    for t in range(steps):
        updates = []
        for p, x in enumerate(models):
            new = descend(x, slope(x, 2 * t + p, range(SAMPLES)), speeds[p])
            updates.append([a - b for a, b in zip(new, x, strict=True)])
        models = [
            [0.5 * a + 0.5 * r + d for a, r, d in zip(x, reference, delta, strict=True)]
            for x, delta in zip(models, updates, strict=True)
        ]
        reference = [r + (a + b) / 2 for r, a, b in zip(reference, *updates, strict=True)]
    return reference


@pytest.mark.parametrize(
    ("rule", "by_hand"),
    [
        pytest.param("synchronous", lambda n: by_batches([0, 0, 0, 0], n), id="synchronous"),
        pytest.param("double_buffered", lambda n: by_batches([1, 1, 1, 1], n), id="2bw"),
        pytest.param("double_grouped", lambda n: by_batches([1, 1, 0, 0], n), id="2gw"),
        pytest.param("weight_stashing", by_micro_batches, id="pipedream"),
        pytest.param("elastic_averaging", averaged, id="avgpipe"),
    ],
)
def test_plain_trainers_follow_the_equations(rule: str, by_hand: Callable[[int], list[float]]) -> None:
    pipelines = 2 if rule == "elastic_averaging" else 1
    recipe = Recipe(rule, tuple((i, i) for i in range(LAYERS)), ((2, 2),), pipelines=pipelines)
    trainer = ReferenceTrainer(Chain(JOB), recipe, seed=0, expected_count=SAMPLES)
    losses = [trainer.train(step) for step in range(7)]
    weights = [trainer.weights()[f"scale{i}.weight"].item() for i in range(LAYERS)]
    assert weights == pytest.approx(by_hand(7), rel=1e-12)
    assert weights != pytest.approx(by_hand(6), rel=1e-6)
    assert losses[-1] < losses[0]


HALVES = [Part(3, (0,)), Part(3, (1,))]
GROUPS = [Part(2, (0,)), Part(1, (1,)), Part(2, (0,)), Part(1, (1,))]


@pytest.mark.cases(2)
@pytest.mark.parametrize("rule", ["weight_stashing", "double_buffered", "double_grouped", "elastic_averaging"])
def test_a_run_by_any_rule_can_be_checked(pool: RankPool, rule: Any) -> None:
    if rule == "elastic_averaging":
        programs = averaging_programs_of(rule_jobs.adam, HALVES, 3, 2)
        results = pool.train(programs, "rule_jobs:adam", steps=4)
    else:
        parts = GROUPS if rule == "double_grouped" else HALVES
        (programs,) = periodic_programs_of(rule_jobs.adam, parts, 3, rule, (4,))
        results = pool.train(programs, "rule_jobs:adam", steps=4, segments=[0])
    assert [one["kind"] for one in results] == ["done"] * len(programs), results
    assert len({(one["gradient_check"], one["loss_check"]) for one in results}) == 1
    assert results[0]["gradient_check"] <= 100 * TOLERANCE[torch.float64]
    assert results[0]["loss_check"] <= 100 * TOLERANCE[torch.float64]
