"""Durations on the command line: ``90``, ``10s``, ``5min``, ``1h30min``, ``2d``; a bare number is seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import typer

METAVAR = "DURATION"
FORMS = "90 (seconds), 10s, 5min, 1h30min or 2d"
_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([A-Za-zµ]+)")
_DURATION = re.compile(rf"(?:{_PART.pattern}\s*)+")
SECOND_NS = 10**9
_DAY_NS = 86400 * SECOND_NS


def duration_ns(text: str) -> int:
    """Return a duration in nanoseconds, rounded up. Raises typer.BadParameter, which names the forms."""
    from penstock.schemas.quantities import parse_time_ns

    text = text.strip()
    try:
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
            return parse_time_ns(f"{text} s")
        if _DURATION.fullmatch(text) is None:
            raise ValueError
        return sum(_part_ns(number, unit) for number, unit in _PART.findall(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a duration; write {FORMS}") from None


def _part_ns(number: str, unit: str) -> int:
    from penstock.schemas.quantities import parse_time_ns

    if unit == "d":
        return int(Decimal(number) * _DAY_NS)
    return parse_time_ns(f"{number} {'min' if unit == 'm' else unit}")


def between(least: str, most: str) -> Callable[[str | int], int]:
    """Return a parser for ``typer.Option`` of durations from ``least`` to ``most``; defaults, in ns, pass unchanged."""

    def parse(value: str | int) -> int:
        if isinstance(value, int):
            return value
        time_ns = duration_ns(value)
        if not duration_ns(least) <= time_ns <= duration_ns(most):
            raise typer.BadParameter(f"{value!r} is not between {least} and {most}")
        return time_ns

    parse.__name__ = METAVAR
    return parse


def seconds(time_ns: int) -> float:
    """Convert nanoseconds to seconds."""
    return time_ns / SECOND_NS
