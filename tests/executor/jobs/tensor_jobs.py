"""The example transformers in double precision, whose layers ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from penstock.examples import gpt as gpt_examples
from penstock.examples import llama as llama_examples
from penstock.executor.run.job import LayerSpec


def _doubled(build: Callable[[], nn.Module]) -> nn.Module:
    return build().double()


class Tokens:
    """One of the examples, ``job``, by another optimizer, in fp64 unless ``single``."""

    outputs = ("x",)
    num_evaluation_batches = 2

    def __init__(self, job: Any, optimizer: Callable[[Any], Optimizer] | None = None, *, single: bool = False) -> None:
        self._job, self._single = job, single
        self._optimizer = optimizer or partial(torch.optim.AdamW, lr=3e-3)
        self.name, self.seed, self.batch_size = job.name, 0, job.batch_size
        self.shared_parameters = job.shared_parameters

    def layers(self) -> list[LayerSpec]:
        specs: list[LayerSpec] = self._job.layers()
        return specs if self._single else [spec._replace(build=partial(_doubled, spec.build)) for spec in specs]

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        batch: tuple[dict[str, Tensor], Any] = self._job.batch(step, rows)
        return batch

    def evaluation(self, number: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        return self.batch(1000 + number, rows)

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        scores = outputs["x"]
        scores = scores.float() if self._single else scores
        return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum"), targets.numel()

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        return self._optimizer(params)

    def lr_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.5 * step))


class Still(Optimizer):
    """An optimizer that makes a state in its first step, and never changes anything."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter]["once"] = 3 * parameter.detach()


gpt = Tokens(gpt_examples.tiny)
gpt_single = Tokens(gpt_examples.tiny, single=True)
llama = Tokens(llama_examples.tiny)
momentum = Tokens(llama_examples.tiny, partial(torch.optim.SGD, lr=0.05, momentum=0.9))
tied = Tokens(gpt_examples.tied)
adafactor = Tokens(llama_examples.tiny, partial(torch.optim.Adafactor, lr=1e-3))
still = Tokens(llama_examples.tiny, Still)
wider = Tokens(llama_examples.make("llama-tiny", replace(llama_examples._TINY, inner=128), batch_size=16))
