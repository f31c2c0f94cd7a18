"""Trainers' texts, parsed as an import of a layout does."""

from __future__ import annotations

from typing import Any

from penstock.layouts.layout_text import LayoutText, Source
from penstock.layouts.models import TEXTS, profile_at
from penstock.schemas.profile import ModelProfile


def parsed(form: str, text: str, name: str = "the layout", **more: Any) -> LayoutText:
    return TEXTS[form](Source(text, name, **more))


def profile_said(form: str, text: str, name: str, kinds: list[str], *, compare: bool, **more: Any) -> ModelProfile:
    layout = parsed(form, text, name, **more)
    return profile_at(layout, name, layout.shape(), kinds, compare=compare)
