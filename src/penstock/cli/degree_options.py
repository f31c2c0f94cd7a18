"""Degrees of parallelism as texts of options: numbers, lists, auto, and several axes in one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import typer

from penstock.cli.assignments import assignment

if TYPE_CHECKING:
    from penstock.shapes.profiled_degrees import DegreeOptions


def costed_degrees(
    context: Sequence[str] | None, expert: Sequence[str] | None, expert_tensor: int | None
) -> DegreeOptions:
    """Return the degrees besides tensor at which a computed profile has costs."""
    from penstock.shapes.profiled_degrees import DegreeOptions

    return DegreeOptions(
        context=None if not context else degrees_of(context, "context"),
        expert=None if not expert else degrees_of(expert, "expert"),
        expert_tensor=expert_tensor or 1,
    )


def degrees_of(texts: Sequence[str], name: str) -> tuple[int, ...] | Literal["auto"]:
    """Return the numbers of an option (``numbers_of``), or auto."""
    return "auto" if list(texts) == ["auto"] else numbers_of(texts, name, "neither auto nor numbers")


def numbers_of(texts: Sequence[str], name: str, is_not: str = "not a list of numbers") -> tuple[int, ...]:
    """Return the numbers of an option such as ``1,2,4``, given once or several times.

    Raises typer.BadParameter, which names the option.
    """
    text = ",".join(texts)
    values = text.split(",")
    if not all(value.strip().isdecimal() and int(value) > 0 for value in values):
        raise typer.BadParameter(f"{text!r} is {is_not} such as 1,2,4,8", param_hint=f"--{name}")
    return tuple(int(value) for value in values)


def axes_of(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the axes that texts name, each with its values: ``tensor=4,8:expert=auto``. Raises typer.BadParameter."""
    axes = []
    for text in (part.strip() for several in texts for part in several.split(":")):
        name, values = assignment(text, "--degrees", "AXIS=VALUES, such as tensor=4,8")
        axes.append((name.replace("-", "_"), values))
    return axes
