"""The arguments that Megatron prints when it starts, in a log, as flags with their values.

A line is ``  name ..... value``, after any prefix of a launcher. Values are settled: no variable is left, and defaults
are among them. Arguments of parts that the model or the layout lacks are left out, as they state nothing about it.

.. [1] Megatron-LM, ``training/arguments.py`` (_print_args, validate_args).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from penstock.layouts.megatron.forks import INSTEAD
from penstock.layouts.megatron.names import OTHERWISE, READ
from penstock.layouts.megatron.other_flags import CHANGING

_BEGIN, _END = re.compile(r"-{8,} arguments -{8,}"), re.compile(r"-{8,} end of arguments -{8,}")
_ARGUMENT = re.compile(r"  ([A-Za-z][A-Za-z0-9_]*) (?:\.* )?(.*?)\s*$")
_NOTHING = frozenset(("None", "", "[]", "{}"))
_WORD = re.compile(r"[^\s\[\]'\",()]+")
_OFF = {
    "gradient-accumulation-fusion": "no-gradient-accumulation-fusion",
    "overlap-p2p-comm": "no-overlap-p2p-communication",
}
"""Arguments for whose absence Megatron has a flag."""
_OF_LATENT = frozenset(("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"))
_OF_EXPERTS = re.compile(r"moe-|expert-(?!model-parallel-size)|overlap-moe-|delay-wgrad")


def as_flags(text: str) -> str:
    """Return a text with the printed arguments as flags, each on its line; a text without any is returned unchanged.

    Of several lists the last one counts.
    """
    begins = [match.end() for match in _BEGIN.finditer(text)]
    if not begins:
        return text
    end = _END.search(text, begins[-1])
    before = text[: begins[-1]].count("\n")
    lines = text[begins[-1] : end.start() if end is not None else len(text)].split("\n")
    printed = {}
    for number, line in enumerate(lines):
        if (match := _ARGUMENT.search(line)) is not None:
            printed[match[1].replace("_", "-")] = match[2], number
    flags = [""] * len(lines)
    for name, value, number in _stated(printed):
        flags[number] = f"--{name} {value}"
    return "\n" * before + "\n".join(flags)


def _stated(printed: Mapping[str, tuple[str, int]]) -> Iterator[tuple[str, str, int]]:
    """Yield the flags that arguments stand for, each with its value and its line."""
    values = {name: value for name, (value, _line) in printed.items() if value not in _NOTHING}
    left_out = set(_without(values))
    for name, (value, number) in printed.items():
        if value in _NOTHING or name in left_out:
            continue
        if name in _OFF:
            if value == "False":
                yield _OFF[name], "", number
        elif name in READ or name in CHANGING or name in INSTEAD:
            yield OTHERWISE.get(name, name), _value(value), number


def _value(printed: str) -> str:
    """Return a printed value as a flag has it: types by their names, lists of words as words."""
    value = printed.removeprefix("torch.")
    if value.startswith("[") and not re.search(r"[0-9]", value):
        return " ".join(_WORD.findall(value))
    return value.replace(" ", "")


def _without(values: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of arguments without a meaning, since the part that they set does not exist."""
    if values.get("group-query-attention") == "False":
        yield "num-query-groups"
    if values.get("multi-latent-attention") != "True":
        yield from _OF_LATENT
    if "num-experts" not in values:
        yield from (name for name in values if _OF_EXPERTS.match(name))
    tensor = values.get("tensor-model-parallel-size")
    for shards, size in (("", tensor), ("expert-", values.get("expert-tensor-parallel-size", tensor))):
        if values.get(name := f"{shards}tensor-parallel-num-weight-shards") == size:
            yield name
    if values.get("moe-token-dispatcher-type") != "flex":
        yield "moe-flex-dispatcher-backend"
    if "virtual-pipeline-model-parallel-size" in values:
        yield "num-layers-per-virtual-pipeline-stage"
    else:
        yield "overlap-p2p-comm"
    if "decoder-num-layers" not in values:
        yield "encoder-num-layers"
