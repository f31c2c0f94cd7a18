"""What a trainer's file says of the model, against the profile: widths, heads, length, vocabulary, experts.

Sizes are known of a profile with a shape, and of the shipped ones (``examples.shapes``). Of any other only hidden size
× length is, by what one sample sends from one transformer layer to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from penstock.convert.layer_roles import Roles
from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.schemas.profile import ModelProfile
from penstock.schemas.transformers.shape import TransformerShape

Size = Literal["hidden", "heads", "length", "vocabulary", "experts"]
_PADDING = 100
"""Vocabularies are padded to rows that divide well: a difference of at most 1/100 is no contradiction."""
_WIDTHS = (2, 4)
"""Bytes of an activation."""


class Compared(NamedTuple):
    """``wrong``: what contradicts the profile, in words with its number; ``unknown``: what it does not say."""

    wrong: dict[Size, str]
    unknown: tuple[Size, ...]


def compared(profile: ModelProfile, roles: Roles | None, said: Mapping[Size, int]) -> Compared:
    """What a file says, against what is known of the profile."""
    known = known_shape(profile)
    if known is None:
        return _by_activations(profile, roles, said)
    sizes = {**sizes_of(known), "length": known.sequence_length}
    differing = [size for size, value in said.items() if _differ(size, value, sizes[size])]
    return Compared({size: f"the profile has {sizes[size] or 'none'}" for size in differing}, ())


def sizes_of(shape: TransformerShape) -> dict[Size, int]:
    """The sizes of a model, without the length of a sample, which a job chooses."""
    return {
        "hidden": shape.hidden,
        "heads": shape.heads,
        "vocabulary": shape.vocabulary,
        "experts": 0 if shape.experts is None else shape.experts.number,
    }


def known_shape(profile: ModelProfile) -> TransformerShape | None:
    """As the profile says it; of a shipped one, or one that was measured of the same layers under the same name."""
    if profile.shape is not None:
        return profile.shape
    if profile.name not in SHAPES or profile.name not in catalogue.model_names():
        return None
    shipped = catalogue.profile(profile.name)
    same = [layer.parameter_bytes for layer in shipped.layers] == [layer.parameter_bytes for layer in profile.layers]
    return SHAPES[profile.name] if same and shipped.boundaries == profile.boundaries else None


def _differ(size: Size, value: int, known: int) -> bool:
    return abs(value - known) > known // _PADDING if size == "vocabulary" else value != known


def _by_activations(profile: ModelProfile, roles: Roles | None, said: Mapping[Size, int]) -> Compared:
    """Hidden size × length against the one tensor between two transformer layers, in either width of a value."""
    between = [] if roles is None or roles.number < 2 else list(profile.boundaries[roles.first])
    if len(between) != 1 or not {"hidden", "length"} <= said.keys():
        return Compared({}, tuple(said))
    values = said["hidden"] * said["length"]
    if between[0].bytes_per_sample in [values * width for width in _WIDTHS]:
        return Compared({}, tuple(size for size in said if size not in ("hidden", "length")))
    stated = (
        f"times {said['length']} tokens are {values} values of a sample between two layers; those of the profile are "
        f"{between[0].bytes_per_sample} bytes, {between[0].bytes_per_sample // 2} values of 16 bits or "
        f"{between[0].bytes_per_sample // 4} of 32"
    )
    return Compared({"hidden": stated}, tuple(size for size in said if size not in ("hidden", "length")))


def unknown_sentence(names: list[str]) -> tuple[str, ...]:
    """What could not be compared, if anything."""
    if not names:
        return ()
    return (f"not compared with the profile, which does not say them: {', '.join(names)}",)
