"""Megatron-Core's flags of a job, read from a script, a configuration, a recipe or a layout string alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePath
from typing import Literal

from penstock.layouts.compared import Size, compared, known_shape, unknown_sentence
from penstock.layouts.drawn import NONE, Drawn, Reading, wrong
from penstock.layouts.layout_text import Source, batch_of_replicas
from penstock.layouts.megatron.cuts import predicts_more, stages_of
from penstock.layouts.megatron.flags import Flags
from penstock.layouts.megatron.forks import INSTEAD, OF_DEEPSPEED, deepspeed_said, unknown_said
from penstock.layouts.megatron.layout_string import read_layout
from penstock.layouts.megatron.model import SHAPED_BY, context_kind_said, shape_said
from penstock.layouts.megatron.names import (
    CONTEXT,
    CUTS,
    DEGREES,
    FSDP,
    GRADIENTS,
    GROUP,
    LAYOUT,
    MAIN_GRADIENTS,
    MODULES,
    OTHER_ORDER,
    OTHER_STACKS,
    RANKS,
    SEQUENCE,
    SHAPE,
    SIZES,
    STRATEGY,
    TENSOR,
    WIDTHS,
)
from penstock.layouts.megatron.other_flags import LOWERING, changing_sentence
from penstock.layouts.megatron.written import FSDP_STRATEGIES
from penstock.layouts.stated_degrees import Stated, degrees_in
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.transformers.degrees import ContextKind, Framework
from penstock.schemas.transformers.shape import TransformerShape
from penstock.solvers.model.degrees import Degrees, Module, modules_of
from penstock.solvers.model.trainer_limits import Recomputing

_SIZES: tuple[Size, ...] = ("hidden", "heads", "length", "experts", "vocabulary")
"""The sizes that the flags of ``SIZES`` state, in their order."""
NEEDED = (*CUTS, LAYOUT, "recompute-granularity", "recompute-num-layers")
"""Flags that a layout needs, where the text has them."""
LAUNCHER = ("nnodes", "nproc-per-node")
_LAYOUT_ALONE = re.compile(r"[^\s=:#-]{1,200000}")
_MODULES: dict[str, Module | None] = {
    "core_attn": None,
    "layernorm": "norm",
    "mla_up_proj": "mla_up_proj",
    "mlp": "mlp",
    "moe": "mlp",
    "moe_act": "moe_act",
    "shared_experts": "shared_experts",
}
"""Megatron's names of recomputed modules, and ours; flash attention keeps nothing that ``core_attn`` could free."""
_OTHER_MODULES = ("gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc")
"""Recomputed modules of layers that no profile is computed for: linear attention, several residual streams."""
_SHARDINGS = {"optim": True, "optim_grads": True, "optim_grads_params": True, "no_shard": False}
_FSDP = {word: sharding for sharding, word in FSDP_STRATEGIES.items()}
_WITH_FSDP = "Megatron's FSDP ({}): optimizer states are shared out over the replicas"
_MOST_NAMED = 8


class MegatronText:
    """Flags of Megatron-Core, or a layout string alone."""

    framework: Framework | None = "megatron"

    def __init__(self, source: Source) -> None:
        self.source = source
        self.flags = Flags(source.text, source.name, source.values, source.config)

    def ask(self, *, batch: bool, model: bool) -> None:
        """Raise InvalidDocument that names all flags at once that are needed and cannot be read."""
        names = ("global-batch-size",) * batch + SHAPED_BY * model
        self.flags.ask(dict.fromkeys((*NEEDED, *names)))

    def degrees(self, *, experts: bool = False) -> Degrees:
        """Return the degrees; ``experts`` is whether the model has experts although no flag states it."""
        return _stated(self.flags, experts=experts)

    def named_degrees(self) -> tuple[tuple[str, str], ...]:
        """Return the flags of degrees above 1, each with its place."""
        named = _by_place(self.flags, DEGREES)
        return tuple((name, at) for name, at in named if not name.endswith(" 1"))

    def batch(self, gpus: int | None = None) -> int | None:
        """Return the batch; without one, a micro-batch on each replica. Recipes in Python have other defaults."""
        stated = self.flags.number("global-batch-size")
        if stated is not None or self.flags.configured:
            return stated
        degrees = [self.flags.number(name) for name in (RANKS, TENSOR, CONTEXT)]
        return batch_of_replicas(self.flags.number("micro-batch-size"), gpus, degrees)

    def shape(self) -> TransformerShape:
        """Return the shape that the flags describe."""
        return shape_said(self.flags, self.source.config or PurePath(self.source.name).stem)

    def context_kind(self) -> ContextKind | None:
        """Return how the flags exchange keys."""
        return context_kind_said(self.flags)

    def drawn(self, reading: Reading) -> Drawn:
        """Return the layout. Raises InvalidDocument for all values at once that are needed and cannot be read."""
        return _drawn(self.source.text, self.flags, reading)


