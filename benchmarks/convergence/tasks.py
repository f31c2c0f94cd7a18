"""Two small tasks that a CPU learns in seconds: a character-level GPT on a synthetic grammar, and a deep MLP.

All data is generated from a seed. An epoch is one pass over the samples, shuffled again for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.examples import gpt
from penstock.executor.run.job import LayerSpec, SimpleJob

BATCH = 32
CHARACTERS, LENGTH, SUCCESSORS = 6, 24, 3
FEATURES, CLASSES, DEPTH, WIDTH = 16, 4, 8, 32
HELD_OUT = 512
"""The number of samples that are validated on and never trained."""


class Task(SimpleJob, ABC):
    """A job on samples that are generated at once.

    ``target``: the validation measure to reach; ``epochs``: how many are trained. The measure is such that less is
    better: the loss, or the share of wrong answers.
    """

    measure: str
    target: float
    epochs: int

    def __init__(self, name: str, layers: Callable[[], Sequence[LayerSpec]], x: Tensor, y: Tensor) -> None:
        super().__init__(name, batch_size=BATCH)
        self._layers = layers
        self.x, self.y = x[HELD_OUT:], y[HELD_OUT:]
        self.validation = x[:HELD_OUT], y[:HELD_OUT]
        self.batches_per_epoch = len(self.x) // BATCH

    def layers(self) -> Sequence[LayerSpec]:
        """Return the model's layers in order."""
        return self._layers()

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Tensor]:
        """Return rows of a global batch: the next ones of the epoch's order."""
        epoch, place = divmod(step, self.batches_per_epoch)
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
        chosen = order[place * BATCH + rows.start : place * BATCH + rows.stop]
        return {"x": self.x[chosen]}, self.y[chosen]

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        """Return the cross entropy, summed, and its number of terms."""
        (logits,) = outputs.values()
        total = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        return total, targets.numel()

    @property
    def terms(self) -> int:
        """The terms of the loss in a global batch."""
        return BATCH * self.y[0].numel()

    @abstractmethod
    def validate(self, logits: Tensor, targets: Tensor) -> float:
        """Return the measure."""


class Grammar(Task):
    """A GPT with Adam: the next character of a grammar in which two characters allow three successors."""

    measure, target, epochs = "loss", 1.0, 18

    def __init__(self) -> None:
        sequences = grammar_sentences(HELD_OUT + 16 * BATCH)
        config = gpt.Config(blocks=4, width=32, heads=2, length=LENGTH, vocabulary=CHARACTERS)
        super().__init__("grammar", partial(gpt.layers, config), sequences[:, :-1], sequences[:, 1:])

    def validate(self, logits: Tensor, targets: Tensor) -> float:
        """Return the mean loss of a character."""
        return float(functional.cross_entropy(logits.flatten(0, -2), targets.flatten()))

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(params, lr=4e-3)


def grammar_sentences(count: int) -> Tensor:
    """Return (count, LENGTH + 1) characters.

    Each follows from the two before it, with probabilities 0.7, 0.2, 0.1.
    """
    generator = torch.Generator().manual_seed(1)
    table = torch.stack(
        [torch.randperm(CHARACTERS, generator=generator)[:SUCCESSORS] for _ in range(CHARACTERS * CHARACTERS)]
    )
    chances = torch.tensor([0.7, 0.2, 0.1])
    sentences = torch.randint(0, CHARACTERS, (count, LENGTH + 1), generator=generator)
    for k in range(2, LENGTH + 1):
        chosen = torch.multinomial(chances, count, replacement=True, generator=generator)
        sentences[:, k] = table[sentences[:, k - 2] * CHARACTERS + sentences[:, k - 1], chosen]
    return sentences


class Clusters(Task):
    """A deep MLP with momentum: the class of a point, of four classes with several clusters each."""

    measure, target, epochs = "share of errors", 0.03, 14

    def __init__(self) -> None:
        x, y = clusters(HELD_OUT + 32 * BATCH)
        super().__init__("clusters", mlp, x, y)

    def validate(self, logits: Tensor, targets: Tensor) -> float:
        """Return the share of wrong answers."""
        return float((logits.argmax(-1) != targets).float().mean())

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(params, lr=0.005, momentum=0.9)


def clusters(count: int) -> tuple[Tensor, Tensor]:
    """Return points around centres, four centres for each class."""
    generator = torch.Generator().manual_seed(2)
    centres = torch.randn(4 * CLASSES, FEATURES, generator=generator)
    which = torch.randint(0, len(centres), (count,), generator=generator)
    points = centres[which] + 0.5 * torch.randn(count, FEATURES, generator=generator)
    return points, which % CLASSES


def mlp() -> list[LayerSpec]:
    """Return residual blocks between two linear maps."""
    blocks = [LayerSpec(f"block{i}", Block) for i in range(DEPTH - 2)]
    return [LayerSpec("in", partial(nn.Linear, FEATURES, WIDTH)), *blocks, LayerSpec("out", Out)]


class Block(nn.Module):
    """A hidden layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Out(nn.Module):
    """A layer of logits; one prediction per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


grammar = Grammar()
classification = Clusters()
TASKS: dict[str, Task] = {"grammar": grammar, "classification": classification}
