"""What all documents share: frozen, closed to unknown fields, canonical JSON and an address made from it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import rfc8785
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.schemas.errors import Fault, InvalidDocument, WrongDocument
from penstock.schemas.recognising import recognised, with_hints

MOST_SHOWN = 200
"""Characters of a wrong value that its fault repeats."""
MAX_DEPTH = 64
"""Lists and objects in each other that JSON of ours may have; documents have a dozen."""


class Part(BaseModel):
    """A piece of a document."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Document(Part):
    """A document that travels alone: it says which version of its schema it follows."""

    kind: ClassVar[str]
    schema_version: Literal[1] = 1

    def canonical_json(self) -> bytes:
        """The document as RFC 8785 canonical JSON; absent optional fields are left out.

        Raises InvalidDocument for free data with numbers that JSON's readers would change.
        """
        try:
            return rfc8785.dumps(self.model_dump(mode="json", exclude_none=True))
        except rfc8785.CanonicalizationError as error:
            raise InvalidDocument(f"{self.kind} has no canonical form: {error}") from None

    def content_hash(self) -> str:
        """``sha256:`` and the digest of the canonical JSON: the document's address."""
        return "sha256:" + hashlib.sha256(self.canonical_json()).hexdigest()

    @classmethod
    def parse(cls, data: Any, *, units: bool = False, origin: str = "") -> Self:
        """Validate plain data. Raises InvalidDocument with one fault per mistake, each with its JSON pointer.

        Data that look like another kind of document are a WrongDocument, without the faults that follow from that.
        """
        try:
            return cls.model_validate(data, context={"units": units})
        except ValidationError as error:
            if (found := recognised(data)) not in (None, cls.kind):
                raise WrongDocument(f"{origin or 'this'} is a {found}, not a {cls.kind}", found=found) from None
            where = f" in {origin}" if origin else ""
            faults = tuple(with_hints(faults_of(error.errors(), data), cls))
            raise InvalidDocument(
                f"{cls.kind}{where} has {len(faults)} fault{'s' if len(faults) > 1 else ''}", faults=faults
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
            raise InvalidDocument(f"cannot read {str(path)!r}: {unreadable(error)}") from None
        if path.suffix in {".yaml", ".yml"}:
            return cls.parse(_load_yaml(text, str(path)), units=True, origin=repr(str(path)))
        return cls.parse_json(text, origin=repr(str(path)))

    def write(self, path: str | Path) -> None:
        """Write JSON, for people; the address does not depend on the layout."""
        Path(path).write_text(self.text() + "\n", encoding="utf-8")

    def text(self) -> str:
        """Indented JSON."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), indent=1, ensure_ascii=False)


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a file could not be read, in words."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is no UTF-8 text"
    return error.strerror or type(error).__name__


def _load_yaml(text: str, path: str) -> Any:
    """YAML; as JSON, a hundred times faster, where it is that as well."""
    if text.startswith("{"):
        with suppress(InvalidDocument):
            return load_json(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidDocument(f"{path!r} is not YAML: {error}") from None


def load_json(text: str | bytes, origin: str = "") -> Any:
    """``json.loads`` that refuses NaN, infinities and doubled keys, and more than MAX_DEPTH values in each other.

    Raises InvalidDocument with a pointer to each.
    """
    found: list[tuple[Any, str, str]] = []

    def constant(name: str) -> Any:
        found.append((wrong := object(), f"{name} is not a number that JSON has; give a finite number", "not-finite"))
        return wrong

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if doubled := doubled_keys(pairs):
            found.append((seen := dict(pairs), f"the keys {doubled} are given twice in one object", "doubled-key"))
            return seen
        return dict(pairs)

    try:
        data = json.loads(text, parse_constant=constant, object_pairs_hook=unique)
    except RecursionError:
        raise InvalidDocument(f"{origin or 'the body'} is not JSON that can be read: it is nested too deep") from None
    except ValueError as error:
        raise InvalidDocument(f"{origin or 'the body'} is not JSON: {error}") from None
    if found:
        faults = tuple(Fault(_pointer_to(wrong, data), detail, code) for wrong, detail, code in found)
        raise InvalidDocument(f"{origin or 'the body'} is not JSON: {faults[0].detail}", faults=faults)
    _refuse_depths(data, origin)
    return data


def _refuse_depths(data: Any, origin: str) -> None:
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    fault = Fault(_pointer_to(level[0], data), f"more than {MAX_DEPTH} lists and objects in each other", "too-deep")
    raise InvalidDocument(f"{origin or 'the body'} is nested too deep", faults=(fault,))


def doubled_keys(pairs: list[tuple[str, Any]]) -> list[str]:
    """The keys that an object has more than once."""
    if len(dict(pairs)) == len(pairs):
        return []
    return sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)


def _pointer_to(wanted: Any, data: Any) -> str:
    """Where an object stands in plain data; of one that a doubled key has displaced, the root."""
    left = [("", data)]
    while left:
        pointer, here = left.pop()
        if here is wanted:
            return pointer
        if isinstance(here, dict):
            left += [(f"{pointer}/{_escaped(name)}", inner) for name, inner in here.items()]
        elif isinstance(here, list):
            left += [(f"{pointer}/{number}", inner) for number, inner in enumerate(here)]
    return ""


def _escaped(step: str | int) -> str:
    return str(step).replace("~", "~0").replace("/", "~1")


def faults_of(errors: Iterable[Any], data: Any = None) -> list[Fault]:
    """Pydantic's errors as faults: a JSON pointer, a sentence with the value, a stable code.

    With the ``data`` that was read, the pointers hold only steps that exist there: pydantic names the members of a
    union as well.
    """
    faults = []
    for error in errors:
        steps = error["loc"] if data is None else _steps_within(data, error["loc"], error["type"])
        pointer = "".join("/" + _escaped(step) for step in steps)
        given = error.get("input")
        printable = isinstance(given, str | int | float | bool) and error["type"] != "missing"
        words = repr(given)
        shown = f" (given: {words if len(words) <= MOST_SHOWN else words[:MOST_SHOWN] + '…'})" if printable else ""
        faults.append(Fault(pointer, error["msg"].removeprefix("Value error, ") + shown, error["type"]))
    return [fault for fault in faults if fault.code not in _FOLLOWING or not _has_inner(fault, faults)]


_FOLLOWING = frozenset({"too_short", "string_type"})
"""What pydantic adds to inner faults: it counts only the valid items, and tries each member of a union."""


def _has_inner(fault: Fault, faults: Iterable[Fault]) -> bool:
    return any(other.pointer.startswith(fault.pointer + "/") for other in faults)


def _steps_within(data: Any, steps: tuple[str | int, ...], code: str) -> list[str | int]:
    found: list[str | int] = []
    for number, step in enumerate(steps):
        known = step in data if isinstance(data, dict) else isinstance(step, int) and isinstance(data, list | tuple)
        if known and not (isinstance(data, list | tuple) and step >= len(data)):  # type: ignore[operator]
            data = data[step]
        elif code != "missing" or number < len(steps) - 1:
            continue
        found.append(step)
    return found


def refuse_doubles(what: str, names: list[str]) -> None:
    """Raise ValueError naming the first name that occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r} occurs twice; names are unique")
        seen.add(name)
