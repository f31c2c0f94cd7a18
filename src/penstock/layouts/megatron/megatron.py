"""Megatron-Core's flags of a pipeline: written as a shell array, read from a script, a configuration or one string."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Literal

from penstock.layouts.compared import Size, compared, unknown_sentence
from penstock.layouts.degrees import refuse_degrees
from penstock.layouts.drawn import NONE, Drawn, Expressed, Reading, wrong
from penstock.layouts.megatron.cuts import stages_of
from penstock.layouts.megatron.flags import (
    DEGREES,
    GRADIENTS,
    GROUP,
    LAYOUT,
    MAIN_GRADIENTS,
    OTHER_ORDER,
    RANKS,
    SHAPE,
    SIZES,
    Flags,
)
from penstock.layouts.megatron.layout_string import read_layout
from penstock.layouts.megatron.other_flags import CHANGING, changing_sentence
from penstock.layouts.megatron.written import Flag, flags_of
from penstock.schemas.errors import InvalidDocument
from penstock.solvers.model.trainer_limits import Recomputing

_SIZES: tuple[Size, ...] = ("hidden", "heads", "length", "experts", "vocabulary")
"""What the flags of ``SIZES`` say, in their order."""
_LAYOUT_ALONE = re.compile(r"[^\s=:#-]{1,200000}")


def write(plan: Expressed) -> str:
    """Shell arrays, to be sourced: ``LAUNCH_ARGS`` for torchrun, ``PIPELINE_ARGS`` for the training script."""
    remarks = [f"# {line}" for line in plan.remarks()]
    lines = [*remarks, *_launch(plan), "PIPELINE_ARGS=(", *(f"    {_shell(flag)}" for flag in flags_of(plan)), ")", ""]
    return "\n".join(lines)


def _launch(plan: Expressed) -> list[str]:
    """torchrun's options, where every node has equally many processes and each is one GPU."""
    each = {count for _name, count in plan.nodes}
    if plan.gpus > 1 or len(each) > 1:
        return []
    return [f"LAUNCH_ARGS=(--nnodes {len(plan.nodes)} --nproc-per-node {each.pop()})"]


def _shell(flag: Flag) -> str:
    words = flag.value if isinstance(flag.value, tuple) else () if flag.value is True else (str(flag.value),)
    return " ".join([f"--{flag.name}", *map(shlex.quote, words)])


def read(text: str, given: Reading) -> Drawn:
    """The layout of flags, or of a layout string alone.

    Raises InvalidDocument with line and column.
    """
    roles = given.roles
    assert roles is not None
    flags = Flags(text, given.source)
    if not SHAPE & flags.found.keys():
        return _alone(text, given)
    ranks = flags.number(RANKS) or given.ranks or 1
    degrees, unknown = _degrees(flags, given), _compared(flags, given)
    stages = stages_of(flags, roles, ranks)
    drawn = Drawn(
        stages,
        ranks,
        "",
        rows=flags.number("micro-batch-size") or given.rows,
        global_batch_size=flags.number("global-batch-size"),
        group=flags.number(GROUP),
        recompute=_recompute(flags),
        overlap=flags.on("overlap-grad-reduce"),
        shard_states=flags.on("use-distributed-optimizer"),
        processes=_processes(flags),
        gradient=_gradient(flags),
        other_order=flags.on(OTHER_ORDER),
        assumptions=(*_assumptions(flags, given), *degrees, *unknown),
    )
    return _dealt(drawn, f"another --{RANKS}")


def batch_said(text: str) -> int | None:
    """The global batch size of the flags, to ask for it."""
    return Flags(text, "the layout").number("global-batch-size")


def _alone(text: str, given: Reading) -> Drawn:
    """A layout string without flags."""
    assert given.roles is not None
    layout = text.strip().strip("'\"")
    if not _LAYOUT_ALONE.fullmatch(layout):
        raise InvalidDocument(
            f"{given.source} has neither Megatron's flags of a pipeline nor a layout string",
            remedy=f"a script with --{RANKS}, --num-layers, --micro-batch-size, …, or a string such as 'Et*4|t*4L'",
        )
    stages = read_layout(layout, given.roles, text, text.index(layout))
    ranks = given.ranks or len(stages)
    said = (f"one pipeline rank per stage, {ranks}",) if given.ranks is None else ()
    drawn = Drawn(stages, ranks, "", rows=given.rows, assumptions=said)
    return _dealt(drawn, "another number of pipeline ranks (--pipeline-parallel-size)")