def _drawn(text: str, flags: Flags, reading: Reading) -> Drawn:
    roles = reading.roles
    assert roles is not None
    if not SHAPE & flags.words.keys():
        if flags.configured:
            remarks = "; ".join(flags.remarks())
            raise InvalidDocument(
                f"{reading.source} sets batch sizes but no degrees; other files set them ({remarks})",
                remedy=f"give the degrees: --given {RANKS}=… --given {TENSOR}=…",
            )
        return _alone(text, reading)
    flags.ask(NEEDED)
    flags.drop_unread(("micro-batch-size", "global-batch-size", MODULES, STRATEGY, *SIZES, *WIDTHS))
    ranks = flags.number(RANKS) or reading.ranks or 1
    stated = _degrees(flags, reading)
    unknown = _compared(flags, reading)
    drawn = Drawn(
        stages_of(flags, roles, ranks, equal=known_shape(reading.profile) is not None),
        ranks,
        "",
        rows=flags.number("micro-batch-size") or reading.rows,
        global_batch_size=flags.number("global-batch-size"),
        group=flags.number(GROUP),
        recompute=_recompute(flags),
        overlap=flags.on("overlap-grad-reduce"),
        shard_states=flags.on("use-distributed-optimizer") or _fully_sharded(flags) is not None,
        processes=_processes(flags, reading),
        gradient=_gradient(flags),
        other_order=flags.on(OTHER_ORDER),
        degrees=stated.degrees,
        named=stated.named,
        sized=_by_place(flags, (RANKS, GROUP, "micro-batch-size", "global-batch-size")),
        launched=_by_place(flags, LAUNCHER),
        modules=_modules(flags),
        sequence_parallel=flags.on(SEQUENCE),
        sharding=_FSDP.get(_fully_sharded(flags) or ""),
        counted_whole=_counted_whole(flags),
        unmodelled=tuple(f"--{name}" for name in flags.changing() if name in LOWERING),
        assumptions=(*_assumptions(flags, reading), *stated.remarks, *unknown),
    )
    return _dealt(drawn, f"another --{RANKS}")


def _alone(text: str, reading: Reading) -> Drawn:
    """Read a layout string without flags."""
    assert reading.roles is not None
    layout = text.strip().strip("'\"")
    if not _LAYOUT_ALONE.fullmatch(layout):
        raise InvalidDocument(
            f"{reading.source} has neither Megatron's pipeline flags nor a layout string",
            remedy=f"give a script with --{RANKS}, --num-layers, --micro-batch-size, …, or a string such as "
            "'Et*4|t*4L'",
        )
    stages = read_layout(layout, reading.roles, text, text.index(layout))
    ranks = reading.ranks or len(stages)
    remarks = (f"one pipeline rank per stage, {ranks}",) if reading.ranks is None else ()
    drawn = Drawn(stages, ranks, "", rows=reading.rows, assumptions=remarks)
    return _dealt(drawn, "another number of pipeline ranks (--pipeline-parallel-size)")


def _dealt(drawn: Drawn, otherwise: str) -> Drawn:
    """Add the order that Megatron then runs."""
    if len(drawn.stages) % drawn.ranks:
        raise wrong(
            f"{len(drawn.stages)} stages cannot be shared equally by {drawn.ranks} pipeline ranks",
            f"a layout with a multiple of {drawn.ranks} stages, or {otherwise}",
        )
    return replace(drawn, schedule="early-backward" if len(drawn.stages) == drawn.ranks else "interleaved")


