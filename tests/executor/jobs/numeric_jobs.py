"""Jobs for tests of numerics: tied weights, models that branch, batch normalisation, optimizers with states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from small_jobs import WIDTH, WORDS, Add, Attend, Block, Normalise, Regression, Split, blocks, frozen
from torch import Tensor, nn

from penstock.executor.run.job import LayerSpec


class Momentum(Regression):
    """A regression under SGD with momentum, so that one wrong step shows in all that follow."""

    def __init__(self, layers: Any, lr: float = 0.05, ties: Sequence[Sequence[str]] = (), **more: Any) -> None:
        super().__init__("numeric", layers, **({"dtype": torch.float64} | more))
        self._lr = lr
        self.shared_parameters = ties

    num_evaluation_batches = 2

    def evaluation(self, number: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        return self.batch(100 + number, rows)

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self._lr, momentum=0.9)


class Adam(Momentum):
    """The same under Adam, whose two states per parameter are shared out."""

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=self._lr)


class Unembed(nn.Module):
    """Scores of all words by a weight that the embedding has too, and back: the width stays."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.words(x), -1) @ self.words.weight


class Recurrent(nn.Module):
    """A residual around an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lstm(x)[0]
        return x + result


class Convolve(nn.Module):
    """One of the branches of an Inception-like module: convolutions along the positions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, size, padding=size // 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolution(x.transpose(1, 2))).transpose(1, 2)


class Join(nn.Module):
    """Mixes three branches."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, one: Tensor, other: Tensor, third: Tensor) -> Tensor:
        return self.mix(torch.cat((one, other, third), -1))


class Shout(torch.autograd.Function):
    """The identity, whose gradient is 10^7 times as large where it is loud."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loud: Tensor) -> Tensor:
        ctx.save_for_backward(loud)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (loud,) = ctx.saved_tensors
        return gradients[0] * (1 + 1e7 * loud).to(gradients[0].dtype), None


class Overflows(nn.Module):
    """Gradients above what float16 has, for samples that are loud."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, loud: Tensor) -> Tensor:
        result: Tensor = x + Shout.apply(self.linear(x), loud)
        return result


def _tied() -> list[LayerSpec]:
    embedding = partial(nn.Embedding, WORDS, WIDTH)
    return [LayerSpec("embedding", embedding, ("ids",), ("x",)), *blocks(4), LayerSpec("head", Unembed)]


def _inception() -> list[LayerSpec]:
    """Return two modules of three branches, in a line: each branch reads the module's input."""
    specs = [LayerSpec("stem", Block)]
    for module in ("first", "second"):
        specs += [
            LayerSpec(f"{module}.1", partial(Convolve, 1), ("x",), ("one",)),
            LayerSpec(f"{module}.3", partial(Convolve, 3), ("x",), ("three",)),
            LayerSpec(f"{module}.5", partial(Convolve, 5), ("x",), ("x",)),
            LayerSpec(f"{module}.join", Join, ("one", "three", "x"), ("x",)),
        ]
    return specs


def _encoder_decoder() -> list[LayerSpec]:
    embedding = partial(nn.Embedding, WORDS, WIDTH)
    return [
        LayerSpec("source", embedding, ("source_ids",), ("memory",)),
        LayerSpec("encoder.0", Recurrent, ("memory",), ("memory",)),
        LayerSpec("encoder.1", Block, ("memory",), ("memory",)),
        LayerSpec("target", embedding, ("target_ids",), ("x",)),
        LayerSpec("decoder.0", Attend, ("x", "memory"), ("x",)),
        LayerSpec("decoder.1", Recurrent),
        LayerSpec("decoder.2", Attend, ("x", "memory"), ("x",)),
        LayerSpec("last", Block),
    ]


def _residual() -> list[LayerSpec]:
    return [
        LayerSpec("first", Block),
        LayerSpec("split", Split, ("x",), ("x", "skip")),
        *blocks(3),
        LayerSpec("frozen", frozen),
        LayerSpec("add", Add, ("x", "skip"), ("x",)),
        LayerSpec("last", Block),
    ]


class Loud(Momentum):
    """One micro-batch of steps 1 and 2 is loud."""

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        inputs, targets = super().batch(step, rows)
        loud = [[[1.0]] if step in (1, 2) and row == 7 else [[0.0]] for row in rows]
        return inputs | {"loud": torch.tensor(loud)}, targets


eight = Momentum(partial(blocks, 8))
eight_dropout = Momentum(partial(blocks, 8, 0.3))
tied = Momentum(_tied, ids=("ids",), inputs=(), ties=[["embedding.weight", "head.words.weight"]])
tied_masked = Momentum(
    _tied, ids=("ids",), inputs=(), masked=True, ties=[["embedding.weight", "head.words.weight"]], lr=0.5
)
inception = Momentum(_inception)
encoder_decoder = Momentum(_encoder_decoder, ids=("source_ids", "target_ids"), inputs=())
residual = Momentum(_residual)
adam = Adam(partial(blocks, 6), lr=0.01)
lowered = Momentum(_residual, dtype=torch.float32)
loud = Loud(
    lambda: [*blocks(2), LayerSpec("loud", Overflows, ("x", "loud"), ("x",)), *blocks(4)[2:]], dtype=torch.float32
)
normalised = Momentum(
    lambda: [*blocks(1), LayerSpec("norm.0", Normalise), *blocks(2)[1:], LayerSpec("norm.1", Normalise), *blocks(4)[3:]]
)
