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

_FLAG_NAMES = READ | (CHANGING.keys() - FLAGS_ONLY)
_OTHERS = ("dataset", "tokenizer", "validation", "checkpoint", "logger", "env_vars")
"""Parts of a configuration whose settings are not the model's."""
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""The letters of a layout that is a list of lists."""
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
    """Flags by name, remarks on the file, and the reasons of values that are ``open``."""

    words: dict[str, list[Value]]
    remarks: tuple[str, ...]
    open: dict[str, str]


def settings_of(text: str, source: str, overrides: Mapping[str, str], config: str | None) -> Recipe:
    """Read the flags of a file's configuration. Raises InvalidDocument where it has several, and none is named."""
    one = configuration(text, source, config, {name: _plain(value) for name, value in overrides.items()}, _is_stated)
    begins = [0]
    for line in text.split("\n"):
        begins.append(begins[-1] + len(line) + 1)
    words: dict[str, list[Value]] = {}
    reasons: dict[str, str] = {}
    for path, setting in sorted(one.settings.items(), key=lambda item: ("model." in item[0], item[1].line)):
        name = _name_of(path)
        if name in _FLAG_NAMES:
            at = _at(text, begins[setting.line - 1], path.rsplit(".", 1)[-1])
            words[name] = [Value(_flag_text(name, setting), at)]
            reasons.pop(name, None)
            if (why := refusal(setting)) is not None:
                reasons[name] = why
    remarks = [f"the configuration {one.name}"] if one.name else []
    if words and SHARDED not in words and _OF_NEMO.search(text):
        words[SHARDED] = [Value("true", 0)]
        remarks.append(f"recipes of NeMo set {SHARDED.replace('-', '_')} in other files: taken as set")
    if one.elsewhere:
        remarks.append(f"in other files and not read, what the configuration is made by: {', '.join(one.elsewhere)}")
    return Recipe(words, tuple(remarks), reasons)


def _plain(value: str) -> Any:
    return int(value) if value.isdecimal() else value


def _name_of(path: str) -> str:
    *owners, last = path.split(".")
    name = last.replace("_", "-")
    return "" if any(owner in _OTHERS for owner in owners) else _OF_HELPERS.get(name) or OTHERWISE.get(name, name)


def _is_stated(path: str, setting: Setting) -> bool:
    """Return whether a setting makes its object a configuration of Megatron's."""
    return _name_of(path) in SHAPE | BATCHES and setting.value is not None


def _at(text: str, begin: int, word: str) -> int:
    """Return the place of a setting in the text: its name in the line, else the line's begin."""
    end = text.find("\n", begin)
    place = text.find(word, begin, len(text) if end < 0 else end)
    return begin if place < 0 else place


def _flag_text(name: str, setting: Setting) -> str:
    """Write a value as flags have it."""
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
