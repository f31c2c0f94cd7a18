"""Where Megatron-Core cuts: as the layout string says, else evenly as its other flags say.

.. [1] Megatron-LM, ``core/transformer/transformer_block.py`` (get_num_layers_to_build), ``training/arguments.py``.
"""

from __future__ import annotations

import re

from penstock.convert.layer_roles import Roles
from penstock.layouts.files.shell import Value
from penstock.layouts.megatron.flags import Flags
from penstock.layouts.megatron.layout_string import read_layout
from penstock.layouts.megatron.names import LAYOUT, OTHER_STACKS, RANKS
from penstock.schemas.errors import InvalidDocument

MTP = "mtp-num-layers"
FIRST, LAST = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
PER_STAGE, STAGES = "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"
WITH_EMBEDDING, WITH_LOSS = "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"


def stages_of(flags: Flags, roles: Roles, ranks: int, *, equal: bool = True) -> tuple[tuple[int, int], ...]:
    """First and last layer of each stage. Raises InvalidDocument where the flags contradict each other or the model.

    ``equal``: whether the profile is known to be of equal transformer layers. One that may be of others is one stage
    where the flags have layers of several kinds, and no pipeline.
    """
    if not equal and ranks == 1 and not any(flags.on(name) for name in (LAYOUT, PER_STAGE, STAGES)):
        stacks = next((name for name in OTHER_STACKS if flags.mentioned(name)), None)
        if stacks is not None:
            return ((0, roles.last + roles.after),)
    _refuse_other_stacks(flags)
    for name, known, what in (
        ("num-layers", roles.number, "transformer layers"),
        (MTP, roles.mtp, "layers of multi-token prediction"),
    ):
        said = flags.number(name, least=0 if name == MTP else 1)
        if said is not None and said != known and (name != MTP or known):
            raise flags.wrong(
                name,
                f"--{name} is {said}; the profile has {known} {what}",
                "a profile of this model, or say which layers are meant (--set transformer=FIRST-LAST)",
            )
    layout = flags.value(LAYOUT)
    if layout is not None:
        _refuse_both(flags)
        text = (layout.text if roles.mtp else _without_mtp(flags, layout)).replace("\\", "")  # of a shell within
        stages = read_layout(text, roles, flags.text, layout.at)
        each = flags.number(STAGES)
        if each is not None and len(stages) != ranks * each:
            raise flags.wrong(STAGES, f"{each} stages on each of {ranks} ranks, and the layout has {len(stages)}")
        return stages
    found, layer = [], roles.first
    for count in _counts(flags, roles.number, ranks):
        found.append((layer, layer + count - 1))
        layer += count
    found[0] = (0, found[0][1])
    found[-1] = (found[-1][0], found[-1][1] + roles.after)
    return tuple(found)


def _without_mtp(flags: Flags, layout: Value) -> str:
    """The layout for a profile without multi-token prediction; a comma means nothing."""
    if re.search(r"(?:^|\|),*m(?:\*\d+)?,*(?:\||$)", layout.text):
        raise flags.wrong(
            LAYOUT,
            "multi-token prediction has a stage of its own, and the profile has no such layer",
            "a profile with layers called mtp, or a layout with m in another stage",
        )
    return layout.text.replace("m", ",")


def predicts_more(flags: Flags) -> bool:
    """Whether the flags have layers of multi-token prediction, by their number or in the layout."""
    layout = flags.value(LAYOUT)
    return bool(flags.number(MTP, least=0)) or (layout is not None and "m" in layout.text)


def _refuse_other_stacks(flags: Flags) -> None:
    """Layers of several kinds, or two stacks of them, are cut by other rules and do not cost the same."""
    for name in OTHER_STACKS:
        if flags.mentioned(name):
            what = (
                "two stacks"
                if name in ("decoder-num-layers", "encoder-num-layers")
                else "layers of several kinds, such as Mamba's"
            )
            raise flags.wrong(
                name,
                f"--{name}: a model of {what}, which Megatron cuts by rules of their own; judged are stacks of equal "
                "transformer layers",
                "the stages as ranges of the profile's layers: --from ranges",
            )


