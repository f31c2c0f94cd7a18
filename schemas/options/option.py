"""One option of a request, and the words with which every surface names and explains it.

Loads the standard library alone, as ``penstock --help`` loads no pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["text", "whole", "number", "sizes", "duration", "bytes", "choice", "choices", "axes"]
"""The value that a text stands for; ``sizes`` are whole numbers with commas, ``axes`` are ``name=value``."""

MODEL = "Model and cluster"
TRAINING = "Training"
DEGREES = "Degrees of parallelism"
PLANNER = "Planner"
SEARCH = "Search"
RUN = "Run"
LAUNCH = "Launch"
CHECKPOINTS = "Checkpoints"
MEASUREMENT = "Measurement"
OUTPUT = "Output"
PANELS = (MODEL, TRAINING, DEGREES, PLANNER, SEARCH)
"""Groups of options of a plan request, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option: its places in a request, on the command line and in a form, and its words.

    ``help`` is a phrase that begins in lower case and has no full stop; ``default`` says what holds without the option.
    """

    panel: str
    help: str
    default: str = ""
    pointer: str = ""
    """The field of a plan request that it sets; empty: it sets no field, but changes the profile."""
    label: str = ""
    """Its label in the form; empty: the form has no such field."""
    flag: str = ""
    """Its name on the command line; empty: it is no option there."""
    metavar: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    """The values to choose from, each with its words in a form."""
    kind: Kind = "text"
    is_repeatable: bool = False
    page: str = ""
    """The page of the documentation, and its section, that explains it."""
    is_argument: bool = False
    """Whether these words explain the argument of its name in ``penstock.plan``, too."""

    @property
    def parameter(self) -> str:
        """The name of its parameter in a command."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def shown_values(self) -> str:
        """The text that stands for its value in help: a metavar, or the values to choose from."""
        return self.metavar or "|".join(self.values)

    @property
    def sentence(self) -> str:
        """Its help as a sentence, with the default."""
        return f"{_capital(self.help)}{f' (default: {self.default})' if self.default else ''}."

    @property
    def command_help(self) -> str:
        """Its help on the command line."""
        return f"{self.sentence}{' Repeatable.' if self.is_repeatable else ''}"

    @property
    def hint(self) -> str:
        """The sentences beneath its field of text in the form."""
        return f"{_capital(self.help)}.{f' Empty: {self.default}.' if self.default else ''}"

    @property
    def description(self) -> str:
        """The description of its field in a schema."""
        return f"{self.help}{f'; left out: {self.default}' if self.default else ''}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def described(options: Mapping[str, Option], name: str) -> str:
    """Return a schema's description of the field that an option sets."""
    return options[name].description


def put(data: dict[str, Any], pointer: str, value: Any) -> None:
    """Set the field of a request at a JSON Pointer; None removes it."""
    *way, last = pointer.split("/")[1:]
    for step in way:
        data = data[int(step)] if isinstance(data, list) else data.setdefault(step, {})
    if value is None:
        data.pop(last, None)
    else:
        data[last] = value
