"""Megatron-Core's flags in a script, a manifest or a configuration, whichever spelling: found, looked up, checked.

Flags stand as ``--name value`` or ``--name=value``; in configurations (NeMo, Megatron-Bridge, Megatron's YAML, Python)
as ``name: value`` or ``name=value``. Of several the last one counts, as in Megatron. Flags that change neither the
pipeline nor what it takes are passed over; those that do and are not understood are in ``megatron_others``.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from itertools import islice

from penstock.importers.lines import Faults
from penstock.layouts.megatron.other_flags import CHANGING
from penstock.layouts.shell import EXPANDED, QUOTED, Unsaid, Value, Variables
from penstock.layouts.texts import place
from penstock.schemas.errors import Fault, InvalidDocument

LAYOUT = "pipeline-model-parallel-layout"
RANKS = "pipeline-model-parallel-size"
GROUP = "microbatch-group-size-per-virtual-pipeline-stage"
OTHER_ORDER = "use-tp-pp-dp-mapping"
DEGREES = (
    "tensor-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
)
"""Kinds of parallelism other than pipeline and data parallelism."""
SIZES = ("hidden-size", "num-attention-heads", "seq-length", "num-experts", "vocab-size")
"""What a profile was measured with."""
GRADIENTS = ("bf16", "fp16", "grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-fp32")
MAIN_GRADIENTS = "main-grads-dtype"
OTHER_STACKS = (
    "hybrid-layer-pattern",
    "hybrid-override-pattern",
    "hybrid-attention-ratio",
    "hybrid-mlp-ratio",
    "is-hybrid-model",
    "decoder-num-layers",
)
"""Models that are no stack of equal transformer layers."""
NUMBERS = (
    RANKS,
    "num-layers",
    "mtp-num-layers",
    "micro-batch-size",
    "global-batch-size",
    "recompute-num-layers",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    GROUP,
    *DEGREES,
    *SIZES,
    "nnodes",
    "nproc-per-node",
)
SHAPE = frozenset(name for name in NUMBERS if "layers" in name or "parallel-size" in name or "stages" in name) | {
    LAYOUT
}
"""One of these at least is in what Megatron starts with."""
WORDS = (LAYOUT, "recompute-granularity", "recompute-method")
SWITCHES = (
    *GRADIENTS,
    "overlap-grad-reduce",
    "use-distributed-optimizer",
    "recompute-activations",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    OTHER_ORDER,
)
OTHERWISE = {
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "microbatch-group-size-per-vp-stage": GROUP,
    "activations-checkpoint-granularity": "recompute-granularity",
    "activations-checkpoint-method": "recompute-method",
    "activations-checkpoint-num-layers": "recompute-num-layers",
    "num-moe-experts": "num-experts",
    "encoder-seq-length": "seq-length",
}
"""Names in configurations of NeMo and Megatron-Core."""
_OF_PIPELINES = tuple(
    name for name in (*NUMBERS, *WORDS, *SWITCHES, *OTHERWISE) if OTHERWISE.get(name, name) not in SIZES
)
"""Names of which a slip is looked for."""
_KNOWN = (*NUMBERS, *WORDS, MAIN_GRADIENTS, *SWITCHES, *OTHERWISE, *OTHER_STACKS, *CHANGING)
_NAMES = "|".join(sorted((name.replace("-", "[-_]") for name in _KNOWN), key=len, reverse=True))
_BETWEEN = r"[\"']?(?:[ \t]*[=:,][ \t]*|[ \t]+)(?:\\?\r?\n[ \t]*(?:-[ \t]+)?)?|[\"']?\r?\n[ \t]*-[ \t]+"
_FLAG = re.compile(rf"--({_NAMES})(?![\w-])(?:(?:{_BETWEEN})(?!--|\"--|'--)({QUOTED}|(?:{EXPANDED}|[^\s'\"])+))?")
_SETTING = re.compile(rf"(?<![\w$-])({_NAMES})[\"']?[ \t]*[:=][ \t]*({QUOTED}|(?:{EXPANDED}|[^\s'\"])*)")
_ANY_FLAG = re.compile(r"--([a-z][a-z0-9_-]{5,60})(?![\w-])")
_COMMENT = re.compile(r"(?m)(^|(?<=\s))#.*$")
_NOTHING = ("", "null", "none", "~")
_OFF = ("false", "no", "off", "0", "0.0", *_NOTHING)
_ALIKE = 0.92
_MOST_COMPARED = 1000
"""Names that are no flag of these; a script has fewer."""


class Flags:
    """The flags of a text that a pipeline depends on. Methods that return a value raise InvalidDocument for wrong ones.

    ``found``: all of each name, in their order, as in the text.
    """

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.found: dict[str, list[Value]] = {}
        plain = _COMMENT.sub(lambda match: " " * len(match[0]), text)
        self._variables = Variables(plain)
        matches = [*_FLAG.finditer(plain), *_SETTING.finditer(plain)]
        for match in sorted(matches, key=re.Match.start):
            name = match[1].replace("_", "-")
            name = OTHERWISE.get(name, name)
            text = match[2] or ("true" if match.re is _FLAG and name in (*OTHER_STACKS, *CHANGING) else "")
            if match.re is _FLAG and name in SWITCHES and text.lower() not in ("true", "false"):
                text = "true"
            word = Value(text, match.start(2) if text == match[2] else match.start())
            self.found.setdefault(name, []).append(word)
        self._refuse_slips(plain)

    def _refuse_slips(self, plain: str) -> None:
        """Each flag once, and of very many the first ones: to compare two names takes long."""
        faults = Faults(self.source)
        first: dict[str, re.Match[str]] = {}
        for match in _ANY_FLAG.finditer(plain):
            name = match[1].replace("_", "-")
            if name not in _KNOWN:
                first.setdefault(name, match)
        for name, match in islice(first.items(), _MOST_COMPARED):
            alike = [known for known in _OF_PIPELINES if abs(len(known) - len(name)) <= 0.1 * len(known)]
            if near := get_close_matches(name, alike, n=1, cutoff=_ALIKE):
                line, column = place(self.text, match.start())
                detail = f"--{match[1]} is no flag of Megatron's; did you mean --{near[0]}?"
                faults.add(line, detail, column=column, code="layout")
        faults.stop()

    def wrong(self, name: str, detail: str, remedy: str | None = None) -> InvalidDocument:
        """An error that points to the flag's value."""
        return self._wrong(self._looked_up(name).at, detail, remedy)

    def place(self, name: str) -> str:
        """Line and column of a flag's value."""
        return self._place(self._looked_up(name).at)

    def _place(self, at: int) -> str:
        line, column = place(self.text, at)
        return f"line {line}, column {column}"

    def _looked_up(self, name: str) -> Value:
        word = self.found[name][-1]
        try:
            return self._variables.value(word)
        except Unsaid as unsaid:
            why = str(unsaid)
        raise self._wrong(
            word.at,
            f"--{name} is {word.text!r}, no value that can be read: {why}",
            "write the value itself, or set the variable in a line above (PP=4)",
        )

    def _wrong(self, at: int, detail: str, remedy: str | None = None) -> InvalidDocument:
        fault = Fault(self._place(at), detail, "layout")
        return InvalidDocument(f"{self.source} has 1 fault", faults=(fault,), remedy=remedy)

    def value(self, name: str) -> Value | None:
        """What a flag says, and where that stands; None where it is absent."""
        if name not in self.found:
            return None
        found = self._looked_up(name)
        return None if found.text.lower() in _NOTHING else found

    def number(self, name: str, least: int = 1) -> int | None:
        """The value of a flag; None where it is absent."""
        found = self.value(name)
        if found is None:
            return None
        digits = re.fullmatch(r"([0-9]{1,9})[),;\]}\\]*", found.text)
        if digits is None or int(digits[1]) < least or digits[1] != str(int(digits[1])):
            raise self._wrong(found.at, f"--{name} is {found.text[:60]!r}, no number from {least} on")
        return int(digits[1])

    def said(self, name: str) -> int | None:
        """The number of a flag that does not matter enough to ask for it; None where it is not to be seen."""
        try:
            word = self._variables.value(self.found[name][-1]).text if name in self.found else ""
        except Unsaid:
            return None
        return int(word) if re.fullmatch(r"[1-9][0-9]{0,5}", word) else None

    def on(self, name: str) -> bool:
        """Whether a switch is there, and not said to be off."""
        return name in self.found and self._looked_up(name).text.lower().rstrip(",") not in _OFF

    def mentioned(self, name: str) -> bool:
        """Whether a flag is there and, as far as it can be seen, not said to be off."""
        try:
            return self.on(name)
        except InvalidDocument:
            return True

    def remarks(self) -> list[str]:
        """Flags that are given more than once and differ."""
        said = []
        for name, words in self.found.items():
            if len({word.text for word in words}) > 1:
                line, _column = place(self.text, words[-1].at)
                said.append(f"--{name} is given {len(words)} times; the last one counts, line {line}")
        return said
