"""Jobs on random data of the right shape: the same numbers for a row wherever it is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from penstock.executor.run.chain import derived_seed
from penstock.executor.run.job import LayerSpec, SimpleJob

Layers = Callable[[], Sequence[LayerSpec]]


class SyntheticJob(SimpleJob, ABC):
    """Layers from a function; subclasses make one sample and its target from a generator of the sample's own."""

    def __init__(self, name: str, layers: Layers, *, batch_size: int, seed: int = 0) -> None:
        super().__init__(name, batch_size=batch_size, seed=seed)
        self._layers = layers

    def layers(self) -> Sequence[LayerSpec]:
        """Return the model's layers in order."""
        return self._layers()

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        """Draw each row from (seed, step, row) alone."""
        samples = []
        for row in rows:
            generator = torch.Generator().manual_seed(derived_seed(self.seed, "sample", step, row))
            samples.append(self.sample(generator))
        inputs = {name: torch.stack([one[name] for one, _ in samples]) for name in samples[0][0]}
        return inputs, torch.stack([target for _, target in samples])

    @abstractmethod
    def sample(self, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Draw one sample's inputs and its target."""

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        """Return the cross entropy summed over all targets; the last dimension of the output holds the classes."""
        (logits,) = outputs.values()
        total = functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")
        return total, targets.numel()


class TokenJob(SyntheticJob):
    """Sequences of token ids, with a target id for each."""

    sequences: Sequence[str] = ("x",)

    def __init__(
        self,
        name: str,
        layers: Layers,
        *,
        batch_size: int,
        length: int,
        vocabulary: int,
        seed: int = 0,
        learning_rate: float = 3e-4,
    ) -> None:
        super().__init__(name, layers, batch_size=batch_size, seed=seed)
        self.length = length
        self.vocabulary = vocabulary
        self.learning_rate = learning_rate

    def sample(self, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Draw a sequence; the targets are its tokens one further."""
        tokens = torch.randint(0, self.vocabulary, (self.length + 1,), generator=generator)
        return {"x": tokens[:-1]}, tokens[1:]

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Return AdamW."""
        return AdamW(params, lr=self.learning_rate)


class ImageJob(SyntheticJob):
    """Square images of three channels, with a class for each."""

    def __init__(
        self, name: str, layers: Layers, *, batch_size: int, side: int, classes: int = 1000, seed: int = 0
    ) -> None:
        super().__init__(name, layers, batch_size=batch_size, seed=seed)
        self.side = side
        self.classes = classes

    def sample(self, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        """Draw an image and its class."""
        image = torch.randn(3, self.side, self.side, generator=generator)
        return {"x": image}, torch.randint(0, self.classes, (), generator=generator)

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with momentum."""
        return SGD(params, lr=0.01, momentum=0.9)
