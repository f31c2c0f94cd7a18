"""Megatron-Core's flags of a pipeline: written as a shell array, read from a script, a configuration or one string.

Without a layout Megatron cuts evenly; what it divides is as in ``core/transformer/transformer_block.py`` and
``training/arguments.py`` of Megatron-LM. Flags that say nothing of the pipeline are passed over.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import NamedTuple

from penstock.importers.lines import Faults
from penstock.layouts.drawn import NONE, Drawn, Expressed, Reading
from penstock.layouts.megatron_string import print_layout, read_layout
from penstock.layouts.roles import Roles
from penstock.layouts.texts import place
from penstock.solvers.within import Recomputing

LAYOUT = "pipeline-model-parallel-layout"
RANKS = "pipeline-model-parallel-size"
NUMBERS = (
    RANKS,
    "num-layers",
    "micro-batch-size",
    "global-batch-size",
    "recompute-num-layers",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "tensor-model-parallel-size",
    "context-parallel-size",
)
WORDS = (LAYOUT, "recompute-granularity", "recompute-method")
SWITCHES = (
    "overlap-grad-reduce",
    "use-distributed-optimizer",
    "recompute-activations",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
)
_FLAG = re.compile(
    r"--([a-z][a-z0-9_-]*)(?:(?:[ \t]*[=:][ \t]*|[ \t]+(?:\\\n\s*)?)(?!--)('[^'\n]*'|\"[^\"\n]*\"|[^\s'\"]+))?"
)
_COMMENT = re.compile(r"(?m)(^|(?<=\s))#.*$")


class Value(NamedTuple):
    """What stands behind a flag, and where in the text."""

    text: str
    at: int


def write(plan: Expressed) -> str:
    """A shell array ``PIPELINE_ARGS``, to be sourced and handed to the training script."""
    assert plan.roles is not None
    flags = [f"--{RANKS} {plan.ranks}"]
    if plan.ranks > 1:
        flags.append(f"--{LAYOUT} {shlex.quote(print_layout(plan.stages, plan.roles))}")
    flags += [
        f"--num-layers {plan.roles.number}",
        f"--micro-batch-size {plan.rows}",
        f"--global-batch-size {plan.global_batch_size}",
    ]
    if plan.recompute.method != "none":
        method, layers = plan.recompute
        flags.append(f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}")
    flags += ["--overlap-grad-reduce"] if plan.overlap else []
    flags += ["--use-distributed-optimizer"] if plan.shard_states else []
    remarks = [f"# {line}" for line in plan.remarks()]
    return "\n".join([*remarks, "PIPELINE_ARGS=(", *(f"    {flag}" for flag in flags), ")", ""])


def read(text: str, given: Reading) -> Drawn:
    """The layout of flags, or of a layout string alone.

    Raises InvalidDocument with line and column.
    """
    roles = given.roles
    assert roles is not None
    plain = _COMMENT.sub(lambda match: " " * len(match[0]), text)
    if "--" not in plain:
        start = len(plain) - len(plain.lstrip())
        stages = read_layout(plain.strip(), roles, text, start)
        ranks = given.ranks or len(stages)
        said = (f"as many pipeline ranks as stages, {ranks}",) if given.ranks is None else ()
        return _dealt(stages, ranks, Drawn(stages, ranks, "", rows=given.rows, assumptions=said), given.source)
    flags = _Flags(plain, text, given.source)
    ranks = flags.number(RANKS) or given.ranks or 1
    stages = flags.stages(roles, ranks)
    return _dealt(
        stages,
        ranks,
        Drawn(
            stages,
            ranks,
            "",
            rows=flags.number("micro-batch-size") or given.rows,
            global_batch_size=flags.number("global-batch-size"),
            recompute=flags.recompute(),
            overlap=flags.on("overlap-grad-reduce"),
            assumptions=flags.assumptions(),
        ),
        given.source,
    )


def _dealt(stages: tuple[tuple[int, int], ...], ranks: int, drawn: Drawn, source: str) -> Drawn:
    if len(stages) % ranks:
        faults = Faults(source)
        faults.add(None, f"{len(stages)} stages cannot be dealt to {ranks} pipeline ranks", code="layout")
        faults.stop(f"a layout with a multiple of {ranks} stages, or another --{RANKS}")
    return replace(drawn, schedule="early-backward" if len(stages) == ranks else "interleaved")


class _Flags:
    """The flags of a text that a pipeline depends on."""

    def __init__(self, plain: str, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.found: dict[str, Value] = {}
        self.faults = Faults(source)
        for match in _FLAG.finditer(plain):
            name = match[1].replace("_", "-")
            if name in (*NUMBERS, *WORDS, *SWITCHES):
                value = (match[2] or "").strip("'\"")
                at = match.start() if match[2] is None else match.start(2) + (match[2][0] in "'\"")
                self.found[name] = Value(value, at)
        for name in NUMBERS:
            self._check_number(name)
        self.faults.stop("write the values themselves; variables of a script are not looked up")

    def _check_number(self, name: str) -> None:
        value = self.found.get(name)
        digits = None if value is None else re.fullmatch(r"([1-9][0-9]{0,8})\)?", value.text)
        if value is not None and digits is None:
            self.fault(name, f"--{name} is {value.text!r}, no number from 1 on")
        elif value is not None and digits is not None:
            self.found[name] = value._replace(text=digits[1])

    def fault(self, name: str, detail: str) -> None:
        """Where the flag's value stands."""
        line, column = place(self.text, self.found[name].at)
        self.faults.add(line, detail, column=column, code="layout")

    def number(self, name: str) -> int | None:
        """The value of a flag; None where it is absent."""
        return int(self.found[name].text) if name in self.found else None

    def on(self, name: str) -> bool:
        """Whether a switch is there."""
        return name in self.found

    def stages(self, roles: Roles, ranks: int) -> tuple[tuple[int, int], ...]:
        """As the layout says; without one, cut evenly as Megatron does."""
        layers = self.number("num-layers")
        if layers is not None and layers != roles.number:
            self.fault("num-layers", f"--num-layers is {layers}; the profile has {roles.number} transformer layers")
            self.faults.stop("a profile of this model, or say which layers are meant (--set transformer=FIRST-LAST)")
        if LAYOUT in self.found:
            value = self.found[LAYOUT]
            return read_layout(value.text, roles, self.text, value.at)
        counts = self._counts(roles.number, ranks)
        stages, layer = [], roles.first
        for count in counts:
            stages.append((layer, layer + count - 1))
            layer += count
        stages[0] = (0, stages[0][1])
        stages[-1] = (stages[-1][0], stages[-1][1] + roles.behind)
        return tuple(stages)

    def _counts(self, layers: int, ranks: int) -> list[int]:
        """Transformer layers of each stage."""
        first, last = (self.number(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
        embedding = self.on("account-for-embedding-in-pipeline-split")
        loss = self.on("account-for-loss-in-pipeline-split")
        chunks = self._chunks(layers + embedding + loss, ranks)
        if first is not None or last is not None:
            ends = [end for end in (first, last) if end is not None]
            each, left = divmod(layers - sum(ends), max(1, ranks - len(ends)))
            if chunks > 1 or ranks <= len(ends) or left or each < 1:
                self._uneven(f"{layers} layers, {' and '.join(map(str, ends))} of them on one rank each, do not share")
            middle = [each] * (ranks - len(ends))
            return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]
        each, left = divmod(layers + embedding + loss, ranks * chunks)
        counts = [each] * (ranks * chunks)
        counts[0] -= embedding
        counts[-1] -= loss
        if left or min(counts) < 1:
            self._uneven(f"{layers} layers do not share evenly")
        return counts

    def _chunks(self, layers: int, ranks: int) -> int:
        per_stage = self.number("num-layers-per-virtual-pipeline-stage")
        if per_stage is None:
            return self.number("num-virtual-stages-per-pipeline-rank") or 1
        if layers % (ranks * per_stage):
            self._uneven(f"{layers} layers are no multiple of {ranks} ranks × {per_stage} layers of a virtual stage")
        return layers // (ranks * per_stage)

    def _uneven(self, what: str) -> None:
        self.faults.add(None, f"{what} among the pipeline ranks", code="layout")
        self.faults.stop(f"--{LAYOUT}, which says what is where")

    def recompute(self) -> Recomputing:
        """As the flags say; selective recomputation is not told apart."""
        if self.found.get("recompute-granularity", Value("", 0)).text != "full":
            return NONE
        method = self.found.get("recompute-method", Value("uniform", 0)).text
        layers = self.number("recompute-num-layers") or 1
        if method == "block":
            return Recomputing("block", layers)
        if method != "uniform":
            self.fault("recompute-method", f"--recompute-method is {method!r}, neither uniform nor block")
            self.faults.stop()
        return Recomputing("uniform", layers)

    def assumptions(self) -> tuple[str, ...]:
        """What the flags say that a plan cannot."""
        said = []
        if (self.number(RANKS), LAYOUT in self.found) == (None, True):
            said.append(f"no --{RANKS} in the text")
        granularity = self.found.get("recompute-granularity", Value("", 0)).text
        if granularity == "selective" or self.on("recompute-activations"):
            said.append("selective recomputation is inside the profile's stashes, or it is not counted")
        group = (self.number("tensor-model-parallel-size") or 1) * (self.number("context-parallel-size") or 1)
        if group > 1:
            said.append(f"each device of the topology stands for {group} GPUs (tensor × context parallel)")
        if self.on("use-distributed-optimizer"):
            said.append("--use-distributed-optimizer is memory.optimizer_sharding: over_replicas in a request")
        return tuple(said)
