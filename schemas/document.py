"""Base of all documents: frozen, closed to unknown fields, with canonical JSON and an address computed from it."""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import rfc8785
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.schemas.bounded.yaml_text import load_yaml
from penstock.schemas.errors import Fault, InvalidDocument, InvalidPlan, WrongDocument
from penstock.schemas.recognising import recognised, with_hints

MOST_SHOWN = 200
"""Characters of a wrong value that its fault repeats."""
MOST_FAULTS = 100
"""Most faults that are listed for one document; of further faults only the number is stated."""
MOST_TEXT = 1000
"""Most characters of a fault's pointer, and of its sentence."""
MOST_REPORTED_BYTES = 64_000
"""Most bytes of all listed faults together, as JSON."""
_EXACT = 2**53 - 1
"""The largest integer that RFC 8785 allows: readers of JSON may take numbers as doubles."""
D = TypeVar("D", bound="Document")

OTHER_VERSION = "open it with the version of Penstock that wrote it, or plan its request again with this one"
MAX_DEPTH = 64
"""Most levels of lists and objects inside each other in our JSON; documents have a dozen."""


class Part(BaseModel):
    """A piece of a document."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Document(Part):
    """A document that travels alone: it says which version of its schema it follows."""

    kind: ClassVar[str]
    schema_version: Literal[1] = 1

    def canonical_json(self) -> bytes:
        """Return the document as RFC 8785 canonical JSON, without absent optional fields.

        Raises InvalidDocument for free data with numbers that JSON's readers would change.
        """
        return canonical_object(self.canonical_fields())

    def canonical_fields(self) -> dict[str, bytes]:
        """Return the canonical JSON of each field that is present. Raises as ``canonical_json``."""
        try:
            return {name: canonical(value) for name, value in self.model_dump(mode="json", exclude_none=True).items()}
        except rfc8785.CanonicalizationError as error:
            raise InvalidDocument(f"{self.kind} has no canonical form: {error}") from None

    def content_hash(self) -> str:
        """Return the document's address: ``sha256:`` and the digest of the canonical JSON."""
        return address_of(self.canonical_json())

    @classmethod
    def parse(cls, data: Any, *, units: bool = False, by_hand: bool = False, origin: str = "") -> Self:
        """Validate plain data; ``by_hand``: a person wrote it, so that tiny numbers without a unit are refused.

        Raises InvalidDocument with one fault per mistake, each with its JSON pointer; of more than MOST_FAULTS, the
        first ones. Data that look like another kind of document are a WrongDocument, without the faults that follow
        from that.
        """
        try:
            return cls.model_validate(data, context={"units": units, "by_hand": by_hand})
        except ValidationError as error:
            raise refusal(cls, error, data, origin=origin) from None

    @classmethod
    def parse_json(cls, text: str | bytes, *, origin: str = "") -> Self:
        """Parse JSON text; NaN, infinities and doubled keys are refused like any other fault."""
        return cls.parse(load_json(text, origin), origin=origin)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a ``.json``, ``.yaml`` or ``.yml`` file; YAML may carry units (``25 Gbit/s``)."""
        path, text = Path(path), read_text(path)
        if path.suffix in {".yaml", ".yml"}:
            return cls.parse(_load_yaml(text, str(path)), units=True, by_hand=True, origin=repr(str(path)))
        return cls.parse_json(text, origin=repr(str(path)))

    def write(self, path: str | Path) -> None:
        """Write indented JSON, and make the directory of ``path`` where it is missing."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(self.text() + "\n", encoding="utf-8")

    def text(self) -> str:
        """Return the document as indented JSON."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), indent=1, ensure_ascii=False)


def canonical(value: Any) -> bytes:
    """Return plain data as RFC 8785 canonical JSON. Raises rfc8785.CanonicalizationError.

    What the standard library writes in the same way is written by it, in a quarter of the time.
    """
    if _is_plain(value):
        return _plain(value)
    if type(value) is list:
        return b"[%b]" % b",".join(map(canonical, value))
    if type(value) is dict and all(type(key) is str and key.isascii() for key in value):
        return b"{%b}" % b",".join(b"%b:%b" % (_plain(key), canonical(value[key])) for key in sorted(value))
    return rfc8785.dumps(value)


def _plain(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def _is_plain(value: Any) -> bool:
    """Return whether all JSON writers agree on a value: it has no fraction, and no character beyond ASCII."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    if kind is int:
        return bool(-_EXACT <= value <= _EXACT)
    if kind is dict:
        return all(type(key) is str and key.isascii() for key in value) and all(map(_is_plain, value.values()))
    if kind is list:
        return all(map(_is_plain, value))
    return kind is bool


def canonical_object(fields: Mapping[str, bytes]) -> bytes:
    """Return the canonical JSON of an object, given the canonical JSON of its fields, whose names are ASCII."""
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), fields[name]) for name in sorted(fields))


