"""The values of a ``config.json``, with the place of each in errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.schemas.errors import Fault, InvalidDocument

_AS_PUBLISHED = "take config.json as the model's publisher has it"


@dataclass(frozen=True)
class Config:
    """A configuration's values, with the place of each in errors."""

    values: Mapping[str, Any]
    origin: str

    def number(self, name: str, default: int | None = None) -> int:
        """Return a positive integer. Raises InvalidDocument for another value, or where it and a default lack."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.wrong(
                name,
                f"has no {name!r}",
                f"add {name}; where the publisher's file leaves it out, "
                "the transformers library has a default for the family",
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(name, f"has {name} {value!r}, which is not a number of at least 1")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false. Raises InvalidDocument for anything else."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, f"has {name} {value!r}, which is neither true nor false")
        return value

    def share(self, name: str) -> float:
        """Return a probability, 0 where it is missing. Raises InvalidDocument for anything else."""
        value = self.values.get(name) or 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.wrong(name, f"has {name} {value!r}, which is not a number between 0 and 1")
        return float(value)

    def wrong(self, name: str, what: str, remedy: str = _AS_PUBLISHED) -> InvalidDocument:
        """Return the error of a field."""
        return InvalidDocument(
            f"{self.origin}, of family {self.values.get('model_type')!r}, {what}",
            faults=(Fault(f"/{name}", what, "field"),),
            remedy=remedy,
        )
