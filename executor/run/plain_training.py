"""A plain implementation of every update rule: one process, one micro-batch after the other.

It loops over the equations of ALGORITHMS 5.1 and 6.1; nothing is split, sent, overlapped or shared. A run is right when
its losses and weights equal the ones computed here (``penstock run --check``). Curves of whole trainings come cheaply
from it.

Version v of a stage's weights is the result of v updates. Micro-batch m (counted through the global batches) runs
forward and backward with version ``versions(stage, m)`` of each stage:

| rule | version of stage i of N for micro-batch m of global batch t |
|---|---|
| synchronous | t |
| weight_stashing (PipeDream) | m - (N - 1 - i), at least 0; an update after every micro-batch |
| double_buffered (PipeDream-2BW) | t - 1, at least 0 |
| double_grouped (WPipe, 2GW) | t - 1, at least 0, in the first half of the stages; t in the second |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.executor.run.chain import Chain
from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.interface import Runtime
from penstock.executor.stage.precision import FULL, Training
from penstock.executor.stage.stage_module import back_loss, layer_seed, step_seed
from penstock.schemas.errors import InvalidDocument

Slices = dict[int, tuple[tuple[tuple[int, int], ...], ...]]
"""The [low, high) of each replica per row class, for layers whose replicas split each micro-batch."""

Versions = Callable[[int, int], int]
"""A function that returns the version of a stage's weights that a micro-batch uses."""

OnUpdate = Callable[[int, int, dict[str, Tensor]], None]
"""A callback with a stage, the number of its update, and the gradients that the update uses, by full name."""


@dataclass(frozen=True)
class Recipe:
    """The parts of a plan that influence what is trained.

    ``stages``: first and last layer of each stage of one pipeline. ``row_classes``: (rows, number of micro-batches),
    larger rows first. ``update_every``: micro-batches per update of each stage (None: a global batch; weight stashing:
    one). ``pipelines`` and ``staleness`` belong to elastic averaging.
    """

    update_rule: str
    stages: tuple[tuple[int, int], ...]
    row_classes: tuple[tuple[int, int], ...]
    update_every: tuple[int, ...] | None = None
    pipelines: int = 1
    staleness: int = 0

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a global batch."""
        return sum(number for _, number in self.row_classes)

    @property
    def every(self) -> tuple[int, ...]:
        """The micro-batches per update of each stage."""
        if self.update_every is not None:
            return self.update_every
        return (1 if self.update_rule == "weight_stashing" else self.num_micro_batches,) * len(self.stages)

    def micro_batch(self, place: int) -> tuple[range, int]:
        """Return the rows of the global batch for the micro-batch at a place, and their class."""
        (rows, number), *smaller = self.row_classes
        if place < number or not smaller:
            return range(rows * place, rows * (place + 1)), 0
        start = rows * number + smaller[0][0] * (place - number)
        return range(start, start + smaller[0][0]), 1

    def version(self, stage: int, micro_batch: int) -> int:
        """Return the version by the rule's paper; see the module."""
        count, batch = len(self.stages), micro_batch // self.num_micro_batches
        match self.update_rule:
            case "weight_stashing":
                return max(0, micro_batch - (count - 1 - stage)) // self.every[stage]
            case "double_buffered":
                return max(0, batch - 1)
            case "double_grouped" if 2 * stage < count:
                return max(0, batch - 1)
            case _:
                return batch


