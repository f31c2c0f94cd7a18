"""Durations on the command line: ``90``, ``10s``, ``5min``, ``1h30min``, ``2d``; a bare number is seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

import typer

from penstock.schemas.quantities import parse_time_ns

METAVAR = "DURATION"
FORMS = "90 (seconds), 10s, 5min, 1h30min or 2d"
_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([A-Za-zµ]+)")
_DURATION = re.compile(rf"(?:{_PART.pattern}\s*)+")
_DAY_NS = 24 * parse_time_ns("1 h")
_S_NS = 10**9


def duration_ns(text: str) -> int:
    """Nanoseconds of a duration, rounded up. Raises typer.BadParameter naming the forms."""
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
    if unit == "d":
        return int(Decimal(number) * _DAY_NS)
    return parse_time_ns(f"{number} {'min' if unit == 'm' else unit}")


def between(least: str, most: str) -> Callable[[str | int], int]:
    """A parser for ``typer.Option`` of durations from ``least`` to ``most``; defaults, in ns, pass unchanged."""
    lower, upper = duration_ns(least), duration_ns(most)

    def parse(value: str | int) -> int:
        found = value if isinstance(value, int) else duration_ns(value)
        if not lower <= found <= upper:
            raise typer.BadParameter(f"{value!r} is not between {least} and {most}")
        return found

    parse.__name__ = METAVAR
    return parse


def seconds(time_ns: int) -> float:
    """Nanoseconds as seconds."""
    return time_ns / _S_NS
