"""The page that says which degrees of parallelism are legal for a transformer on a cluster, and which fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.schemas.api.fits import FitsAnswer, FitsRequest
from penstock.schemas.errors import PenstockError
from penstock.schemas.options.fits import FITS_OPTIONS
from penstock.schemas.options.option import Option
from penstock.service.pages.form import CLUSTER_FORMS
from penstock.service.security.sizes import Sizes

FIELDS = {name: option for name, option in FITS_OPTIONS.items() if option.label}
FIRST = dict.fromkeys(FIELDS, "") | {
    "model": "llama-3-70b",
    "cluster": "8x8xH100",
    "tensor": "all",
    "context": "1",
    "expert": "all",
    "pipeline": "all",
    "virtual_stages": "1",
    "micro_batch_size": "1",
    "sharding": "optimizer",
    "recompute": "none",
    "framework": "megatron",
}


def fits(sizes: Sizes, query: Mapping[str, str]) -> dict[str, Any]:
    """The form with what the address says, and the answer to it or what is wrong."""
    values = FIRST | {name: text.strip() for name, text in query.items() if name in FIRST}
    found: FitsAnswer | None = None
    error: PenstockError | None = None
    try:
        found = _answer(sizes, values)
    except PenstockError as refused:
        error = refused
    return {
        "values": values,
        "found": found,
        "error": error,
        "fields": FIELDS,
        "first": FIRST,
        "models": list(SHAPES),
        "clusters": CLUSTER_FORMS,
    }


def _answer(sizes: Sizes, values: Mapping[str, str]) -> FitsAnswer:
    """Raises PenstockError for what is wrong."""
    from penstock.planning.fits import answer

    topology = catalogue.cluster(values["cluster"])
    sizes.check(topology)
    fields: dict[str, Any] = {"shape": catalogue.shape(values["model"]), "topology": topology}
    fields |= {name: _value(option, text) for name, option in FIELDS.items() if (text := values[name])}
    return answer(FitsRequest.parse(fields))


def _value(option: Option, text: str) -> Any:
    """Return what a field gives: a number, a list of numbers or names, or a word that stands for several."""
    if not option.is_repeatable:
        return text if option.values else _number(text)
    return text if option is FITS_OPTIONS["recompute"] and text in ("none", "full") else _listed(text)


def _listed(text: str) -> str | list[int | float | str]:
    return text if text == "all" else [_number(part.strip()) for part in text.split(",")]


def _number(text: str) -> int | float | str:
    """A number where the text is one; the schema refuses any other text with its place."""
    if text.isdecimal() and len(text) < 20:
        return int(text)
    return float(text) if re.fullmatch(r"\d{1,9}\.\d{1,9}", text) else text
