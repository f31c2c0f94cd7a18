"""The page that says which degrees of parallelism are legal for a transformer on a cluster, and which fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.planning.headline import SHARDED
from penstock.report.blocks import Bar, Bars
from penstock.schemas.amounts import amount
from penstock.schemas.api.fits import FitsAnswer, FitsRequest, FitsRow
from penstock.schemas.api.words import FITS_DEGREES
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
    """Return the form with the values of the address, and the answer or the error."""
    values = FIRST | {name: text.strip() for name, text in query.items() if name in FIRST}
    reply: FitsAnswer | None = None
    error: PenstockError | None = None
    try:
        reply = _answer(sizes, values)
    except PenstockError as refused:
        error = refused
    return {
        "values": values,
        "reply": reply,
        "error": error,
        "fields": FIELDS,
        "first": FIRST,
        "changed": any(values[name] != FIRST[name] for name in FIELDS if name not in ("model", "cluster")),
        "models": list(SHAPES),
        "clusters": CLUSTER_FORMS,
        "bars": None if reply is None or not reply.rows else _bars(reply),
        "layout": layout_words,
    }


PARTS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "gathered": "gathered parameters",
    "activations": "activations",
    "logits": "logits",
    "dummy_gradients": "dummy gradients",
}
"""Parts of a GPU's memory, in the order of their bars, and their names."""


def _bars(answer: FitsAnswer) -> Bars:
    """Return the memory of each layout's fullest GPU as stacked bars, with the capacity as a line."""
    rows = (
        Bar(
            layout_words(row),
            tuple((words, float(getattr(row.memory, f"{part}_bytes"))) for part, words in PARTS.items()),
            f"{amount(row.memory.total_bytes)}, {'fits' if row.fits else f'lacks {amount(-row.headroom_bytes)}'}",
            is_pale=not row.fits,
        )
        for row in answer.rows
    )
    capacity = answer.available_bytes
    return Bars(tuple(rows), "Memory of the fullest GPU.", capacity, f"each GPU has {amount(capacity)}")


def layout_words(row: FitsRow) -> str:
    """Return a row's layout in trainers' words, without degrees of 1: ``TP 8 · PP 4 · DP 2 · ZeRO-1``."""
    degrees = {head: getattr(row, field) for head, field in FITS_DEGREES.items()}
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name in ("TP", "PP", "DP")]
    return " · ".join((*parts, *((SHARDED[row.sharding],) if row.sharding in SHARDED else ())))


def _answer(sizes: Sizes, values: Mapping[str, str]) -> FitsAnswer:
    """Answer the form. Raises PenstockError for values that are not valid."""
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
    """Convert a text that is a number; the schema refuses any other text."""
    if text.isdecimal() and len(text) < 20:
        return int(text)
    return float(text) if re.fullmatch(r"\d{1,9}\.\d{1,9}", text) else text
