"""The notation of programs: lists of codes, in which much repeats, as compact text and back. Standard library only.

A code is (number of a word) × ``SPAN`` + micro-batch. `program` defines the words; blanks, ranges and
repetitions are the same for all::

    text  := item*
    item  := token | "(" text ")*" COUNT SHIFT?
    SHIFT := "+" NUMBER | "-" NUMBER        added to every micro-batch number per repetition; +1 if absent

``F0:8`` is F0 to F7. ``(B0 F8)*4088`` is B0 F8 B1 F9 … A number has no leading zero; micro-batches are below 2^31.

**Printing** is greedy from the left. At each place it takes the repetition (one shift for all its operations, at least
twice) that covers most operations, and of equal ones the shorter period. A period has at most 64 operations (1,024
instructions). Where nothing repeats, it takes a single token. A period of one operation and shift 1 is printed as a
range; the period of a longer one is printed by the same rule. Parsing what was printed gives back the same operations.

Cost: linear in the operations for rows that repeat; at most 64 comparisons per operation otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from penstock.schemas.errors import InvalidDocument

MAX_OPERATIONS = 1 << 22
"""Most operations that a text may unroll to."""

SPAN = 1 << 33
MICRO_BATCHES = 1 << 31
NUMBER = "(?:0|[1-9][0-9]{0,9})"
_REPEAT = re.compile(rf"\)\*({NUMBER})([+-]{NUMBER})?(?=[ \t\n\r)]|$)")
_ITEM = re.compile(r"\(|\)[^ \t\n\r()]*|[^ \t\n\r()]+")


class Printer:
    """The greedy rule over codes; ``word`` gives what stands before and after the micro-batch of a word's number.

    A place i repeats with period p as long as the *steps* between neighbours do, so what has to be compared are steps,
    and candidate periods are the distances to the next places with the same step.
    """

    def __init__(self, codes: list[int], word: Callable[[int], tuple[str, str]], max_period: int) -> None:
        self.codes = codes
        self.word = word
        self.max_period = max_period
        self.steps = [b - a for a, b in pairwise(codes)]
        self.following = [0] * len(self.steps)
        seen: dict[int, int] = {}
        for i in range(len(self.steps) - 1, -1, -1):
            step = self.steps[i]
            self.following[i] = seen.get(step, 0)
            seen[step] = i

    def text(self, low: int, high: int) -> str:
        """Return the text of the codes [low, high)."""
        items = []
        while low < high:
            period, count = self.best(low, high)
            items.append(self.item(low, period, count))
            low += period * count
        return " ".join(items)

    def item(self, i: int, period: int, count: int) -> str:
        """Return the text of ``count`` repetitions of the ``period`` codes from ``i``."""
        if count == 1:
            return self.token(i)
        shift = self.codes[i + period] - self.codes[i]
        if period == 1 and shift == 1:
            return self.token(i, count)
        inner = self.text(i, i + period)
        return f"({inner})*{count}" + ("" if shift == 1 else f"{shift:+d}")

    def token(self, i: int, count: int = 1) -> str:
        """Return the text of code ``i``, or of ``count`` codes from ``i``, each one micro-batch later."""
        key, m = divmod(self.codes[i], SPAN)
        before, after = self.word(key)
        return f"{before}{m}{after}" if count == 1 else f"{before}{m}:{m + count}{after}"

    def best(self, i: int, high: int) -> tuple[int, int]:
        """Return period and count of the repetition from ``i`` that covers most codes; (1, 1) where nothing repeats.

        Once a period p repeats over an extent e, its multiples below e cover no more than p does.
        """
        codes, following = self.codes, self.following
        rest = high - i
        longest = min(self.max_period, rest // 2)
        if longest == 0:
            return 1, 1
        best, covered, extents = (1, 1), 1, []
        start = codes[i]
        if abs(self.steps[i]) < MICRO_BATCHES:
            count = 2 + self.matches(i, i + 1, rest - 2)
            best, covered = (1, count), count
            extents.append((1, count))
        j = following[i]
        while 0 < j <= i + longest and covered < rest:
            period = j - i
            if (
                period > 1
                and abs(codes[j] - start) < MICRO_BATCHES
                and not any(period % p == 0 and period < extent for p, extent in extents)
            ):
                extent = period + 1 + self.matches(i, j, rest - period - 1)
                count = extent // period
                if count > 1:
                    extents.append((period, extent))
                    if count * period > covered:
                        best, covered = (period, count), count * period
            j = following[j]
        return best

    def matches(self, a: int, b: int, limit: int) -> int:
        """Count how many steps from ``a`` equal the steps from ``b``, at most ``limit``."""
        steps, n, size = self.steps, 0, 1
        while n < limit:
            size = min(size, limit - n)
            if steps[a + n : a + n + size] == steps[b + n : b + n + size]:
                n += size
                size *= 2
            elif size == 1:
                return n
            else:
                limit, size = n + size, max(1, size // 8)
        return n


def parse_codes(text: str, token: re.Pattern[str], key: Callable[[re.Match[str]], int], expected: str) -> list[int]:
    """Parse the codes of a text; ``key`` numbers the word of a token, whose groups are [1] stage, [3] first and [4]
    end.

    Raises InvalidDocument, with the position, where the text is not of the grammar (``expected`` says what a token is).
    """
    current: list[int] = []
    outer: list[tuple[int, list[int]]] = []
    total = 0
    for item in _ITEM.finditer(text):
        at, piece = item.start(), item[0]
        if at > 0 and text[at - 1] not in " \t\n\r(" and piece[0] != ")":
            raise fault(text, at, "expected a space before this")
        if piece == "(":
            outer.append((at, current))
            current = []
        elif piece[0] == ")":
            repeat = _REPEAT.match(text, at)
            if repeat is None:
                raise fault(text, at, f"{piece!r} has no repeat count; expected )*COUNT, )*COUNT+SHIFT or -SHIFT")
            if not outer:
                raise fault(text, at, "this ) has no matching (")
            count, shift = int(repeat[1]), int(repeat[2] or 1)
            total += (count - 1) * len(current)
            _check_size(text, at, total)
            inner = _repeated(text, at, current, count, shift)
            current = outer.pop()[1]
            current += inner
        else:
            match = token.fullmatch(text, at, item.end())
            if match is None:
                raise fault(text, at, f"{piece!r} is not a token; {expected}")
            first = int(match[3])
            end = first + 1 if match[4] is None else int(match[4])
            if int(match[1] or 0) >= MICRO_BATCHES:
                raise fault(text, at, f"{piece!r} has a stage above {MICRO_BATCHES - 1}")
            if not first < end <= MICRO_BATCHES:
                raise fault(text, at, f"{piece!r} contains no micro-batch, or one above {MICRO_BATCHES - 1}")
            total += end - first
            _check_size(text, at, total)
            base = key(match) * SPAN
            current.extend(range(base + first, base + end))
    if outer:
        raise fault(text, outer[-1][0], "this ( is never closed")
    return current


def _repeated(text: str, at: int, codes: list[int], count: int, shift: int) -> list[int]:
    if not codes or count == 0:
        raise fault(text, at, "the group is empty, or repeated 0 times")
    numbers = [code % SPAN for code in codes]
    ends = min(numbers) + shift * (count - 1), max(numbers) + shift * (count - 1)
    if ends[0] < 0 or ends[1] >= MICRO_BATCHES:
        raise fault(
            text,
            at,
            f"the group reaches micro-batch {ends[0] if shift < 0 else ends[1]}; 0 to {MICRO_BATCHES - 1} are allowed",
        )
    return [code + by for by in range(0, shift * count, shift) for code in codes] if shift else codes * count


def _check_size(text: str, at: int, total: int) -> None:
    if total > MAX_OPERATIONS:
        raise fault(text, at, f"the text unrolls to more than {MAX_OPERATIONS} operations")


def fault(text: str, at: int, what: str) -> InvalidDocument:
    """Return the error about a place of a text, with the text around it."""
    line = text[max(0, at - 30) : at + 30]
    return InvalidDocument(f"character {at + 1}: {what}; near {line!r}")
