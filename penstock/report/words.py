"""Numbers as people read them: three digits and the unit that fits."""

from __future__ import annotations


def duration(nanoseconds: float) -> str:
    """``12.3 ms``."""
    size = abs(nanoseconds)
    if size < 1e3:
        return f"{nanoseconds:.0f} ns"
    for limit, unit, scale in ((1e6, "µs", 1e3), (1e9, "ms", 1e6)):
        if size < limit * 0.9995:
            return f"{_digits(nanoseconds / scale)} {unit}"
    return f"{_digits(nanoseconds / 1e9)} s"


def amount(count: float) -> str:
    """``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.5:
            return f"{count:.0f} B" if unit == "B" else f"{_digits(count)} {unit}"
        count /= 1024
    return f"{_digits(count)} TiB"


def percent(share: float) -> str:
    """``4.2 %``."""
    return f"{100 * share:.1f} %" if abs(share) < 0.9995 else f"{100 * share:.0f} %"


def ranges(numbers: tuple[int, int]) -> str:
    """``3–7``, or ``3`` where both ends are one."""
    first, last = numbers
    return str(first) if first == last else f"{first}–{last}"


def _digits(number: float) -> str:
    if abs(number) >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
