"""A trainer's text, parsed once: its degrees, its batch and its model, and the layout that it is of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from penstock.layouts.drawn import Drawn, Reading
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.transformers.degrees import ContextKind, Framework
from penstock.schemas.transformers.shape import TransformerShape
from penstock.solvers.model.degrees import Degrees


@dataclass(frozen=True, slots=True)
class Source:
    """A text with its name in messages, and what the user says beside it."""

    text: str
    name: str = "the layout"
    values: Mapping[str, str] = field(default_factory=dict)
    """Values that the text leaves open, by name."""
    config: str | None = None
    """The configuration that is meant, of several in the text."""
    ranks: int | None = None
    """Ranks of the pipeline, where the text does not say."""


class LayoutText(Protocol):
    """A parsed text of one trainer. Methods raise InvalidDocument with line and column, UnsupportedRequest likewise."""

    framework: Framework | None
    """The kernels that the trainer computes a transformer with; None for texts that never say the model."""

    def ask(self, *, batch: bool, model: bool) -> None:
        """Raise InvalidDocument that names all at once that is left open; ``batch``, ``model``: whether these count."""

    def degrees(self, *, experts: bool = False) -> Degrees:
        """Return the degrees, each 1 by default; ``experts``: whether the model has experts that the text omits."""

    def named_degrees(self) -> tuple[tuple[str, str], ...]:
        """Return the degrees above 1 as the text has them, each with its place."""

    def batch(self, gpus: int | None = None) -> int | None:
        """Return the global batch size, or the trainer's default for a job on ``gpus``; None: it does not follow."""

    def shape(self) -> TransformerShape:
        """Return the shape of the transformer that the text describes or names."""

    def context_kind(self) -> ContextKind | None:
        """Return how GPUs that share a sequence see all keys; None: the text does not say."""

    def drawn(self, reading: Reading) -> Drawn:
        """Return the layout of a model."""


class ModelUnsaid:
    """The part of a text that never says the model, and has no degrees of which costs are computed."""

    framework: Framework | None = None

    def __init__(self, source: Source) -> None:
        self.source = source

    def ask(self, *, batch: bool, model: bool) -> None:
        """Return at once: the text leaves nothing open."""

    def degrees(self, *, experts: bool = False) -> Degrees:
        """Return degrees of 1: costs of a profile are as it has them."""
        return Degrees()

    def named_degrees(self) -> tuple[tuple[str, str], ...]:
        """Return no degrees."""
        return ()

    def shape(self) -> TransformerShape:
        """Raise InvalidDocument: only Megatron's flags and torchtitan's configurations say the model."""
        raise InvalidDocument(
            f"{self.source.name} does not say the model: only Megatron's flags and torchtitan's configurations do",
            remedy="--example, --hf, or --profile",
        )

    def context_kind(self) -> ContextKind | None:
        """Return None."""
        return None


def batch_of_replicas(samples: int | None, gpus: int | None, degrees: list[int | None]) -> int | None:
    """Return the samples of all replicas, of which a text's degrees leave so many on the GPUs of a job."""
    group = prod(degree or 1 for degree in degrees)
    if not samples or not gpus or gpus % group:
        return None
    return samples * (gpus // group)