def address_of(canonical_json: bytes) -> str:
    """Return ``sha256:`` and the digest: the address of a document with this canonical JSON."""
    return "sha256:" + hashlib.sha256(canonical_json).hexdigest()


def read_text(path: str | Path) -> str:
    """Return the text of a file. Raises InvalidDocument where it cannot be read, or is not UTF-8."""
    remedy = None
    try:
        text = Path(path).read_text(encoding="utf-8")
        if "\0" not in text:
            return text
        why, remedy = "it contains zero bytes, as UTF-16 does", "save it as UTF-8"
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not valid UTF-8"
        if error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            why, remedy = "it is UTF-16", "save it as UTF-8"
    except OSError as error:
        why = error.strerror or type(error).__name__
    raise InvalidDocument(f"cannot read {str(path)!r}: {why}", remedy=remedy)


def _load_yaml(text: str, path: str) -> Any:
    """Parse YAML; text that is also JSON is read as JSON, which is a hundred times faster."""
    if text.startswith("{"):
        with suppress(InvalidDocument):
            return load_json(text)
    return load_yaml(text, repr(path))


def load_json(text: str | bytes, origin: str = "") -> Any:
    """Parse JSON as ``json.loads`` does, but refuse NaN, infinities, doubled keys and more than MAX_DEPTH levels.

    Raises InvalidDocument with a pointer to each.
    """
    problems: list[tuple[Any, str, str]] = []

    def constant(name: str) -> Any:
        problems.append((wrong := object(), f"{name} is not valid in JSON; give a finite number", "not-finite"))
        return wrong

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if doubled := doubled_keys(pairs):
            problems.append(
                (seen := dict(pairs), _cut(f"the keys {doubled} are given twice in one object"), "doubled-key")
            )
            return seen
        return dict(pairs)

    try:
        data = json.loads(text, parse_constant=constant, object_pairs_hook=unique)
    except RecursionError:
        raise InvalidDocument(f"{origin or 'the body'} is not JSON: it is nested too deeply") from None
    except ValueError as error:
        why = f"not JSON: {error}" if text.strip() else "empty"
        raise InvalidDocument(f"{origin or 'the body'} is {why}") from None
    if problems:
        pointers = _pointers_to([wrong for wrong, _, _ in problems[:MOST_FAULTS]], data)
        listed = [Fault(at, detail, code) for at, (_, detail, code) in zip(pointers, problems, strict=False)]
        faults = (*listed, *_unlisted(len(problems) - len(listed)))
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
    fault = Fault(_pointers_to([level[0]], data)[0], f"more than {MAX_DEPTH} levels of lists and objects", "too-deep")
    raise InvalidDocument(f"{origin or 'the body'} is nested too deeply", faults=(fault,))


def doubled_keys(pairs: list[tuple[str, Any]]) -> list[str]:
    """Return the keys that an object has more than once."""
    if len(dict(pairs)) == len(pairs):
        return []
    return sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)


def _pointers_to(wanted: Sequence[Any], data: Any) -> list[str]:
    """Return the pointers to objects in plain data, in one pass; "" for an object that a doubled key displaced."""
    numbers = {id(one): number for number, one in enumerate(wanted)}
    pointers = [""] * len(wanted)
    left: list[tuple[_Trail, Any]] = [(None, data)]
    while left:
        trail, here = left.pop()
        if (number := numbers.get(id(here))) is not None:
            pointers[number] = _pointer(_steps(trail))
        if isinstance(here, dict):
            left += [((trail, name), inner) for name, inner in here.items()]
        elif isinstance(here, list):
            left += [((trail, number), inner) for number, inner in enumerate(here)]
    return pointers


_Trail = tuple[Any, str | int] | None
"""The steps to a value, the last one first: a pair of what leads to its container and its own step."""


def _steps(trail: _Trail) -> list[str | int]:
    steps = []
    while trail is not None:
        trail, step = trail
        steps.append(step)
    return steps[::-1]


def _pointer(steps: Iterable[str | int]) -> str:
    return _cut("".join("/" + _cut(str(step)).replace("~", "~0").replace("/", "~1") for step in steps))


def _cut(text: str, most: int = MOST_TEXT) -> str:
    return text if len(text) <= most else text[:most] + "…"


