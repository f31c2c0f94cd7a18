"""Cuts of Megatron-Core: by the layout string, else evenly by its other flags.

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
    """Return first and last layer of each stage.

    ``equal`` is whether the profile is known to have equal transformer layers. A profile that may have others is one
    stage where the flags have layers of several kinds, and no pipeline. Raises InvalidDocument where the flags
    contradict each other or the model.
    """
    if not equal and ranks == 1 and not any(flags.on(name) for name in (LAYOUT, PER_STAGE, STAGES)):
        stacks = next((name for name in OTHER_STACKS if flags.mentioned(name)), None)
        if stacks is not None:
            return ((0, roles.last + roles.after),)
    _refuse_other_stacks(flags)
    for name, expected, what in (
        ("num-layers", roles.number, "transformer layers"),
        (MTP, roles.mtp, "layers of multi-token prediction"),
    ):
        stated = flags.number(name, least=0 if name == MTP else 1)
        if stated is not None and stated != expected and (name != MTP or expected):
            raise flags.wrong(
                name,
                f"--{name} is {stated}; the profile has {expected} {what}",
                "a profile of this model, or say which layers are meant (--set transformer=FIRST-LAST)",
            )
    layout = flags.value(LAYOUT)
    if layout is not None:
        _refuse_both(flags)
        text = (layout.text if roles.mtp else _without_mtp(flags, layout)).replace("\\", "")  # of a shell within
        stages = read_layout(text, roles, flags.text, layout.at)
        each = flags.number(STAGES)
        if each is not None and len(stages) != ranks * each:
            raise flags.wrong(
                STAGES,
                f"{each} stages on each of {ranks} ranks are {each * ranks} stages; the layout has {len(stages)}",
            )
        return stages
    ranges, layer = [], roles.first
    for count in _counts(flags, roles.number, ranks):
        ranges.append((layer, layer + count - 1))
        layer += count
    ranges[0] = (0, ranges[0][1])
    ranges[-1] = (ranges[-1][0], ranges[-1][1] + roles.after)
    return tuple(ranges)


def _without_mtp(flags: Flags, layout: Value) -> str:
    """Return the layout for a profile without multi-token prediction; a comma has no meaning."""
    if re.search(r"(?:^|\|),*m(?:\*\d+)?,*(?:\||$)", layout.text):
        raise flags.wrong(
            LAYOUT,
            "the layout has a stage for multi-token prediction alone, and the profile has no such layer",
            "a profile with layers called mtp, or a layout with m in another stage",
        )
    return layout.text.replace("m", ",")


def predicts_more(flags: Flags) -> bool:
    """Return whether the flags have layers of multi-token prediction, by their number or in the layout."""
    layout = flags.value(LAYOUT)
    return bool(flags.number(MTP, least=0)) or (layout is not None and "m" in layout.text)


def _refuse_other_stacks(flags: Flags) -> None:
    """Refuse layers of several kinds, or two stacks of them, which are cut by other rules and do not cost the same."""
    for name in OTHER_STACKS:
        if flags.mentioned(name):
            what = (
                "two stacks"
                if name in ("decoder-num-layers", "encoder-num-layers")
                else "layers of several kinds, such as Mamba's"
            )
            raise flags.wrong(
                name,
                f"--{name} means {what}, which Megatron cuts by other rules; Penstock reads only one stack of equal "
                "transformer layers",
                "give the stages as ranges of the profile's layers: --from ranges",
            )


def _refuse_both(flags: Flags) -> None:
    """Refuse a layout together with flags of an even cut, since Megatron takes either.

    Configurations may state the layout's stages per rank too.
    """
    others = (FIRST, LAST, PER_STAGE, *(() if flags.configured else (STAGES,)), WITH_EMBEDDING, WITH_LOSS)
    for name in others:
        if flags.on(name):
            raise flags.wrong(
                name,
                f"Megatron takes --{name}{_after(flags, name)} or --{LAYOUT}{_after(flags, LAYOUT)} "
                f"({flags.place(LAYOUT)}), not both",
                "leave out one of them",
            )


def _after(flags: Flags, name: str) -> str:
    """Return a flag's value, to stand after its name; no text for a switch."""
    word = flags.value(name)
    return "" if word is None or word.text.lower() == "true" else f" {word.text[:60]}"


def _counts(flags: Flags, layers: int, ranks: int) -> list[int]:
    """Return the transformer layers of each stage."""
    first, last = flags.number(FIRST), flags.number(LAST)
    embedding, loss = flags.on(WITH_EMBEDDING), flags.on(WITH_LOSS)
    if first is not None or last is not None:
        if embedding or loss:
            raise _uneven(
                flags, FIRST if first is not None else LAST, "this flag cannot be combined with an --account-for-… flag"
            )
        return _uneven_ends(flags, layers, ranks, first, last)
    chunks = _chunks(flags, layers + embedding + loss, ranks)
    each, left = divmod(layers + embedding + loss, ranks * chunks)
    counts = [each] * (ranks * chunks)
    counts[0] -= embedding
    counts[-1] -= loss
    if left:  # a first or last stage without transformer layers holds embedding or head
        accounted = f" ({layers + embedding + loss} with embedding and head)" if embedding or loss else ""
        name = RANKS if RANKS in flags.words else None
        raise _uneven(flags, name, f"{layers} layers{accounted} cannot be split evenly over {ranks * chunks} stages")
    return counts


def _uneven_ends(flags: Flags, layers: int, ranks: int, first: int | None, last: int | None) -> list[int]:
    """Return the layers of each stage with both ends as stated and the ranks between them even.

    A rank's layers are shared evenly by its virtual stages.
    """
    name = FIRST if first is not None else LAST
    ends = [end for end in (first, last) if end is not None]
    between = ranks - len(ends)
    each, left = divmod(layers - sum(ends), between) if between > 0 else (0, layers - sum(ends))
    if between < 0 or left or (between > 0 and each < 1):
        stated = " and ".join(map(str, ends))
        raise _uneven(flags, name, f"{layers} layers, less {stated}, cannot be split evenly over the other ranks")
    rank_layers = [*([] if first is None else [first]), *[each] * between, *([] if last is None else [last])]
    chunks = _chunks(flags, layers, ranks)
    if odd := [count for count in rank_layers if count % chunks]:
        raise _uneven(flags, name, f"the {odd[0]} layers of a rank are not a multiple of its {chunks} virtual stages")
    return [count // chunks for _chunk in range(chunks) for count in rank_layers]


def _chunks(flags: Flags, layers: int, ranks: int) -> int:
    per_stage, stages = flags.number(PER_STAGE), flags.number(STAGES)
    if per_stage is None:
        return stages or 1
    if layers % (ranks * per_stage):
        what = f"{layers} layers are not a multiple of {ranks} ranks × {per_stage} layers per virtual stage"
        raise _uneven(flags, PER_STAGE, what)
    return layers // (ranks * per_stage)


def _uneven(flags: Flags, name: str | None, what: str) -> InvalidDocument:
    remedy = f"name the layers of each stage: --{LAYOUT}"
    if flags.configured:
        what = f"{what}, unless another file says more"
        remedy = f"add a flag: --given {WITH_EMBEDDING}=true --given {WITH_LOSS}=true, or --given {LAYOUT}=…"
    if name is None:
        return InvalidDocument(f"{flags.source}: {what}", remedy=remedy)
    return flags.wrong(name, f"--{name}{_after(flags, name)}: {what}", remedy)
