"""Degrees at which a computed profile has costs: the requested ones, or else the usual ones that are legal.

Tensor degrees up to 8, which stay inside a node, are usual. So are context degrees up to 32 that leave a GPU at least
4,096 tokens of a sample. For models with experts expert degrees are usual: powers of two up to 64 that divide the
experts. Where a profile would have more than 60 combinations, the least expert degrees are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.transformers.degrees import ContextKind, Degrees
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.layout import Layout
from penstock.shapes.legality import broken

TENSOR_DEGREES = (2, 4, 8)
"""Tensor degrees that divide the GPUs of a usual node; tensor parallelism stays inside."""
MOST_CONTEXT = 32
LEAST_TOKENS = 4096
"""The fewest tokens of a sample on one GPU at the usual context degrees."""
MOST_EXPERT = 64
MOST_VARIANTS = 60

Wanted = Sequence[int] | Literal["auto"] | None
"""Degrees besides 1; None or ``auto`` for the usual ones."""


@dataclass(frozen=True)
class DegreeOptions:
    """Degrees at which a profile has costs."""

    tensor: Wanted = None
    context: Wanted = None
    expert: Wanted = None
    expert_tensor: int = 1


USUAL = DegreeOptions()


def usual_context(shape: TransformerShape) -> tuple[int, ...]:
    """Return the powers of two up to 32 that leave a GPU at least 4,096 tokens of a sample."""
    return tuple(each for each in _powers(MOST_CONTEXT) if each * LEAST_TOKENS <= shape.sequence_length)


def usual_experts(shape: TransformerShape) -> tuple[int, ...]:
    """Return the powers of two up to 64 that divide the experts; empty for a model without experts."""
    if shape.experts is None:
        return ()
    return tuple(each for each in _powers(MOST_EXPERT) if shape.experts.number % each == 0)


def layouts_of(
    shape: TransformerShape, single: Layout, degrees: DegreeOptions
) -> tuple[tuple[Layout, ...], str | None]:
    """Return the layouts of one model-parallel group each, and the first rule that refuses one.

    Raises UnsupportedRequest for a requested degree that is illegal.
    """
    wanted = (
        _values(degrees.tensor, TENSOR_DEGREES),
        _values(degrees.context, usual_context(shape)),
        _values(degrees.expert, usual_experts(shape)),
    )
    named = tuple(each not in (None, "auto") for each in (degrees.tensor, degrees.context, degrees.expert))
    legal, why = [], None
    for t, c, x in product(*wanted):
        cell = max(t * c, x * degrees.expert_tensor)
        layout = replace(
            single, tensor=t, context=c, expert=x, expert_tensor=degrees.expert_tensor, data=cell // (t * c)
        )
        if cell == 1:
            continue
        wrong = broken(shape, layout, cell)
        if not wrong:
            legal.append(layout)
            continue
        alone = sorted((t, c, x))[:2] == [1, 1]
        whole = degrees.expert_tensor > 1 and any(one.degree == "expert_tensor" for one in wrong)
        if whole or (alone and any(is_named and degree > 1 for is_named, degree in zip(named, (t, c, x), strict=True))):
            raise UnsupportedRequest(
                wrong[0].sentence, faults=tuple(Fault(f"/{one.degree}", one.sentence, one.rule) for one in wrong)
            )
        why = why or wrong[0].sentence.partition(";")[0]
    if shape.experts is not None and not named[2]:
        legal = _fewer(legal)
    return tuple(legal), why


def _fewer(layouts: list[Layout]) -> list[Layout]:
    """Drop the least expert degrees while there are too many combinations."""
    while len(layouts) > MOST_VARIANTS:
        least = min(layout.expert for layout in layouts)
        layouts = [layout for layout in layouts if layout.expert > least]
    return layouts


def _values(degrees: Wanted, usual: Sequence[int]) -> list[int]:
    return sorted({1, *(usual if degrees is None or degrees == "auto" else degrees)})


def _powers(most: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(1, most.bit_length()))


def refuse_illegal(profile: ModelProfile, degrees: Degrees) -> None:
    """Raise UnsupportedRequest for degrees that no layout of the profile's transformer can have, naming the rule."""
    if profile.shape is None:
        return
    layout = Layout(
        **degrees.model_dump(),
        data=degrees.gpus // (degrees.tensor * degrees.context),
        framework=profile.framework or "megatron",
    )
    names = Degrees.model_fields
    faults = [each for each in broken(profile.shape, layout, degrees.gpus) if each.degree in names]
    if faults:
        raise UnsupportedRequest(
            f"no plan can have {degrees}: {faults[0].sentence}",
            faults=tuple(Fault("/degrees", one.sentence, one.rule.replace("_", "-")) for one in faults),
        )


def context_kind_of(text: str) -> ContextKind:
    """Return a kind of context parallelism, written with hyphens or as in documents. Raises InvalidDocument."""
    kinds = {kind.replace("_", "-"): kind for kind in get_args(ContextKind)}
    context_kind: ContextKind | None = kinds.get(text.replace("_", "-"))
    if context_kind is None:
        raise InvalidDocument(f"the kind of context parallelism {text!r} is none of {', '.join(kinds)}")
    return context_kind