def _recompute(flags: Flags) -> Recomputing:
    """Read the recomputation of whole layers."""
    granularity, method = flags.text_of("recompute-granularity"), flags.text_of("recompute-method")
    if granularity != "full":
        return NONE
    layers = flags.number("recompute-num-layers") or 1
    if method is None or method not in ("uniform", "block"):
        stated = "absent" if method is None else repr(method)
        raise flags.wrong(
            "recompute-granularity" if method is None else "recompute-method",
            f"--recompute-granularity full needs --recompute-method uniform or block, which is {stated}",
        )
    return Recomputing("block" if method == "block" else "uniform", layers)


def _modules(flags: Flags) -> tuple[Module, ...]:
    """Return the modules that every layer recomputes. Raises InvalidDocument for one that Megatron does not know."""
    named = flags.text_of(MODULES) if flags.text_of("recompute-granularity") == "selective" else None
    words = [] if named is None else [word for word in named.split() if word not in _OTHER_MODULES]
    if unknown := [word for word in words if word not in _MODULES]:
        raise flags.wrong(MODULES, f"--{MODULES} has {unknown[0]!r}, which is not one of {', '.join(_MODULES)}")
    words += ["moe"] if flags.on("moe-layer-recompute") else []
    return modules_of([[ours for word in words if (ours := _MODULES[word]) is not None]])


def _processes(flags: Flags, reading: Reading) -> int | None:
    """Return the devices that the launcher's flags start: GPUs, or groups of them where a device represents a group."""
    nodes, each = (flags.number_if_readable(name) for name in LAUNCHER)
    if nodes is None or each is None:
        return None
    tensor, context = (flags.number(name) or 1 for name in DEGREES[:2])
    return nodes * each // (1 if reading.gpus == 1 else tensor * context)


