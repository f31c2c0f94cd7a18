"""A trainer's text, parsed once: its degrees, batch and model, and its layout of a model."""

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
    """A text with its name in messages, and the user's further values."""

    text: str
    name: str = "the layout"
    values: Mapping[str, str] = field(default_factory=dict)
    """Values that the text leaves open, by name."""
    config: str | None = None
    """The name of the configuration, where the text has several."""
    ranks: int | None = None
    """Ranks of the pipeline, where the text does not state them."""


class LayoutText(Protocol):
    """A parsed text of one trainer. Methods raise InvalidDocument with line and column, UnsupportedRequest likewise."""

    framework: Framework | None
    """The framework by whose kernels the trainer computes a transformer; None for texts that never state the model."""

    def ask(self, *, batch: bool, model: bool) -> None:
        """Raise InvalidDocument that names all open values at once, with ``batch`` and ``model`` only if they count."""

    def degrees(self, *, experts: bool = False) -> Degrees:
        """Return the degrees, each 1 by default; ``experts``: whether the model has experts that the text omits."""

    def named_degrees(self) -> tuple[tuple[str, str], ...]:
        """Return the degrees above 1 as the text has them, each with its place."""

    def batch(self, gpus: int | None = None) -> int | None:
        """Return the global batch size, or the trainer's default for a job on ``gpus``; None where it is unknown."""

    def shape(self) -> TransformerShape:
        """Return the shape of the transformer that the text describes or names."""

    def context_kind(self) -> ContextKind | None:
        """Return how GPUs that share a sequence see all keys; None where the text does not state it."""

    def drawn(self, reading: Reading) -> Drawn:
        """Return the layout of a model."""


class ModelUnsaid:
    """The part of a text that never states the model, and has no degrees of which costs are computed."""

    framework: Framework | None = None

    def __init__(self, source: Source) -> None:
        self.source = source

    def ask(self, *, batch: bool, model: bool) -> None:
        """Return at once: the text leaves nothing open."""

    def degrees(self, *, experts: bool = False) -> Degrees:
        """Return degrees of 1: the profile's costs are used as they are."""
        return Degrees()

    def named_degrees(self) -> tuple[tuple[str, str], ...]:
        """Return no degrees."""
        return ()

    def shape(self) -> TransformerShape:
        """Raise InvalidDocument: only Megatron's flags and torchtitan's configurations state the model."""
        raise InvalidDocument(
            f"{self.source.name} does not say the model: only Megatron's flags and torchtitan's configurations do",
            remedy="--example, --hf, or --profile",
        )

    def context_kind(self) -> ContextKind | None:
        """Return None."""
        return None


def batch_of_replicas(samples: int | None, gpus: int | None, degrees: list[int | None]) -> int | None:
    """Return the samples of all replicas of a job; a text's degrees and the GPUs give the number of replicas."""
    group = prod(degree or 1 for degree in degrees)
    if not samples or not gpus or gpus % group:
        return None
    return samples * (gpus // group)
