"""Texts of options such as ``NAME=VALUE``."""

from __future__ import annotations

import typer


def assignment(text: str, flag: str, form: str, *, may_be_empty: bool = False) -> tuple[str, str]:
    """Return the name and the value of a text; ``may_be_empty``: whether there may be nothing after the sign.

    Raises typer.BadParameter, which shows the form that ``flag`` takes.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals and (value or may_be_empty)):
        raise typer.BadParameter(f"{text!r} is not {form}", param_hint=flag)
    return name, value