def _dealt(drawn: Drawn, otherwise: str) -> Drawn:
    """With the order that Megatron then runs."""
    if len(drawn.stages) % drawn.ranks:
        raise wrong(
            f"{len(drawn.stages)} stages cannot be dealt to {drawn.ranks} pipeline ranks",
            f"a layout with a multiple of {drawn.ranks} stages, or {otherwise}",
        )
    return replace(drawn, schedule="early-backward" if len(drawn.stages) == drawn.ranks else "interleaved")


def _recompute(flags: Flags) -> Recomputing:
    """As the flags say; selective recomputation is not distinguished."""
    granularity, method = flags.value("recompute-granularity"), flags.value("recompute-method")
    if granularity is None or granularity.text != "full":
        return NONE
    layers = flags.number("recompute-num-layers") or 1
    if method is None or method.text not in ("uniform", "block"):
        said = "absent" if method is None else repr(method.text)
        raise flags.wrong(
            "recompute-granularity" if method is None else "recompute-method",
            f"--recompute-method is {said}, neither uniform nor block; --recompute-granularity full needs one",
        )
    return Recomputing("block" if method.text == "block" else "uniform", layers)


def _processes(flags: Flags) -> int | None:
    """Devices that the launcher's flags start, each a group of tensor and context parallel GPUs."""
    nodes, each = flags.said("nnodes"), flags.said("nproc-per-node")
    if nodes is None or each is None:
        return None
    return nodes * each // ((flags.number(DEGREES[0]) or 1) * (flags.number(DEGREES[1]) or 1))


def _degrees(flags: Flags, given: Reading) -> tuple[str, ...]:
    """What to say of parallelism within layers. Raises UnsupportedRequest where it is not what devices represent."""
    tensor, context, *experts = ((name, flags.number(name) or 1) for name in DEGREES)
    spread = {f"--{name}": degree for name, degree in experts if name != DEGREES[-1] or degree != tensor[1]}
    groups = {f"--{name}": degree for name, degree in (tensor, context)}
    return refuse_degrees(flags.source, groups, spread, given.gpus, lambda name: flags.place(name.removeprefix("--")))


def _compared(flags: Flags, given: Reading) -> tuple[str, ...]:
    """What could not be compared. Raises InvalidDocument where model and profile contradict each other."""
    said = {size: value for name, size in zip(SIZES, _SIZES, strict=True) if (value := flags.number(name)) is not None}
    names = dict(zip(_SIZES, SIZES, strict=True))
    found = compared(given.profile, given.roles, said)
    for size, words in found.wrong.items():
        raise flags.wrong(
            names[size],
            f"--{names[size]} is {said[size]}; {words}",
            "a profile of this model: penstock profile, or another --example",
        )
    return unknown_sentence([f"--{names[size]} {said[size]}" for size in found.unknown])


def _gradient(flags: Flags) -> Literal["parameter", "fp32"] | None:
    """Width of gradients of 16-bit parameters by Megatron's rules; None where no flag says anything of widths.

    fp32 under ``--bf16`` unless stated otherwise, 16 bits under ``--fp16`` (``training/arguments.py``, validate_args);
    in configurations ``grad_reduce_in_fp32``.
    """
    if not flags.found.keys() & {*GRADIENTS, MAIN_GRADIENTS}:
        return None
    main = flags.value(MAIN_GRADIENTS)
    told_off = flags.value("grad-reduce-in-fp32") is not None and not flags.on("grad-reduce-in-fp32")
    if flags.on("grad-reduce-in-bf16") or told_off or (main is not None and main.text in ("bf16", "fp16")):
        return "parameter"
    asked = flags.on("accumulate-allreduce-grads-in-fp32") or flags.on("grad-reduce-in-fp32")
    return "parameter" if flags.on("fp16") and not asked else "fp32"


def _assumptions(flags: Flags, given: Reading) -> list[str]:
    """What the flags say that a plan cannot, and what they leave out."""
    said = flags.remarks()
    if RANKS not in flags.found:
        said.append(f"no --{RANKS} in the text: Megatron's own, 1" if LAYOUT not in flags.found else f"no --{RANKS}")
    granularity = flags.value("recompute-granularity")
    if (granularity is not None and granularity.text == "selective") or flags.on("recompute-activations"):
        said.append("selective recomputation is inside the profile's stashes, or it is not counted")
    if flags.on("use-distributed-optimizer"):
        said.append("--use-distributed-optimizer: optimizer states are shared out over the replicas")
    profiled = given.profile.parameter_dtype
    if (stated := next((width for width in ("bf16", "fp16") if flags.on(width)), profiled)) != profiled:
        said.append(f"--{stated}, and the profile was measured with parameters in {profiled}: judged are the profile's")
    if changing := [name for name in CHANGING if flags.mentioned(name)]:
        said.append(changing_sentence(changing))
    return said