def _refuse_both(flags: Flags) -> None:
    """Megatron takes a layout or the flags of an even cut; configurations may say the layout's stages per rank too."""
    others = (FIRST, LAST, PER_STAGE, *(() if flags.configured else (STAGES,)), WITH_EMBEDDING, WITH_LOSS)
    for name in others:
        if flags.on(name):
            raise flags.wrong(
                name,
                f"--{name}{_after(flags, name)} together with --{LAYOUT}{_after(flags, LAYOUT)} "
                f"({flags.place(LAYOUT)}): Megatron takes one of them",
                "leave out the one that does not count",
            )


def _after(flags: Flags, name: str) -> str:
    """A flag's value, after its name; nothing for a switch."""
    said = flags.value(name)
    return "" if said is None or said.text.lower() == "true" else f" {said.text[:60]}"


def _counts(flags: Flags, layers: int, ranks: int) -> list[int]:
    """Transformer layers of each stage."""
    first, last = flags.number(FIRST), flags.number(LAST)
    embedding, loss = flags.on(WITH_EMBEDDING), flags.on(WITH_LOSS)
    if first is not None or last is not None:
        if embedding or loss:
            raise _uneven(flags, FIRST if first is not None else LAST, "it goes with no --account-for-… flag")
        return _uneven_ends(flags, layers, ranks, first, last)
    chunks = _chunks(flags, layers + embedding + loss, ranks)
    each, left = divmod(layers + embedding + loss, ranks * chunks)
    counts = [each] * (ranks * chunks)
    counts[0] -= embedding
    counts[-1] -= loss
    if left:  # a first or last stage without transformer layers holds embedding or head
        accounted = f", embedding and head counted, {layers + embedding + loss}" if embedding or loss else ""
        name = RANKS if RANKS in flags.found else None
        raise _uneven(flags, name, f"{layers} layers{accounted} do not share evenly among {ranks * chunks} stages")
    return counts


def _uneven_ends(flags: Flags, layers: int, ranks: int, first: int | None, last: int | None) -> list[int]:
    """Both ends as stated, the ranks between them evenly; a rank's layers are shared evenly by its virtual stages."""
    name = FIRST if first is not None else LAST
    ends = [end for end in (first, last) if end is not None]
    between = ranks - len(ends)
    each, left = divmod(layers - sum(ends), between) if between > 0 else (0, layers - sum(ends))
    if between < 0 or left or (between > 0 and each < 1):
        stated = " and ".join(map(str, ends))
        raise _uneven(flags, name, f"{layers} layers, {stated} of them on one rank each, do not share evenly")
    held = [*([] if first is None else [first]), *[each] * between, *([] if last is None else [last])]
    chunks = _chunks(flags, layers, ranks)
    if odd := [count for count in held if count % chunks]:
        raise _uneven(flags, name, f"{odd[0]} layers of a rank are no multiple of its {chunks} virtual stages")
    return [count // chunks for _chunk in range(chunks) for count in held]


def _chunks(flags: Flags, layers: int, ranks: int) -> int:
    per_stage, stages = flags.number(PER_STAGE), flags.number(STAGES)
    if per_stage is None:
        return stages or 1
    if layers % (ranks * per_stage):
        what = f"{layers} layers are no multiple of {ranks} ranks × {per_stage} layers of a virtual stage"
        raise _uneven(flags, PER_STAGE, what)
    return layers // (ranks * per_stage)


def _uneven(flags: Flags, name: str | None, what: str) -> InvalidDocument:
    remedy = f"--{LAYOUT}, which says what is where"
    if flags.configured:
        what = f"{what}, unless another file says more"
        remedy = f"say it: --given {WITH_EMBEDDING}=true --given {WITH_LOSS}=true, or --given {LAYOUT}=…"
    if name is None:
        return InvalidDocument(f"{flags.source}: {what}", remedy=remedy)
    return flags.wrong(name, f"--{name}{_after(flags, name)}: {what}", remedy)
