"""Differences between a written layout and a user's own file: a comment line for each setting that differs.

Both texts are searched for the settings that the form may write, whichever way they are spelt: ``--name value``,
``name: value``, ``config.table.name = value``. Variables of a script are looked up as ``shell`` does; nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from penstock.layouts.files.positions import place
from penstock.layouts.files.shell import EXPANDED, QUOTED, Unsaid, Value, Variables
from penstock.layouts.megatron import bridge, written
from penstock.layouts.megatron.printed import as_flags
from penstock.layouts.torchtitan import torchtitan
from penstock.schemas.bounded.budget import Budget
from penstock.schemas.errors import InvalidDocument

SETTINGS: dict[str, tuple[str, ...]] = {
    "megatron": (*written.WRITTEN, *written.REPLACED),
    "megatron-bridge": tuple(
        name.rpartition(".")[2]
        for name in (*(attribute for attribute, _otherwise in bridge.SETTINGS.values()), *bridge.OF_EXPERTS.values())
    ),
    "torchtitan": torchtitan.WRITTEN,
    "deepspeed": (
        *("num_stages", "parts", "activation_checkpoint_interval", "train_batch_size"),
        *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "stage"),
    ),
}
"""The settings that each form may write, and the settings that would make another layout of it."""
_COMMENT = re.compile(r"(?m)(^|(?<=\s))#.*$")
_DOCUMENTED = re.compile(r'"""(?:.|\n)*?"""')
_WORD = re.compile(rf"{QUOTED}|(?:{EXPANDED}|[^\s'\",;)}}\]])+")
_ON, _ABSENT = ("true", "yes", "on"), ("", "false", "no", "off", "none", "null", "~")
_SHOWN = 60
"""The longest value that a line shows, in characters."""


class Statement(NamedTuple):
    """A setting in a text: its value without quotes and spaces, None where it is off; and the line."""

    value: str | None
    line: int


def differences(text: str, to: str, user_text: str, source: str) -> list[str]:
    """Return a line for each setting that the user's text states differently or lacks.

    Raises InvalidDocument where the user's text has none of the settings.
    """
    names = SETTINGS[to]
    ours, theirs = _statements(text, names, to), _statements(as_flags(user_text), names, source)
    if not theirs:
        raise InvalidDocument(
            f"{source} has no settings of a {to} layout",
            remedy=f"give the file that starts your training now, with settings such as {names[0]}",
        )
    return [line for name in names if (line := _differing(name, ours.get(name), theirs.get(name), source))]


def with_differences(text: str, to: str, user_text: str, source: str) -> str:
    """Return the written layout below a line for each setting that the user's text states differently or lacks.

    Raises InvalidDocument where the user's text has none of the settings.
    """
    lines = differences(text, to, user_text, source)
    head = f"differs from {source} in {len(lines)} settings:" if lines else f"{source} says the same of all settings"
    return "\n".join([f"# {head}", *(f"#   {line}" for line in lines), text])


def _differing(name: str, ours: Statement | None, theirs: Statement | None, source: str) -> str | None:
    """Return a line on a setting that differs, None where both agree; a missing degree is 1."""
    one = "1" if name.endswith(("size", "degree")) and "batch" not in name else None
    our_value = one if ours is None or ours.value is None else ours.value
    their_value = one if theirs is None or theirs.value is None else theirs.value
    if our_value == their_value:
        return None
    where = f"{source}, line {theirs.line}," if theirs is not None else source
    if our_value is None:
        return f"{_shown(name, their_value)}: {where} has it, this layout not: leave it out"
    has = f"has {_short(their_value)}" if their_value is not None and theirs is not None else "does not have it"
    return f"{_shown(name, our_value)}: {where} {has}"


def _shown(name: str, value: str | None) -> str:
    flag = f"--{name}" if "-" in name else name
    return flag if value in (None, "on") else f"{flag} {_short(str(value))}"


def _short(value: str | None) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _statements(text: str, names: Sequence[str], source: str) -> dict[str, Statement]:
    """Read the settings of a text; of several values of one name the last one counts."""
    blank = _DOCUMENTED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    plain = _COMMENT.sub(lambda match: " " * len(match[0]), blank)
    variables = Variables(plain, Budget(source))
    spelt = {name.replace("_", "-"): name for name in names}
    settings: dict[str, Statement] = {}
    for match in _pattern(names).finditer(plain):
        name = spelt[match[2].lower().replace("_", "-")]
        if match[1] is None and (match[3] is None or not match[3].strip("\"' \t")):
            continue  # a word in a sentence, or a name in a list
        settings[name] = Statement(_value(plain, match.end(), variables), place(plain, match.start())[0])
    return settings


def _pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Build a pattern of the names, with dashes or underscores, and of the characters between a name and its value."""
    words = sorted(("[-_]".join(map(re.escape, re.split("[-_]", name))) for name in names), key=len, reverse=True)
    return re.compile(rf"(?i)(?<![\w-])(--)?({'|'.join(words)})(?![\w-])(['\"]?[ \t]*[=:]|[ \t]+(?=\S))?[ \t\\]*")


def _value(text: str, at: int, variables: Variables) -> str | None:
    """Read the value at a place: a list up to its end, or a word; a switch that another flag follows is on."""
    if text[at : at + 1] in ("[", "("):
        return _listed(text, at)
    word = _WORD.match(text, at)
    if word is None or word[0].startswith("--"):
        return "on"
    try:
        value = variables.value(Value(word[0], at)).text
    except Unsaid:
        value = word[0]
    value = value.strip("'\"")
    return "on" if value.lower() in _ON else None if value.lower() in _ABSENT else value


def _listed(text: str, at: int) -> str:
    depth = 0
    for end in range(at, len(text)):
        depth += (text[end] in "[(") - (text[end] in "])")
        if depth == 0:
            return re.sub(r",(?=[\])])", "", re.sub(r"[\s'\"]", "", text[at : end + 1]))
    return re.sub(r"\s", "", text[at:])
