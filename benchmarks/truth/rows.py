"""A published step as a row: model, layout, GPUs, batch, and the seconds that it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from penstock.schemas.transformers.degrees import ContextKind, Framework
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.parameters import total

SIXTEEN = "16-bit"
"""The precision of rows in bf16 or fp16."""
DOMAIN = 64
"""The GPUs of an NVLink domain of 72 that published runs use."""


T = TypeVar("T")


def grouped(values: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Return the values by their keys, in the order in which they come."""
    groups: dict[Any, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


class PublishedLayout(NamedTuple):
    """The layout of a row: degrees, parts of the model on each rank, and samples of a micro-batch of one replica."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    chunks: int = 1
    micro_batch: int = 1
    sharding: str = "optimizer"
    recompute: str = "none"

    @property
    def words(self) -> str:
        """The layout as ``--layout`` takes it."""
        named = {name.replace("_", "-"): value for name, value in self._asdict().items()}
        return ",".join(f"{name}={value}" for name, value in named.items())


class PublishedStep(NamedTuple):
    """A published step. ``memory_bytes``: of a board that is not the usual one of its kind.

    ``unmodelled``: what the run does and the prediction leaves out.
    """

    source: str
    shape: TransformerShape
    framework: Framework
    kind: str
    gpus: int
    batch: int
    layout: PublishedLayout
    seconds: float
    precision: str = SIXTEEN
    memory_bytes: int | None = None
    context_kind: ContextKind | None = None
    target: str | None = None
    measured_bytes: int | None = None
    """The memory that its fullest GPU allocates, where the source has it."""
    unmodelled: tuple[str, ...] = ()
    is_timed: bool = True
    """False where the source compares layouts with each other and has no time of any."""

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of rows that differ in their layout alone: a choice that a planner could have made."""
        return self.source, self.model, self.kind, self.memory_bytes, self.precision, self.gpus, self.batch

    @property
    def model(self) -> str:
        """The name, size and length of the model, which tell all models of the rows apart."""
        shape = self.shape
        return f"{shape.name}, {shape.layers} × {shape.hidden}, {shape.sequence_length} tokens"

    @property
    def work(self) -> float:
        """The parameters times the tokens of a GPU in a step: the more, the less counts what is not computation."""
        return total(self.shape) * self.batch * self.shape.sequence_length / self.gpus

    @property
    def node_size(self) -> int:
        """The GPUs of a node, which share NVLink."""
        return min(self.gpus, DOMAIN if self.kind.startswith("GB") else 8)

    @property
    def cluster(self) -> str:
        """The cluster by its name."""
        return f"{self.gpus // self.node_size}x{self.node_size}x{self.kind}"


class SkippedStep(NamedTuple):
    """Rows that are not predicted, and the reason."""

    source: str
    why: str


class PublishedSteps(NamedTuple):
    """The rows of a folder, and the reasons for which others are left out."""

    rows: list[PublishedStep]
    left_out: list[SkippedStep]