class Model:
    """The unsplit model: its layers, and its parameters by full name. ``drawing``: layers that drew random numbers.

    ``slices``: where replicas split each micro-batch, layers that draw random numbers run slice by slice, since each
    replica draws for its rows.
    """

    def __init__(
        self,
        chain: Chain,
        seed: int,
        slices: Slices | None = None,
        autocast: AbstractContextManager[Any] | None = None,
        runtime: Runtime = CPU,
    ) -> None:
        self.chain = chain
        self.runtime = runtime
        self.seed = seed
        self.autocast = autocast or nullcontext()
        self.slices = slices or {}
        self.drawing: set[str] = set()
        self.modules = chain.build_layers(range(len(chain.specs)), seed, runtime.device)
        for module in self.modules.values():
            module.train()
        self.parameters = {name: p for name, p in chain.named_parameters(self.modules) if p.requires_grad}

    def of_layers(self, first: int, last: int) -> dict[str, nn.Parameter]:
        """Return the parameters that some layers have and no earlier layer has."""
        before = {id(p) for i in range(first) for p in self.modules[i].parameters()}
        ids = {id(p) for i in range(first, last + 1) for p in self.modules[i].parameters()} - before
        return {name: p for name, p in self.parameters.items() if id(p) in ids}

    def forward(self, recipe: Recipe, number: int, place: int) -> tuple[Tensor, int]:
        """Return the loss of a micro-batch of global batch ``number``: its sum, and the number of terms."""
        with self.autocast:
            return self._forward(recipe, number, place)

    def _forward(self, recipe: Recipe, number: int, place: int) -> tuple[Tensor, int]:
        chain, key = self.chain, step_seed(self.seed, number)
        rows, cls = recipe.micro_batch(place)
        inputs, targets = self.runtime.moved(chain.job.batch(number, rows))
        env, ends = dict(inputs), {last for _, last in recipe.stages}
        for i, module in self.modules.items():
            spec = chain.specs[i]
            parts = (self.slices[i][cls] if i in self.slices else None) or ((0, len(rows)),)
            seeds = [layer_seed(self.seed, place, spec.name, low) + key for low, _ in parts]
            results = self._run(i, module, [env[name] for name in spec.reads], parts, seeds)
            if i in ends:  # like tensors of messages: dropout draws by memory layout
                results = [tensor.contiguous() for tensor in results]
            env.update(zip(spec.writes, results, strict=True))
        return chain.loss(env, targets)

    def _run(
        self, index: int, module: nn.Module, arguments: Sequence[Tensor], parts: Any, seeds: Sequence[int]
    ) -> Sequence[Tensor]:
        """Run a layer on a whole micro-batch; slice by slice if it draws numbers and there are several slices."""
        reseed, random_state = self.runtime.seed, self.runtime.random_state
        reseed(seeds[0])
        before = random_state()
        results = self.chain.call(index, module, arguments)
        if torch.equal(before, random_state()):
            return results
        self.drawing.add(self.chain.names[index])
        if len(parts) == 1:
            return results
        pieces = []
        for (low, high), seed in zip(parts, seeds, strict=True):
            reseed(seed)
            pieces.append(self.chain.call(index, module, [tensor[low:high] for tensor in arguments]))
        return [torch.cat(column) for column in zip(*pieces, strict=True)]


