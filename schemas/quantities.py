"""Numbers on the wire: integer nanoseconds, bytes and bytes per second, each below 2^53.

Documents read from YAML, and the command line, may also write ``25 Gbit/s``, ``16 GiB`` or ``2 ms``:
such a document is validated with ``context={"units": True}``; the wire takes integers only. A document that a person
has written has ``"by_hand"`` in its context, too: there a number without a unit that is implausibly small is refused.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

MAX_WIRE_INTEGER = 2**53 - 1

_TIME_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
_BYTES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_RATE = {f"{unit}/s": Decimal(value) for unit, value in _BYTES.items()}
_RATE |= {f"{p}bit/s": Decimal(v) / 8 for p, v in {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.items()}
_RATE |= {f"{p}bps": Decimal(v) / 8 for p, v in {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.items()}

_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]+)\s*")


def _parse(text: str, units: dict[str, Any], what: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not {what}; write a number and one of {', '.join(units)}")
    exact = Decimal(match[1]) * units[match[2]]
    rounded = int(exact.to_integral_value(rounding="ROUND_CEILING" if units is _TIME_NS else "ROUND_FLOOR"))
    if rounded > MAX_WIRE_INTEGER:
        raise ValueError(f"{text!r} is {rounded}, more than the largest integer in a document, 2^53 - 1")
    return rounded


def parse_time_ns(text: str) -> int:
    """Parse a time such as ``2 ms`` to nanoseconds, rounded up. ValueError names the units that exist."""
    return _parse(text, _TIME_NS, "a time")


def parse_bytes(text: str) -> int:
    """Parse an amount such as ``16 GiB`` to bytes, rounded down. ValueError names the units that exist."""
    return _parse(text, _BYTES, "an amount of memory")


def parse_bytes_per_s(text: str) -> int:
    """Parse a rate such as ``25 Gbit/s`` to bytes per second, rounded down. ValueError names the units that exist."""
    return _parse(text, _RATE, "a bandwidth")


def _within_wire(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > MAX_WIRE_INTEGER:
        raise ValueError("an integer in a document is at most 2^53 - 1")
    return value


def _with_units(parse: Any, least: int = 0, unit: str = "", meant: tuple[str, ...] = ()) -> BeforeValidator:
    """Read a text with a unit. By hand, a number below ``least`` needs one: ``unit``, or what was ``meant``."""

    def read(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str) and info.context and info.context.get("units"):
            return parse(value)
        if isinstance(value, int) and 0 < value < least and info.context and info.context.get("by_hand"):
            guesses = " or ".join(f"{value} {each}" for each in meant)
            raise ValueError(f"{value} without a unit is {value} {unit}; did you mean {guesses}? Write the unit")
        return value

    return BeforeValidator(read)


Scalar = Annotated[str | int | float | bool, BeforeValidator(_within_wire)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
"""A number; ``true`` and texts that look like numbers are refused."""
Nonfinite = Literal["NaN", "Infinity", "-Infinity"]
Loss = Number | Nonfinite
"""A loss. JSON has no number for NaN and infinities, so they are texts, which ``float`` reads."""
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_WIRE_INTEGER)]
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=MAX_WIRE_INTEGER)]
Nanoseconds = Annotated[int, Field(strict=True, ge=0, le=MAX_WIRE_INTEGER), _with_units(parse_time_ns)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=MAX_WIRE_INTEGER), _with_units(parse_bytes)]
MemoryBytes = Annotated[
    int, Field(strict=True, ge=0, le=MAX_WIRE_INTEGER), _with_units(parse_bytes, 2**20, "B", ("GiB", "MiB"))
]
"""The memory of a device; less than 1 MiB counts as a forgotten unit."""
BytesPerSecond = Annotated[
    int,
    Field(strict=True, ge=1, le=MAX_WIRE_INTEGER),
    _with_units(parse_bytes_per_s, 10**6, "B/s", ("GB/s", "Gbit/s")),
]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""Name of an agent, and so of a node; the same pattern where it is configured and where it is received."""
ContentHash = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


def spell(loss: float) -> float | Nonfinite:
    """Return a loss in the form that JSON can hold."""
    if math.isfinite(loss):
        return loss
    return "NaN" if math.isnan(loss) else "Infinity" if loss > 0 else "-Infinity"
