"""Curves of whole trainings under every update rule, by the plain trainers that ranks are equal to by test."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tasks import BATCH, TASKS, Task

from penstock.executor.run.chain import Chain
from penstock.executor.run.plain_training import Model, Recipe, ReferenceTrainer

STAGES = 4
MICRO_BATCHES = 4
PIPELINES = 2
RULES = ("synchronous", "weight_stashing", "double_buffered", "double_grouped", "elastic_averaging")


class Curve(NamedTuple):
    """A training: the loss of each global batch (elastic averaging: of ``PIPELINES`` at once), the measure by epoch."""

    task: str
    rule: str
    seed: int
    losses: tuple[float, ...]
    measures: tuple[float, ...]

    @property
    def epochs(self) -> int | None:
        """The epochs until the target was reached; None if it never was."""
        target = TASKS[self.task].target
        return next((e for e, measure in enumerate(self.measures, start=1) if measure <= target), None)


def recipe_of(task: Task, rule: str) -> Recipe:
    """Return a recipe of four stages with about as many layers each.

    PipeDream trains a batch as one micro-batch, the other rules cut it into four.
    """
    layers = len(task.layers())
    bounds = [layers * s // STAGES for s in range(STAGES + 1)]
    count = 1 if rule == "weight_stashing" else MICRO_BATCHES
    return Recipe(
        rule,
        tuple((bounds[s], bounds[s + 1] - 1) for s in range(STAGES)),
        ((BATCH // count, count),),
        pipelines=PIPELINES if rule == "elastic_averaging" else 1,
    )


def train(name: str, rule: str, seed: int) -> Curve:
    """Run one training from its first epoch to its last."""
    torch.set_num_threads(1)
    task = TASKS[name]
    chain = Chain(task)
    recipe = recipe_of(task, rule)
    trainer = ReferenceTrainer(chain, recipe, seed=seed, expected_count=task.terms)
    judge = Model(chain, seed)
    steps = task.batches_per_epoch // recipe.pipelines
    losses, measures = [], []
    for epoch in range(task.epochs):
        losses += [trainer.train(epoch * steps + step) for step in range(steps)]
        measures.append(validated(task, judge, trainer))
    return Curve(name, rule, seed, tuple(losses), tuple(measures))


def validated(task: Task, judge: Model, trainer: ReferenceTrainer) -> float:
    """Return the measure of the newest weights on the samples held out.

    Elastic averaging: of the reference model's weights.
    """
    x, y = task.validation
    with torch.no_grad():
        for name, weight in trainer.weights().items():
            judge.parameters[name].copy_(weight)
        env = {"x": x}
        for i, module in judge.modules.items():
            spec = judge.chain.specs[i]
            results = judge.chain.call(i, module, [env[each] for each in spec.reads])
            env.update(zip(spec.writes, results, strict=True))
        return task.validate(env["x"], y)
