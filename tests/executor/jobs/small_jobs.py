"""Jobs of a few thousand parameters for tests of the executor; ranks import this module from the tests' directory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.executor.run.job import LayerSpec, SimpleJob

WIDTH, LENGTH, WORDS = 8, 5, 11


class Regression(SimpleJob):
    """Layers from a function, trained by the squared error; every input is drawn from (step, row, name)."""

    def __init__(
        self,
        name: str,
        layers: Callable[[], Sequence[LayerSpec]],
        *,
        batch_size: int = 12,
        dtype: torch.dtype = torch.float32,
        inputs: Sequence[str] = ("x",),
        ids: Sequence[str] = (),
        masked: bool = False,
    ) -> None:
        super().__init__(name, batch_size=batch_size, seed=3)
        self._layers = layers
        self.dtype = dtype
        self.inputs = tuple(inputs)
        self.ids = tuple(ids)
        self.masked = masked

    def layers(self) -> Sequence[LayerSpec]:
        return [spec._replace(build=partial(_typed, spec.build, self.dtype)) for spec in self._layers()]

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        inputs, targets = {}, []
        for k, name in enumerate(self.inputs):
            inputs[name] = torch.stack([self._draw(step, row, k) for row in rows])
        for k, name in enumerate(self.ids):
            generators = [torch.Generator().manual_seed(1000 * step + 100 * k + row) for row in rows]
            inputs[name] = torch.stack([torch.randint(0, WORDS, (LENGTH,), generator=g) for g in generators])
        targets = torch.stack([self._draw(step, row, 99) for row in rows])
        counts = torch.tensor([1 + (row % 3 if self.masked else LENGTH - 1) for row in rows])
        return inputs, (targets, counts)

    def _draw(self, step: int, row: int, what: int) -> Tensor:
        generator = torch.Generator().manual_seed(10_000 * step + 100 * what + row)
        return torch.randn(LENGTH, WIDTH, generator=generator, dtype=self.dtype)

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        """Compute the squared error at the first ``counts[row]`` positions of each row."""
        wanted, counts = targets
        (result,) = outputs.values()
        mask = torch.arange(LENGTH)[None, :] < counts[:, None]
        error = ((result - wanted) ** 2).sum(-1)
        return (error * mask).sum(), int(counts.sum())

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)


def _typed(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    return build().to(dtype)


class Block(nn.Module):
    """A residual block with an optional dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Add(nn.Module):
    """Joins a tensor with one that was made earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x * self.scale + skip


class Mask(nn.Module):
    """An integer tensor, made from the input, that a later layer reads."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.detach().sum(-1) > 0).long()


class Apply(nn.Module):
    """Scales what a mask shows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.scale(x) * mask.unsqueeze(-1).to(x.dtype)


class Attend(nn.Module):
    """A decoder's layer: attends to the encoder's result."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        weights = torch.softmax(self.query(x) @ self.key(memory).transpose(-1, -2), -1)
        return x + weights @ memory


class Split(nn.Module):
    """One tensor becomes two."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Unread(nn.Module):
    """Reads a second tensor without letting it bear on the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.linear(x)


def is_real(x: Tensor) -> bool:
    """Return whether this is a forward of training, not one that finds shapes or counts."""
    return x.device.type != "meta" and torch.is_grad_enabled()


class Fails(nn.Module):
    """Raises in its seventh real forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if is_real(x):
            self.calls += 1
        if self.calls > 6:
            raise ValueError("the seventh call is too many")
        return self.linear(x)


def frozen() -> nn.Module:
    """Build a linear layer that is not trained."""
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def blocks(count: int, dropout: float = 0.0) -> list[LayerSpec]:
    return [LayerSpec(f"block.{i}", partial(Block, dropout)) for i in range(count)]


def _residual() -> list[LayerSpec]:
    """Return layers where ``skip`` crosses two cuts, unused by the layers between; ``mask`` is an integer."""
    return [
        LayerSpec("first", Block),
        LayerSpec("split", Split, ("x",), ("x", "skip")),
        LayerSpec("mask", Mask, ("x",), ("mask",)),
        LayerSpec("second", Block),
        LayerSpec("third", Block),
        LayerSpec("add", Add, ("x", "skip"), ("x",)),
        LayerSpec("apply", Apply, ("x", "mask"), ("x",)),
        LayerSpec("last", Unread, ("x", "skip"), ("x",)),
    ]


def _encoder_decoder() -> list[LayerSpec]:
    embedding = partial(nn.Embedding, WORDS, WIDTH)
    return [
        LayerSpec("source", embedding, ("source_ids",), ("memory",)),
        LayerSpec("encoder", Block, ("memory",), ("memory",)),
        LayerSpec("target", embedding, ("target_ids",), ("x",)),
        LayerSpec("attend.0", Attend, ("x", "memory"), ("x",)),
        LayerSpec("decoder", Block),
        LayerSpec("attend.1", Attend, ("x", "memory"), ("x",)),
    ]


def _frozen_front() -> list[LayerSpec]:
    return [LayerSpec("frozen.0", frozen), LayerSpec("frozen.1", frozen), *blocks(2), LayerSpec("frozen.2", frozen)]


plain = Regression("plain", partial(blocks, 6))
plain64 = Regression("plain64", partial(blocks, 6), dtype=torch.float64)
uneven64 = Regression("uneven64", partial(blocks, 6), dtype=torch.float64, batch_size=22)
masked64 = Regression("masked64", partial(blocks, 4), dtype=torch.float64, masked=True)
dropout = Regression("dropout", partial(blocks, 6, 0.3))
dropout64 = Regression("dropout64", partial(blocks, 6, 0.3), dtype=torch.float64)
residual = Regression("residual", _residual)
residual64 = Regression("residual64", _residual, dtype=torch.float64)
encoder_decoder = Regression("encoder-decoder", _encoder_decoder, inputs=(), ids=("source_ids", "target_ids"))
frozen_front = Regression("frozen", _frozen_front)
failing = Regression("failing", lambda: [*blocks(2), LayerSpec("fails", Fails), LayerSpec("last", Block)])


class Normalise(nn.Module):
    """Normalises over the samples of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


normalised = Regression("normalised", lambda: [*blocks(1), LayerSpec("norm", Normalise), LayerSpec("last", Block)])


class Dies(nn.Module):
    """Kills its own process, as the kernel does when memory runs out, in the fourth real forward."""

    signal = signal.SIGKILL

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if is_real(x):
            self.calls += 1
        if self.calls == 4:
            os.kill(os.getpid(), self.signal)
        return self.linear(x)


class Stops(Dies):
    """A layer that stops its process, as a debugger does: it says nothing more, and does not end."""

    signal = signal.SIGSTOP


class Hangs(nn.Module):
    """Waits for ever in its first real forward, with a child process beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if is_real(x):
            subprocess.run(["sleep", "1000"], check=True)
        return self.linear(x)


dying = Regression("dying", lambda: [*blocks(2), LayerSpec("dies", Dies), LayerSpec("last", Block)])
stopping = Regression("stopping", lambda: [*blocks(2), LayerSpec("stops", Stops), LayerSpec("last", Block)])
hanging = Regression("hanging", lambda: [*blocks(2), LayerSpec("hangs", Hangs), LayerSpec("last", Block)])
