"""The model of a trainer's file against the profile: widths, heads, length, vocabulary, experts.

Sizes are known for a profile with a shape, and for the shipped ones (``examples.shapes``). For any other profile only
hidden size × length is known, from the bytes that one sample sends between two transformer layers.
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
    """``wrong``: sizes that contradict the profile, in words with numbers; ``unknown``: sizes that it omits."""

    wrong: dict[Size, str]
    unknown: tuple[Size, ...]


def compared(profile: ModelProfile, roles: Roles | None, stated: Mapping[Size, int]) -> Compared:
    """Compare the sizes of a file with the sizes of the profile."""
    shape = known_shape(profile)
    if shape is None:
        return _by_activations(profile, roles, stated)
    sizes = {**sizes_of(shape), "length": shape.sequence_length}
    differing = [size for size, value in stated.items() if _differ(size, value, sizes[size])]
    return Compared({size: f"the profile has {sizes[size] or 'none'}" for size in differing}, ())


def sizes_of(shape: TransformerShape) -> dict[Size, int]:
    """Return the sizes of a model, without the length of a sample, which a job chooses."""
    return {
        "hidden": shape.hidden,
        "heads": shape.heads,
        "vocabulary": shape.vocabulary,
        "experts": 0 if shape.experts is None else shape.experts.number,
    }


def known_shape(profile: ModelProfile) -> TransformerShape | None:
    """Return the shape of the profile, None where it is unknown.

    A profile without a shape has a shipped shape if it has the name and the layers of a shipped profile.
    """
    if profile.shape is not None:
        return profile.shape
    if profile.name not in SHAPES or profile.name not in catalogue.model_names():
        return None
    shipped = catalogue.profile(profile.name)
    same = [layer.parameter_bytes for layer in shipped.layers] == [layer.parameter_bytes for layer in profile.layers]
    return SHAPES[profile.name] if same and shipped.boundaries == profile.boundaries else None


def _differ(size: Size, value: int, expected: int) -> bool:
    return abs(value - expected) > expected // _PADDING if size == "vocabulary" else value != expected


def _by_activations(profile: ModelProfile, roles: Roles | None, stated: Mapping[Size, int]) -> Compared:
    """Compare hidden size × length with the one tensor between two transformer layers, in either width of a value."""
    between = [] if roles is None or roles.number < 2 else list(profile.boundaries[roles.first])
    if len(between) != 1 or not {"hidden", "length"} <= stated.keys():
        return Compared({}, tuple(stated))
    values = stated["hidden"] * stated["length"]
    if between[0].bytes_per_sample in [values * width for width in _WIDTHS]:
        return Compared({}, tuple(size for size in stated if size not in ("hidden", "length")))
    difference = (
        f"times {stated['length']} tokens are {values} values of a sample between two layers; those of the profile are "
        f"{between[0].bytes_per_sample} bytes, {between[0].bytes_per_sample // 2} values of 16 bits or "
        f"{between[0].bytes_per_sample // 4} of 32"
    )
    return Compared({"hidden": difference}, tuple(size for size in stated if size not in ("hidden", "length")))


def unknown_sentence(names: list[str]) -> tuple[str, ...]:
    """Return a sentence on the sizes that could not be compared, if any."""
    if not names:
        return ()
    return (f"not compared with the profile, which does not say them: {', '.join(names)}",)