def _by_place(flags: Flags, names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the text's words for each of these flags whose value can be read."""
    values = [(name, flags.number_if_readable(name)) for name in names]
    return tuple((f"--{name} {value}", flags.place(name)) for name, value in values if value is not None)


def _stated(flags: Flags, *, experts: bool) -> Degrees:
    """Read the degrees; an expert's tensors are split as all others are, unless the flags state otherwise.

    Without experts Megatron ignores how their tensors are split.
    """
    tensor, context, expert, expert_tensor = (flags.number(name) for name in DEGREES)
    experts = experts or (flags.number("num-experts") or 0) > 1 or (expert or 1) > 1
    return Degrees(tensor or 1, context or 1, expert or 1, (expert_tensor or tensor or 1) if experts else 1)


def _degrees(flags: Flags, reading: Reading) -> Stated:
    """Return the degrees. Raises UnsupportedRequest where devices represent other groups."""
    shape = reading.profile.shape
    stated = _stated(flags, experts=shape is not None and shape.experts is not None)
    names = [f"--{name}" for name in DEGREES]
    groups, experts = dict(zip(names[:2], stated[:2], strict=True)), dict(zip(names[2:], stated[2:], strict=True))

    def place(name: str) -> str:
        bare = name.removeprefix("--")
        return flags.place(bare if bare in flags.words else DEGREES[0])

    return degrees_in(flags.source, groups, experts, reading.gpus, place)


def _compared(flags: Flags, reading: Reading) -> tuple[str, ...]:
    """Return a sentence on values that could not be compared.

    Raises InvalidDocument where model and profile contradict each other.
    """
    stated = {
        size: value for name, size in zip(SIZES, _SIZES, strict=True) if (value := flags.number(name)) is not None
    }
    if stated.get("experts") == 1 and reading.profile.shape is not None and reading.profile.shape.experts is None:
        del stated["experts"]  # one expert is the usual feed-forward
    names = dict(zip(_SIZES, SIZES, strict=True))
    differences = compared(reading.profile, reading.roles, stated)
    for size, words in differences.wrong.items():
        raise flags.wrong(
            names[size],
            f"--{names[size]} is {stated[size]}; {words}",
            "use a profile of this model: penstock profile, or another --example; or no profile if the flags say the "
            "model",
        )
    return unknown_sentence([f"--{names[size]} {stated[size]}" for size in differences.unknown])


def _gradient(flags: Flags) -> Literal["parameter", "fp32"] | None:
    """Return the width of gradients of 16-bit parameters by Megatron's rules; None where no flag states a width.

    It is fp32 under ``--bf16`` unless stated otherwise, 16 bits under ``--fp16`` (``training/arguments.py``,
    validate_args), and in configurations ``grad_reduce_in_fp32`` states it.
    """
    if not flags.words.keys() & {*GRADIENTS, MAIN_GRADIENTS}:
        return None
    main = flags.text_of(MAIN_GRADIENTS)
    told_off = flags.value("grad-reduce-in-fp32") is not None and not flags.on("grad-reduce-in-fp32")
    if flags.on("grad-reduce-in-bf16") or told_off or main in ("bf16", "fp16", "bfloat16", "float16"):
        return "parameter"
    is_fp32 = flags.on("accumulate-allreduce-grads-in-fp32") or flags.on("grad-reduce-in-fp32")
    return "parameter" if flags.on("fp16") and not is_fp32 else "fp32"


def _fully_sharded(flags: Flags) -> str | None:
    """Return what Megatron's FSDP shares out, by its name for it; None without FSDP."""
    if not any(flags.on(name) for name in FSDP):
        return None
    stated = flags.text_of(STRATEGY) or ("optim_grads_params" if flags.on("use-torch-fsdp2") else "no_shard")
    if stated not in _SHARDINGS:
        raise flags.wrong(STRATEGY, f"--{STRATEGY} is {stated!r}, which is not one of {', '.join(_SHARDINGS)}")
    return stated if _SHARDINGS[stated] else None


def _counted_whole(flags: Flags) -> str:
    """Return a sentence on Megatron's FSDP where it is not judged as it is."""
    sharded = _fully_sharded(flags)
    whole = "; gradients and parameters are counted whole, and their gathering is not"
    return "" if sharded in (None, "optim") else _WITH_FSDP.format(sharded) + whole


def _assumptions(flags: Flags, reading: Reading) -> list[str]:
    """Return sentences on flags that a plan cannot express, and on values that the flags leave out."""
    sentences = flags.remarks()
    if RANKS not in flags.words:
        sentences.append(
            f"no --{RANKS} in the text: Megatron's own, 1" if LAYOUT not in flags.words else f"no --{RANKS}"
        )
    if "micro-batch-size" not in flags.words and reading.rows is None:
        sentences.append("no --micro-batch-size that can be read: 1")
    selective = flags.text_of("recompute-granularity") == "selective" or flags.on("recompute-activations")
    if selective and not _modules(flags):
        sentences.append("selective recomputation of attention: flash attention keeps nothing that it would free")
    if selective and (others := [w for w in (flags.text_of(MODULES) or "").split() if w in _OTHER_MODULES]):
        sentences.append(
            f"recomputed modules of layers that are not modelled, judged as if absent: {', '.join(others)}"
        )
    if reading.roles is not None and not reading.roles.mtp and predicts_more(flags):
        sentences.append(
            "multi-token prediction changes the answer and is not modelled: judged is the model without its layers, "
            "since the profile has none"
        )
    if flags.on("use-distributed-optimizer"):
        sentences.append("--use-distributed-optimizer: optimizer states are shared out over the replicas")
    if (sharded := _fully_sharded(flags)) == "optim":
        sentences.append(_WITH_FSDP.format(sharded))
    profiled = reading.profile.parameter_dtype
    if (stated := next((width for width in ("bf16", "fp16") if flags.on(width)), profiled)) != profiled:
        sentences.append(
            f"--{stated}, and the profile was measured with parameters in {profiled}: judged are the profile's"
        )
    if stacks := [name for name in OTHER_STACKS if flags.mentioned(name)]:
        sentences.append(
            f"--{stacks[0]}: layers of several kinds, on one stage; what they cost is as the profile has it"
        )
    fork_sentence = deepspeed_said(flags.text, (name.removeprefix("--") for name in flags.unknown))
    others = [name for name in flags.unknown if not fork_sentence or name[2:] not in OF_DEEPSPEED | INSTEAD.keys()]
    sentences += filter(None, (fork_sentence, unknown_said(others, _MOST_NAMED)))
    if changing := flags.changing():
        sentences.append(changing_sentence(changing))
    return sentences
