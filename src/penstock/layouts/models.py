"""The model of a layout: the profile that a trainer's text describes, with costs at the text's degrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from penstock.layouts.deepspeed import DeepSpeedText
from penstock.layouts.layout_text import LayoutText, Source
from penstock.layouts.megatron.reading import MegatronText
from penstock.layouts.ranges import RangesText
from penstock.layouts.torchtitan.torchtitan import TorchtitanText
from penstock.schemas.errors import Fault, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.transformers.degrees import ContextKind, Framework
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.profiled_degrees import TENSOR_DEGREES, USUAL, DegreeOptions
from penstock.shapes.profiles import computed_profile
from penstock.solvers.model.degrees import Degrees

TEXTS: dict[str, Callable[[Source], LayoutText]] = {
    "megatron": MegatronText,
    "torchtitan": TorchtitanText,
    "deepspeed": DeepSpeedText,
    "ranges": RangesText,
}
"""The parsers, by the format of a text."""


@contextmanager
def naming_degrees(text: LayoutText, name: str) -> Iterator[None]:
    """Raise again, with lines, an error of a model that cannot have the text's own degrees."""
    try:
        yield
    except UnsupportedRequest as error:
        named = text.named_degrees()
        if not named:
            raise
        stated = f"{name} has {', '.join(degree for degree, _place in named)}"
        raise UnsupportedRequest(
            f"{stated}, and no trainer has such a layout: {error.detail}",
            faults=tuple(Fault(place, degree, "degree") for degree, place in named),
            remedy=error.remedy,
        ) from None


def profile_at(
    text: LayoutText,
    name: str,
    shape: TransformerShape,
    device_kinds: Sequence[str] = (),
    *,
    framework: Framework | None = None,
    context_kind: ContextKind | None = None,
    compare: bool = True,
) -> ModelProfile:
    """Return the profile of a transformer, computed with the trainer's kernels and at the text's degrees.

    With ``compare`` it has costs at the usual degrees, too. Raises UnsupportedRequest for degrees without costs.
    """
    stated = text.degrees(experts=shape.experts is not None)
    with naming_degrees(text, name):
        return computed_profile(
            shape,
            framework or text.framework,
            device_kinds,
            degrees=USUAL if text.framework is None else asked_for(stated, compare=compare),
            context_kind=context_kind or text.context_kind(),
        )


def asked_for(stated: Degrees, *, compare: bool) -> DegreeOptions:
    """Return the degrees at which a profile has costs: a layout's own, and with ``compare`` the usual ones."""
    tensor, context, expert, expert_tensor = stated
    if not compare:
        return DegreeOptions((tensor,), (context,), (expert,), expert_tensor)
    return DegreeOptions(
        tuple({*TENSOR_DEGREES, tensor}) if tensor not in (1, *TENSOR_DEGREES) else None,
        (1, context) if context > 1 else None,
        (1, expert) if expert > 1 and expert & (expert - 1) else None,
        expert_tensor,
    )
