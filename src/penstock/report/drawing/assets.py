"""The page's style sheet and script: there is no build step, the parts of the script are only concatenated."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def style() -> str:
    """Return the style sheet: colours as variables, light and dark; figures, tables, timelines."""
    return (files("penstock.report.drawing") / "style.css").read_text(encoding="utf-8")


@cache
def script() -> str:
    """Return the classic script that draws timelines; it belongs at a page's end and offers ``penstockTimeline``."""
    parts = [part for part in (files("penstock.report.drawing") / "script").iterdir() if part.name.endswith(".js")]
    ordered = sorted(parts, key=lambda part: int(part.name.partition("-")[0]))
    body = "\n".join(part.read_text(encoding="utf-8") for part in ordered)
    return f'(() => {{\n"use strict";\n\n{body}}})();\n'
