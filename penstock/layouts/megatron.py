"""Megatron-Core's flags of a pipeline: written as a shell array, read from a script, a configuration or one string."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from penstock.layouts.drawn import NONE, Drawn, Expressed, Reading, wrong
from penstock.layouts.megatron_cuts import stages_of
from penstock.layouts.megatron_flags import GROUP, LAYOUT, OTHER_ORDER, RANKS, SHAPE, Flags
from penstock.layouts.megatron_string import print_layout, read_layout
from penstock.schemas.errors import InvalidDocument
from penstock.solvers.within import Recomputing

_LAYOUT_ALONE = re.compile(r"[^\s=:#-]{1,200000}")


def write(plan: Expressed) -> str:
    """A shell array ``PIPELINE_ARGS``, to be sourced and handed to the training script."""
    assert plan.roles is not None
    flags = [f"--{RANKS} {plan.ranks}"]
    if plan.ranks > 1:
        flags.append(f"--{LAYOUT} {shlex.quote(print_layout(plan.stages, plan.roles))}")
    if plan.order == "interleaved" and plan.group != plan.ranks:
        flags.append(f"--{GROUP} {plan.group}")
    flags += [
        f"--num-layers {plan.roles.number}",
        *([f"--mtp-num-layers {plan.roles.mtp}"] if plan.roles.mtp else []),
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
    flags = Flags(text, given.source)
    if not SHAPE & flags.found.keys():
        return _alone(text, given)
    ranks = flags.number(RANKS) or given.ranks or 1
    stages = stages_of(flags, roles, ranks)
    if flags.on(OTHER_ORDER):
        raise flags.wrong(
            OTHER_ORDER,
            f"--{OTHER_ORDER} counts ranks along the pipeline first; judged are ranks in Megatron's usual order, "
            "stage after stage",
            "leave it out",
        )
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
        assumptions=tuple(_assumptions(flags)),
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
    said = (f"as many pipeline ranks as stages, {ranks}",) if given.ranks is None else ()
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
    """As the flags say; selective recomputation is not told apart."""
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
    """GPUs that the launcher's flags start, in groups of tensor and context parallelism."""
    nodes, each = flags.said("nnodes"), flags.said("nproc-per-node")
    if nodes is None or each is None:
        return None
    return nodes * each // _group(flags)


def _group(flags: Flags) -> int:
    return (flags.said("tensor-model-parallel-size") or 1) * (flags.said("context-parallel-size") or 1)


def _assumptions(flags: Flags) -> list[str]:
    """What the flags say that a plan cannot, and what they leave out."""
    said = flags.remarks()
    if RANKS not in flags.found:
        said.append(f"no --{RANKS} in the text: Megatron's own, 1" if LAYOUT not in flags.found else f"no --{RANKS}")
    granularity = flags.value("recompute-granularity")
    if (granularity is not None and granularity.text == "selective") or flags.on("recompute-activations"):
        said.append("selective recomputation is inside the profile's stashes, or it is not counted")
    if _group(flags) > 1:
        said.append(f"each device of the topology stands for {_group(flags)} GPUs (tensor × context parallel)")
    if flags.on("use-distributed-optimizer"):
        said.append("--use-distributed-optimizer: optimizer states are shared out over the replicas")
    return said