def refusal(
    model: type[BaseModel], error: ValidationError, data: Any, *, origin: str = "", remedy: str | None = None
) -> InvalidDocument:
    """Return why data are not a valid ``model``: another kind of document, or the first of their faults."""
    kind = getattr(model, "kind", None)
    if kind is not None and (actual_kind := recognised(data)) not in (None, kind):
        return WrongDocument(f"{origin or 'this'} is a {actual_kind}, not a {kind}", document_kind=actual_kind)
    listed, more = first_faults(error.errors(include_url=False, include_context=False), data)
    number = len(listed) + more
    detail = f"{kind or 'the body'}{f' in {origin}' if origin else ''} has {number} fault{'s' if number > 1 else ''}"
    if more:
        detail += f"; the first {len(listed)} follow"
    if any(fault.pointer.endswith("/schema_version") for fault in listed):
        remedy = remedy or OTHER_VERSION
    return InvalidDocument(detail, faults=(*with_hints(listed, model), *_unlisted(more)), remedy=remedy)


def faults_of(errors: Sequence[Any], data: Any = None) -> list[Fault]:
    """Convert Pydantic's errors to faults: the faults of `first_faults`, and one with the number of further ones."""
    faults, more = first_faults(errors, data)
    return [*faults, *_unlisted(more)]


def first_faults(errors: Sequence[Any], data: Any = None) -> tuple[list[Fault], int]:
    """Return Pydantic's first errors as faults, with pointer, sentence and code, and the number of further errors.

    With ``data``, pointers hold only steps that exist in it: pydantic also names the members of a
    union. At most MOST_FAULTS, of MOST_REPORTED_BYTES as JSON; takes time linear in the number of errors.
    """
    places = [tuple(_within(data, error)) for error in errors]
    outer = {place[:length] for place in set(places) for length in range(len(place))}
    listed = [
        (place, error)
        for place, error in zip(places, errors, strict=True)
        if error["type"] not in _FOLLOWING or place not in outer
    ]
    faults: list[Fault] = []
    left_bytes = MOST_REPORTED_BYTES
    for place, error in listed[:MOST_FAULTS]:
        fault = _fault(place, error)
        left_bytes -= len(json.dumps([fault.pointer, fault.detail, fault.code]))
        if faults and left_bytes < 0:
            break
        faults.append(fault)
    return faults, len(listed) - len(faults)


_FOLLOWING = frozenset({"too_short", "string_type"})
"""Errors that pydantic adds to inner faults: it counts only the valid items, and tries each member of a union."""


def _fault(place: Iterable[str | int], error: Any) -> Fault:
    input_value = error.get("input")
    printable = isinstance(input_value, str | int | float | bool) and error["type"] != "missing"
    shown = f" (given: {_cut(repr(input_value), MOST_SHOWN)})" if printable else ""
    words = "is missing" if error["type"] == "missing" else error["msg"].removeprefix("Value error, ")
    if error["type"] == "model_type":
        words = f"has to be an object with fields, as in `name: value`, but is {in_words(input_value)}"
    place = tuple(place)
    if place[-1:] == ("schema_version",):
        words = "another version of Penstock wrote this; this version reads documents of version 1"
    return Fault(_pointer(place), _cut(words) + shown, error["type"])


def in_words(value: Any) -> str:
    """Return what a value of JSON or YAML is: ``a list``, or for null ``empty``."""
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    return "empty" if value is None else names.get(type(value), type(value).__name__)


def _unlisted(more: int) -> tuple[Fault, ...]:
    """Return a fault with the number of faults that are not listed; empty where all are listed."""
    return (Fault("", f"{more} more faults are not listed", "more-faults"),) if more else ()


def _within(data: Any, error: Any) -> Sequence[str | int]:
    steps: tuple[str | int, ...] = error["loc"]
    return steps if data is None else _steps_within(data, steps, error["type"])


def _steps_within(data: Any, steps: tuple[str | int, ...], code: str) -> list[str | int]:
    path: list[str | int] = []
    for number, step in enumerate(steps):
        exists = step in data if isinstance(data, dict) else isinstance(step, int) and isinstance(data, list | tuple)
        if exists and not (isinstance(data, list | tuple) and step >= len(data)):  # type: ignore[operator]
            data = data[step]
        elif code != "missing" or number < len(steps) - 1:
            continue
        path.append(step)
    return path


def refuse_doubles(what: str, names: list[str]) -> None:
    """Raise ValueError naming the first name that occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r} occurs twice; names are unique")
        seen.add(name)


def read_stored(kind: type[D], body: bytes) -> D:
    """Return a document that was stored as a valid one. Raises InvalidPlan where another version stored it."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _of_another_version(kind, body, error) from None


def _of_another_version(kind: type[Document], body: bytes, error: ValidationError) -> InvalidPlan:
    """Return the refusal of a stored document that is not valid for this version."""
    data = json.loads(body)
    versions = data.get("plan", data).get("versions")
    release = versions.get("penstock") if isinstance(versions, dict) else None
    writer = f"Penstock {release}" if release else "another version of Penstock"
    return InvalidPlan(
        f"{writer} stored this {kind.kind}, and Penstock {version('penstock')} cannot read it",
        faults=refusal(kind, error, data).faults,
        remedy=OTHER_VERSION,
    )
