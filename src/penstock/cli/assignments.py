"""Texts of options such as ``NAME=VALUE``."""

from __future__ import annotations

import typer


def assignment(text: str, flag: str, form: str) -> tuple[str, str]:
    """Return the name and the value of a text. Raises typer.BadParameter, which shows the form that ``flag`` takes."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and value):
        raise typer.BadParameter(f"{text!r} is not {form}", param_hint=flag)
    return name, value
