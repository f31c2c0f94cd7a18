"""JSON and YAML from outside as plain values: bounded in depth, without aliases, faults by line and column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import yaml
from pydantic import ValidationError

from penstock.importers.cluster.pointer_lines import lines_of
from penstock.importers.cluster.yaml_loader import YAML_LOADER
from penstock.importers.lines import Faults

MOST_LEVELS = 100
_WORDS = {
    "missing": "it is missing",
    "string_type": "it has to be a text (in quotes, where YAML reads something else)",
    "string_pattern_mismatch": "it has to be a name: letters, digits, '-', '.' and '_'",
    "tuple_type": "it has to be a list",
    "dict_type": "it has to be an object",
    "model_type": "it has to be an object",
}


def read_documents(text: str, faults: Faults) -> list[Any]:
    """Return the documents of a JSON text (one) or a YAML text (all that are not empty).

    Text that begins with a brace or bracket is read as JSON. Raises InvalidDocument where the text does not parse,
    is nested too deeply, or repeats itself through aliases, which may grow without bound. Later faults that have a
    pointer get its line.
    """
    stripped = text.lstrip("\ufeff \t\r\n")
    if not stripped:
        faults.add(None, "it is empty")
    elif "\0" in text or "\ufffd" in text[:4096]:
        faults.add(None, "it is binary, or not UTF-8")
    faults.stop()
    text = text.lstrip("\ufeff")
    documents = [_read_json(text, faults)] if stripped[0] in "{[" else _read_yaml(text, faults)
    faults.locate = partial(lines_of, text)
    return documents


def _read_json(text: str, faults: Faults) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        end = " (is the text cut off?)" if error.pos >= len(text.rstrip()) else ""
        faults.add(error.lineno, f"{error.msg}{end}", column=error.colno)
    except RecursionError:
        faults.add(None, "it is nested too deeply")
    except ValueError as error:
        faults.add(None, str(error))
    faults.stop()
    raise AssertionError("stop() raises: a fault was added")


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _read_yaml(text: str, faults: Faults) -> list[Any]:
    try:
        with yaml_faults(faults):
            _check_shape(text, faults)
            return [document for document in yaml.load_all(text, Loader=YAML_LOADER) if document is not None]
    except ValueError as error:
        faults.add(None, f"a value is not valid YAML: {error}")
    faults.stop()
    raise AssertionError("stop() raises: a fault was added")


@contextmanager
def yaml_faults(faults: Faults) -> Iterator[None]:
    """Report an error that PyYAML raises in the block as a fault at its place."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        faults.add(mark.line + 1 if mark else None, detail, column=mark.column + 1 if mark else None)
    except yaml.YAMLError as error:
        faults.add(None, " ".join(str(error).split()))


def _check_shape(text: str, faults: Faults) -> None:
    """Refuse texts that must not reach the composer: libyaml's recurses in C without a bound, and aliases multiply."""
    depth = 0
    for event in yaml.parse(text, Loader=YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        refused = None
        if depth > MOST_LEVELS:
            refused = f"it is nested deeper than {MOST_LEVELS} levels"
        elif isinstance(event, yaml.AliasEvent):
            refused = f"the alias *{event.anchor} is not read; write the value out"
        if refused and (mark := event.start_mark):
            faults.add(mark.line + 1, refused, column=mark.column + 1)
            faults.stop()


def report_invalid(error: ValidationError, pointer: str, faults: Faults) -> None:
    """Add one fault for each field that is not of its form; ``pointer``: of the value that was read."""
    for entry in error.errors(include_url=False):
        place = [str(part) for part in entry["loc"]]
        named = next((depth for depth, part in enumerate(place) if "/" in part or "." in part), len(place))
        prefix = "".join(f"{part}: " for part in place[named:])
        message = _WORDS.get(entry["type"]) or entry["msg"][:1].lower() + entry["msg"][1:]
        shown = "" if entry["type"] == "missing" else f"; it is {shortened(entry['input'])}"
        faults.add(
            None, f"{prefix}{message}{shown}", at="/".join([pointer, *place[:named]] if pointer else place[:named])
        )


def shortened(value: Any) -> str:
    """Return a value as a message shows it."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "…"


def several(names: Sequence[str]) -> str:
    """Return names as a message shows them: the first three, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
