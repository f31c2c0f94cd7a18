"""The shape of a transformer from the ``config.json`` of a Hugging Face model; the library itself is not needed.

A family is a row of ``FAMILIES``: the fields by which it is configured, and the values that its modelling code fixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.families.config import Config
from penstock.shapes.families.table import FAMILIES, OF_ARCHITECTURE, SEEING, USUAL_LENGTH


def shape_of(
    values: Mapping[str, Any], *, sequence_length: int | None = None, origin: str = "config.json"
) -> TransformerShape:
    """Return the shape that a configuration describes.

    An unknown family is read as its architecture, or as the language model in its ``text_config``, which ``remarks``
    states. Raises UnsupportedRequest where both are unknown, InvalidDocument for missing or impossible fields.
    """
    family = values.get("model_type")
    if family is None:
        raise InvalidDocument(
            f"{origin} has no 'model_type', so it is no configuration of a Hugging Face model",
            remedy=f"a config.json of one of the families {', '.join(FAMILIES)}",
        )
    layers = _with_layers(values)
    if layers is None:
        raise _unknown(values, origin)
    values, layers_of = layers
    try:
        fields = FAMILIES[layers_of](Config(values, origin))
    except ValidationError as error:
        raise _not_a_transformer(origin, error) from None
    longest = fields.pop("longest")
    if fields["positions"] and sequence_length is not None and sequence_length > fields["positions"]:
        raise UnsupportedRequest(
            f"{origin} has {fields['positions']} learned positions, fewer than a sequence of {sequence_length} tokens"
        )
    fields["sequence_length"] = sequence_length or min(longest, USUAL_LENGTH)
    name = values.get("_name_or_path")
    fields["name"] = name if isinstance(name, str) and 0 < len(name) <= 512 and not name.startswith("/") else family
    try:
        return TransformerShape.model_validate(fields)
    except ValidationError as error:
        raise _not_a_transformer(origin, error) from None


def remarks(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return sentences for an answer on how a readable configuration is read."""
    family, layers = values.get("model_type"), _with_layers(values)
    if layers is None:
        return ()
    inner, other = layers
    sentences = []
    if inner is not values:
        sentences.append(f"{family!r} is read as the {other!r} in its text_config: judged is that language model alone")
    elif family in SEEING:
        sentences.append(f"judged is the language model of {family!r} alone, without what reads images")
    elif family != other:
        sentences.append(f"the family {family!r} is read as {other!r}, by the architecture that config.json names")
    if values.get("quantization_config") or inner.get("quantization_config"):
        sentences.append("the quantization in config.json is left out: training is in bf16")
    return tuple(sentences)


def _with_layers(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
    """Return the configuration that has the layers, and the family by which it is read; None without a known family."""
    text = values.get("text_config")
    tied = {name: values[name] for name in ("tie_word_embeddings",) if name in values}
    for inner in (values, {**tied, **text}) if isinstance(text, Mapping) else (values,):
        family = inner.get("model_type")
        if isinstance(family, str) and family in FAMILIES:
            return inner, family
        architectures = inner.get("architectures")
        for name in architectures if isinstance(architectures, list) else ():
            if isinstance(name, str) and name in OF_ARCHITECTURE and "hidden_size" in inner:
                return inner, OF_ARCHITECTURE[name]
    return None


def _unknown(values: Mapping[str, Any], origin: str) -> UnsupportedRequest:
    """Return the refusal of an unknown family, with all words of the configuration on its layers."""
    family, text = values["model_type"], values.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    within = f", its text_config of {inner!r}" if inner is not None else ""
    return UnsupportedRequest(
        f"{origin} is of the family {family!r}{within}, whose layers are not known; known are {', '.join(FAMILIES)}",
        faults=(Fault("/model_type", f"unknown family {family!r}", "family"),),
        remedy="if its layers are those of a known family, that family as model_type",
    )


def _not_a_transformer(origin: str, error: ValidationError) -> InvalidDocument:
    """Return the error of widths that no transformer has, with the first mistake."""
    first = error.errors()[0]
    words = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
    return InvalidDocument(f"{origin} does not describe a transformer: {words}")
