"""What all documents share: frozen, closed to unknown fields, canonical JSON and an address made from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import rfc8785
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.schemas.errors import Fault, InvalidDocument


class Part(BaseModel):
    """A piece of a document."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Document(Part):
    """A document that travels alone: it says which version of its schema it follows."""

    kind: ClassVar[str]
    schema_version: Literal[1] = 1

    def canonical_json(self) -> bytes:
        """The document as RFC 8785 canonical JSON; absent optional fields are left out."""
        return rfc8785.dumps(self.model_dump(mode="json", exclude_none=True))

    def content_hash(self) -> str:
        """``sha256:`` and the digest of the canonical JSON: the document's address."""
        return "sha256:" + hashlib.sha256(self.canonical_json()).hexdigest()

    @classmethod
    def parse(cls, data: Any, *, units: bool = False, origin: str = "") -> Self:
        """Validate plain data. Raises InvalidDocument with one fault per mistake, each with its JSON pointer."""
        try:
            return cls.model_validate(data, context={"units": units})
        except ValidationError as error:
            where = f" in {origin}" if origin else ""
            count = error.error_count()
            raise InvalidDocument(
                f"{cls.kind}{where} has {count} fault{'s' if count > 1 else ''}",
                faults=tuple(faults_of(error.errors())),
            ) from None

    @classmethod
    def parse_json(cls, text: str | bytes, *, origin: str = "") -> Self:
        """Parse JSON text; NaN, infinities and doubled keys are refused like any other fault."""
        return cls.parse(load_json(text, origin), origin=origin)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a ``.json``, ``.yaml`` or ``.yml`` file; YAML may carry units (``25 Gbit/s``)."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidDocument(f"cannot read {str(path)!r}: {error}") from None
        if path.suffix in {".yaml", ".yml"}:
            try:
                data = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise InvalidDocument(f"{str(path)!r} is not YAML: {error}") from None
            return cls.parse(data, units=True, origin=repr(str(path)))
        return cls.parse_json(text, origin=repr(str(path)))

    def write(self, path: str | Path) -> None:
        """Write indented JSON, for people; the address does not depend on the layout."""
        data = self.model_dump(mode="json", exclude_none=True)
        Path(path).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_json(text: str | bytes, origin: str = "") -> Any:
    """``json.loads`` that refuses NaN, infinities and doubled keys with an InvalidDocument."""

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a number that JSON has; give a finite number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            names = [name for name, _ in pairs]
            doubled = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"the keys {doubled} are given twice in one object")
        return seen

    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InvalidDocument(f"{origin or 'the body'} is not JSON: {error}") from None


def faults_of(errors: Iterable[Any]) -> list[Fault]:
    """Pydantic's errors as faults: a JSON pointer, a sentence with the value, a stable code."""
    errors = list(errors)
    places = [tuple(error["loc"]) for error in errors]
    faults = []
    for error, place in zip(errors, places, strict=True):
        if error["type"] == "too_short" and any(p != place and p[: len(place)] == place for p in places):
            continue  # pydantic counts only the valid items: the shortage follows from their own faults
        pointer = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in error["loc"])
        given = error.get("input")
        shown = (
            f" (given: {given!r})" if isinstance(given, str | int | float | bool) and error["type"] != "missing" else ""
        )
        faults.append(Fault(pointer, error["msg"].removeprefix("Value error, ") + shown, error["type"]))
    return faults