class _Stage:
    """The weights of a stage, version by version, and the optimizer that makes the next version from the newest."""

    def __init__(self, chain: Chain, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.newest = [nn.Parameter(p.detach().clone()) for p in parameters.values()]
        self.optimizer = chain.job.optimizer(self.newest) if self.newest else None
        make: Any = getattr(chain.job, "lr_scheduler", None)
        self.schedule: Any = make(self.optimizer) if make is not None and self.optimizer is not None else None
        self.versions = {0: self._copy()}
        self.updates = 0

    def load(self, version: int) -> None:
        """Copy a version into the layers."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters.values(), self.versions[version], strict=True):
                parameter.copy_(value)

    def update(self, factor: float) -> dict[str, Tensor]:
        """Make the next version from the gradients since the last one; return these gradients."""
        gradients = {}
        for (name, parameter), newest in zip(self.parameters.items(), self.newest, strict=True):
            newest.grad, parameter.grad = parameter.grad, None
            if newest.grad is not None and factor != 1.0:
                newest.grad.mul_(factor)
            gradients[name] = torch.zeros_like(newest) if newest.grad is None else newest.grad.clone()
        if self.optimizer is not None:
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.updates += 1
        self.versions[self.updates] = self._copy()
        return gradients

    def forget(self, version: int) -> None:
        """Delete the versions before this one."""
        self.versions = {v: weights for v, weights in self.versions.items() if v >= version}

    def _copy(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.newest]


class ReferenceTrainer:
    """A trainer for any update rule; steps must follow each other from 0 on.

    ``expected_count``: the number of terms of a global batch's loss that each backward assumes. ``versions``: the
    versions of a run with another order of forwards; by default, the versions of the papers. ``training``: precision
    and clipping.
    """

    def __init__(
        self,
        chain: Chain,
        recipe: Recipe,
        *,
        seed: int,
        expected_count: float,
        versions: Versions | None = None,
        slices: Slices | None = None,
        on_update: OnUpdate | None = None,
        training: Training = FULL,
        runtime: Runtime = CPU,
    ) -> None:
        self.chain = chain
        self.recipe = recipe
        self.expected_count = expected_count
        self._version = versions or recipe.version
        self._on_update = on_update
        self._averaged = recipe.update_rule == "elastic_averaging" and recipe.pipelines > 1
        lanes = recipe.pipelines if recipe.update_rule == "elastic_averaging" else 1
        self._clip_norm = training.clip_norm
        self.models = [Model(chain, seed, slices, training.autocast(runtime.device), runtime) for _ in range(lanes)]
        self.stages = [
            [_Stage(chain, model.of_layers(first, last)) for first, last in recipe.stages] for model in self.models
        ]
        self.references = [self._weights_of(0)] if self._averaged else []
        self._updates: list[dict[str, Tensor]] = []

    def train(self, step: int) -> float:
        """Train a step, and return its mean loss: a global batch, or one per pipeline under elastic averaging."""
        lanes = len(self.models)
        sums = [self._global_batch(lane, step, step * lanes + lane) for lane in range(lanes)]
        if self._averaged:
            self._average()
        return sum(loss for loss, _ in sums) / sum(count for _, count in sums)

    def weights(self) -> dict[str, Tensor]:
        """Return the newest weights; under elastic averaging the reference model."""
        return self.references[-1] if self._averaged else self._weights_of(0)

    def _weights_of(self, lane: int) -> dict[str, Tensor]:
        return {
            name: newest.detach().clone()
            for stage in self.stages[lane]
            for name, newest in zip(stage.parameters, stage.newest, strict=True)
        }

    def _global_batch(self, lane: int, step: int, number: int) -> tuple[float, int]:
        """Train one global batch with one model; return the sum of the loss and its number of terms."""
        model, stages, recipe = self.models[lane], self.stages[lane], self.recipe
        count = recipe.num_micro_batches
        before = self._weights_of(lane) if self._averaged else {}
        losses, terms = 0.0, 0
        for place in range(count):
            m = step * count + place
            for s, stage in enumerate(stages):
                version = self._version(s, m)
                stage.forget(version)
                stage.load(version)
            loss, own_terms = model.forward(recipe, number, place)
            losses, terms = losses + float(loss.detach().double()), terms + own_terms
            one_by_one = recipe.update_rule == "weight_stashing"
            back_loss(loss, own_terms if one_by_one else self.expected_count)
            if place == count - 1 and terms <= 0:
                raise InvalidDocument(f"the loss of step {step} has {terms} terms; its mean is undefined")
            mean = self.expected_count / terms if place == count - 1 else 1.0
            if place == count - 1 and self._clip_norm is not None:
                mean *= self._clipped(model, mean)
            for s, stage in enumerate(stages):
                every = recipe.every[s]
                if (m + 1) % every == 0:
                    gradients = stage.update(1 / every if one_by_one else mean)
                    if self._on_update is not None:
                        self._on_update(len(stages) * lane + s, stage.updates - 1, gradients)
        if self._averaged:
            self._dilute(lane, before)
        return losses, terms

    def _clipped(self, model: Model, factor: float) -> float:
        """Return the factor for all gradients, after ``factor``, that limits their norm to the run's clipping norm."""
        squares = sum(
            float((p.grad.double() * factor).square().sum()) for p in model.parameters.values() if p.grad is not None
        )
        assert self._clip_norm is not None
        return min(1.0, self._clip_norm / (math.sqrt(squares) + 1e-6))

    def _dilute(self, lane: int, before: dict[str, Tensor]) -> None:
        """Compute x <- (1 - α) x + α x~ + Δ, and keep Δ for the reference model."""
        alpha = 1 / self.recipe.pipelines
        reference = self.references[max(0, len(self.references) - 1 - self.recipe.staleness)]
        updates = {}
        with torch.no_grad():
            for stage in self.stages[lane]:
                for name, newest in zip(stage.parameters, stage.newest, strict=True):
                    old = before[name]
                    updates[name] = newest.detach() - old
                    newest.copy_((1 - alpha) * old + alpha * reference[name] + updates[name])
                stage.versions[stage.updates] = stage._copy()
        self._updates.append(updates)

    def _average(self) -> None:
        """Compute x~ <- x~ + (1 / N) Σ Δ."""
        last = self.references[-1]
        mean = {name: sum(each[name] for each in self._updates) / len(self._updates) for name in last}
        self.references = [*self.references[-1 - self.recipe.staleness :], {n: last[n] + mean[n] for n in last}]
        self._updates = []
