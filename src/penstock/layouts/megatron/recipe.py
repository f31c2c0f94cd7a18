"""A Python configuration of Megatron's (a recipe of Megatron-Bridge's) as flags with their places."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.layouts.files.configurations import configuration, refusal
from penstock.layouts.files.shell import Value
from penstock.layouts.files.values import Setting
from penstock.layouts.megatron.names import (
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    LAYOUT,
    MODULES,
    OTHERWISE,
    RANKS,
    READ,
    SHAPE,
    TENSOR,
)
from penstock.layouts.megatron.other_flags import CHANGING, FLAGS_ONLY

_KNOWN = READ | (CHANGING.keys() - FLAGS_ONLY)
_OTHERS = ("dataset", "tokenizer", "validation", "checkpoint", "logger", "env_vars")
"""Parts of a configuration whose settings are not the model's."""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Of a layout that is a list of lists."""
SHARDED = "use-distributed-optimizer"
_OF_NEMO = re.compile(r"\bnemo\.collections\.llm\b")
_OF_HELPERS = {
    "tp-size": TENSOR,
    "pp-size": RANKS,
    "cp-size": CONTEXT,
    "ep-size": EXPERT,
    "etp-size": EXPERT_TENSOR,
    "vp-size": "num-virtual-stages-per-pipeline-rank",
    "mbs": "micro-batch-size",
    "gbs": "global-batch-size",
}
"""Names by which NeMo's recipes hand their sizes to helpers of other files."""
BATCHES = frozenset(("global-batch-size", "micro-batch-size"))


class Recipe(NamedTuple):
    """Flags by name, what is to be said of the file, and why those that are ``open`` are not known."""

    found: dict[str, list[Value]]
    remarks: tuple[str, ...]
    open: dict[str, str]


def settings_of(text: str, source: str, given: Mapping[str, str], config: str | None) -> Recipe:
    """The flags of a file's configuration. Raises InvalidDocument where it has several, and none is named."""
    one = configuration(text, source, config, {name: _plain(value) for name, value in given.items()}, _says)
    begins = [0]
    for line in text.split("\n"):
        begins.append(begins[-1] + len(line) + 1)
    found: dict[str, list[Value]] = {}
    reasons: dict[str, str] = {}
    for path, setting in sorted(one.settings.items(), key=lambda item: ("model." in item[0], item[1].line)):
        name = _name_of(path)
        if name in _KNOWN:
            at = _at(text, begins[setting.line - 1], path.rsplit(".", 1)[-1])
            found[name] = [Value(_said(name, setting), at)]
            reasons.pop(name, None)
            if (why := refusal(setting)) is not None:
                reasons[name] = why
    remarks = [f"the configuration {one.name}"] if one.name else []
    if found and SHARDED not in found and _OF_NEMO.search(text):
        found[SHARDED] = [Value("true", 0)]
        remarks.append(f"recipes of NeMo set {SHARDED.replace('-', '_')} in other files: taken as set")
    if one.elsewhere:
        remarks.append(f"in other files and not read, what the configuration is made by: {', '.join(one.elsewhere)}")
    return Recipe(found, tuple(remarks), reasons)


def _plain(value: str) -> Any:
    return int(value) if value.isdecimal() else value


def _name_of(path: str) -> str:
    *owners, last = path.split(".")
    name = last.replace("_", "-")
    return "" if any(owner in _OTHERS for owner in owners) else _OF_HELPERS.get(name) or OTHERWISE.get(name, name)


def _says(path: str, setting: Setting) -> bool:
    """Whether a setting makes what it is in a configuration of Megatron's."""
    return _name_of(path) in SHAPE | BATCHES and setting.value is not None


def _at(text: str, begin: int, word: str) -> int:
    """Where in the text a setting stands: at its name in the line, else at the line."""
    end = text.find("\n", begin)
    found = text.find(word, begin, len(text) if end < 0 else end)
    return begin if found < 0 else found


def _said(name: str, setting: Setting) -> str:
    """A value as flags have it."""
    value = setting.value
    if refusal(setting) is not None:
        return "computed"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if name == LAYOUT and isinstance(value, list | tuple):
        return "|".join("".join(_LETTERS.get(str(each), "?") for each in stage) for stage in value)
    if name == MODULES and isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value).rsplit(".", 1)[-1].removesuffix("()") if isinstance(value, str) else str(value)
