"""Amounts of memory, data and time as people read them, for messages of every package. Standard library only."""

from __future__ import annotations


def amount(count: float) -> str:
    """Format bytes with three digits and the binary unit that fits, as in ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.5:
            return f"{count:.0f} B" if unit == "B" else f"{three_digits(count)} {unit}"
        count /= 1024
    return f"{three_digits(count)} TiB"


def exact(count: int) -> str:
    """Format bytes that a user may need exactly, as in ``490 MiB (513,597,444 bytes)``."""
    whole = f"{count:,} byte{'' if count == 1 else 's'}"
    return whole if abs(count) < 1024 else f"{amount(count)} ({whole})"


def shortage(needed_bytes: int, available_bytes: int, device: str) -> str:
    """Return the sentence ``790 MiB on node0/0, which has 300 MiB: 490 MiB (513,597,444 bytes) are missing``."""
    return (
        f"{amount(needed_bytes)} on {device}, which has {amount(available_bytes)}: "
        f"{exact(needed_bytes - available_bytes)} are missing"
    )


def doubtful_memory(memory_bytes: int) -> str:
    """Return the question whether a unit was forgotten, for a device with less than 1 MiB; otherwise ""."""
    if memory_bytes >= 2**20:
        return ""
    unit, scale = ("GiB", 2**30) if memory_bytes <= 512 else ("MiB", 2**20)
    return (
        f"memory_bytes is {memory_bytes:,} bytes; did you mean {memory_bytes} {unit} ({memory_bytes * scale} on the "
        f"wire, '{memory_bytes} {unit}' in YAML)?"
    )


def three_digits(number: float) -> str:
    """Format a number with three digits, without its unit."""
    if abs(number) >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


def number(value: float | str, form: str) -> str:
    """Format a number such as a loss; a text stays: ``NaN``."""
    return value if isinstance(value, str) else format(value, form)


def duration(nanoseconds: float) -> str:
    """Format a duration: ``12.3 ms``."""
    size = abs(nanoseconds)
    if size < 1e3:
        return f"{nanoseconds:.0f} ns"
    for limit, unit, scale in ((1e6, "µs", 1e3), (1e9, "ms", 1e6)):
        if size < limit * 0.9995:
            return f"{three_digits(nanoseconds / scale)} {unit}"
    return f"{three_digits(nanoseconds / 1e9)} s"


def percent(share: float) -> str:
    """Format a share: ``4.2 %``."""
    return f"{100 * share:.1f} %" if abs(share) < 0.9995 else f"{100 * share:.0f} %"


def ranges(numbers: tuple[int, int]) -> str:
    """Format a range: ``3–7``, or ``3`` where both ends are equal."""
    first, last = numbers
    return str(first) if first == last else f"{first}–{last}"
