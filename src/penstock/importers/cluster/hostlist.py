"""Hostlists, Slurm's short form of many names: ``a[0-3,12],b7`` for a0, a1, a2, a3, a12 and b7.

A member is a name with any number of bracket groups, ``r[1-2]n[01-16]-ib``; a group is a list of numbers and ranges.
The lower bound of a range gives the width to which its numbers are padded with zeros: ``[08-10]`` is 08, 09, 10, and
``[8-10]`` is 8, 9, 10. Members are separated by commas, blanks and line ends; groups further right count up faster.

.. [1] Slurm, slurm.conf(5), NodeName: what may be in brackets, and that padding is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod

from penstock.importers.lines import Faults
from penstock.schemas.errors import InvalidDocument

MOST_NAMES = 1_000_000
LONGEST_NAME = 255
SHORT = 100
"""Characters of a hostlist that a message quotes whole."""
_MOST_DIGITS = 18

_MEMBER = re.compile(r"(?:[^\s,\[\]]++|\[[^\[\]]*+\])++")
_SEPARATORS = re.compile(r"[\s,]*+")
_GROUP = re.compile(r"\[([^\[\]]*+)\]")
_RANGE = re.compile(rf"\s*+([0-9]{{1,{_MOST_DIGITS}}}+)(?:\s*+-\s*+([0-9]{{1,{_MOST_DIGITS}}}+))?\s*+", re.ASCII)
_DIGITS = re.compile(rf"(?<![0-9])([0-9]{{1,{_MOST_DIGITS}}})(?![0-9])")
_FORM = "write names like node[01-16,20],login1"

NaturalKey = tuple[tuple[str | int, ...], str]

Report = Callable[[int, str], None]
"""The receiver of a fault: its offset in the text, from 0, and its description."""


def expand(text: str) -> list[str]:
    """Return the names of a hostlist, in its order; a name that is there twice comes twice. Empty text: none.

    Raises InvalidDocument with every fault by column: brackets that do not close, no numbers in them, ranges that
    count down, names longer than 255 characters, more than 1,000,000 names.
    """
    faults = Faults(f"the hostlist {_shortened(text)!r}")
    names = expand_or_report(text, lambda offset, detail: faults.add(None, detail, column=offset + 1))
    faults.stop(_FORM)
    return names


def expand_or_report(text: str, report: Report, most: int = MOST_NAMES) -> list[str]:
    """Expand a text within another one, as ``expand``: faults go to ``report``; there are at most ``most`` names."""
    names: list[str] = []
    at = _skipped(text, 0)
    while at < len(text):
        member = _MEMBER.match(text, at)
        if member is None:
            report(at, "'[' is not closed" if text[at] == "[" else "']' closes nothing")
            return names
        at = member.end()
        if at < len(text) and text[at] == "[":
            report(at, f"the '[' after {_shortened(member[0])!r} is not closed")
            return names
        if at < len(text) and text[at] == "]":
            report(at, "']' closes nothing")
            return names
        names += _names(member[0], member.start(), report, most - len(names))
        at = _skipped(text, at)
    return names


def fold(names: Iterable[str]) -> str:
    """Return the short hostlist of these names in natural order (a2 before a10), each once; ``expand`` reverses it.

    Numbers are folded where the texts around them are equal, further right first: r1n1, r1n2, r2n1, r2n2 become
    ``r[1-2]n[1-2]``. Widths are kept: 09 and 10 become ``[09-10]``. A name that does not end with a number stays as it
    is, because Slurm refuses text after the last bracket.

    Raises InvalidDocument for a name that no hostlist can have: empty, or with a blank, comma or bracket.
    """
    alike: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in dict.fromkeys(names):
        if not name or not _MEMBER.fullmatch(name) or "[" in name:
            raise InvalidDocument(
                f"the name {name!r} cannot be in a hostlist", remedy="name hosts without blanks, commas and brackets"
            )
        pieces = _DIGITS.split(name)
        if pieces[-1]:
            pieces = [name]
        alike.setdefault(tuple(pieces[::2]), []).append(tuple(pieces[1::2]))
    members = [member for texts, numbers in alike.items() for member in _folded(texts, numbers)]
    return ",".join(text for _, text in sorted(members))


def fold_shortly(names: Sequence[str]) -> str:
    """Return the hostlist of these names for a message, shortened, with their number, beyond ``SHORT`` characters."""
    text = fold(names)
    return text if len(text) <= SHORT else f"{_shortened(text, SHORT // 2)} ({len(names):,} names)"


def natural_order(name: str) -> NaturalKey:
    """Return a key that sorts names as people count: a2 before a10."""
    pieces: list[str | int] = list(_DIGITS.split(name))
    pieces[1::2] = [int(piece) for piece in pieces[1::2]]
    return tuple(pieces), name


def _skipped(text: str, at: int) -> int:
    separators = _SEPARATORS.match(text, at)
    assert separators is not None  # the pattern matches nothing, too
    return separators.end()


def _names(member: str, start: int, report: Report, most: int) -> list[str]:
    """Return the names of one member that begins at ``start``."""
    if "[" not in member:
        if len(member) > LONGEST_NAME or not member.isprintable():
            report(start, _unlike_a_name(member))
        elif most < 1:
            report(start, _too_many(member))
        else:
            return [member]
        return []
    texts: list[str] = []
    groups: list[list[tuple[int, int, int]]] = []
    end = 0
    for group in _GROUP.finditer(member):
        texts.append(member[end : group.start()])
        groups.append(_ranges(group[1], start + group.start() + 1, report))
        end = group.end()
    texts.append(member[end:])
    if not all(groups):
        return []
    longest = sum(map(len, texts)) + sum(max(max(width, len(str(high))) for _, high, width in g) for g in groups)
    if longest > LONGEST_NAME or not "".join(texts).isprintable():
        report(start, _unlike_a_name(member))
        return []
    if prod(sum(high - low + 1 for low, high, _ in ranges) for ranges in groups) > most:
        report(start, _too_many(member))
        return []
    numbers = [[f"{n:0{width}}" for low, high, width in ranges for n in range(low, high + 1)] for ranges in groups]
    if len(groups) == 1:
        before, after = texts
        return [before + number + after for number in numbers[0]]
    heads = [[text + number for number in group] for text, group in zip(texts[:-1], numbers, strict=True)]
    return ["".join(parts) + texts[-1] for parts in product(*heads)]


def _ranges(text: str, start: int, report: Report) -> list[tuple[int, int, int]]:
    """Return low, high and width of each range within one pair of brackets; nothing if one of them is wrong."""
    ranges: list[tuple[int, int, int]] = []
    entries = text.split(",")
    at = start
    for entry in entries:
        read = _RANGE.fullmatch(entry)
        if read is None:
            report(at, f"{_shortened(entry.strip())!r} is not a number or a range of numbers such as 01-16")
        elif read[2] and int(read[2]) < int(read[1]):
            report(at, f"the range {entry.strip()} counts down")
        else:
            ranges.append((int(read[1]), int(read[2] or read[1]), len(read[1])))
        at += len(entry) + 1
    return ranges if len(ranges) == len(entries) else []


def _folded(texts: tuple[str, ...], numbers: list[tuple[str, ...]]) -> list[tuple[NaturalKey, str]]:
    """Return members for the names that have these texts around their numbers, each with the key of its first name."""
    rows = {(number, texts[-1]): texts[-1] for number in numbers}  # what is yet to fold, what follows: its first name
    for index in reversed(range(len(texts) - 1)):
        firsts: dict[str, str] = {}
        alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for (number, after), first in rows.items():
            alike.setdefault((number[:index], after), []).append(number[index])
            firsts[after] = first
        rows = {}
        for (number, after), lasts in alike.items():
            lasts.sort(key=lambda last: (int(last), last))
            rows[number, f"{texts[index]}{_group(lasts)}{after}"] = f"{texts[index]}{lasts[0]}{firsts[after]}"
    return [(natural_order(first), member) for (_, member), first in rows.items()]


def _group(numbers: list[str]) -> str:
    """Return ascending numbers as one group; a number alone needs no brackets."""
    if len(numbers) == 1:
        return numbers[0]
    runs: list[tuple[str, str]] = []
    for number in numbers:
        low, high = runs[-1] if runs else ("", "")
        if runs and number == f"{int(high) + 1:0{len(low)}}":
            runs[-1] = low, number
        else:
            runs.append((number, number))
    return f"[{','.join(low if low == high else f'{low}-{high}' for low, high in runs)}]"


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _unlike_a_name(member: str) -> str:
    return f"{_shortened(member)!r} is not a host name: at most {LONGEST_NAME} characters, all of them printable"


def _too_many(member: str) -> str:
    return f"with {_shortened(member)!r} there are more than {MOST_NAMES:,} names"
