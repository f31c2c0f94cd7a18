"""Text without markup, split into blocks (paragraphs, list items) and sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

CODE = "Code"
"""The word that takes the place of a code span, so that a span counts as one word and matches no rule."""

_BULLET = re.compile(r"\s*(?:[*+-]|\d+[.)]|\.\. \[\w+\])\s+")
_UNDERLINE = re.compile(r"\s*([-=~^])\1{2,}\s*$")
_DOCTEST = re.compile(r"\s*(?:>>>|\.\.\. )")
_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_END = re.compile(
    r"(?<!\be\.g)(?<!\bi\.e)(?<!\bcf)(?<!\bvs)(?<!\bet al)(?<!\bFig)(?<!\bSec)(?<!\bEq)(?<!\bTab)"
    r"(?<!\bresp)(?<!\bapprox)(?:[.!?…]|\.{3})[)\]\"'”’*_]*\s+(?=[\"'“‘(\[*_]*[^\Wa-z])"
)
_WORD = re.compile(r"[^\W\d_]{2}|^[aAI]$|^\W*\d")
_BRACKETS = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")


class Block(NamedTuple):
    """A paragraph, a list item or a heading; ``text`` keeps its line breaks."""

    line: int
    text: str
    heading: bool = False


class Sentence(NamedTuple):
    """A sentence, and the line of the file on which it starts."""

    line: int
    text: str


def without_code(text: str) -> str:
    """Replace each code span by one word; keep the line breaks."""
    return _SPAN.sub(lambda span: CODE + "\n" * span[0].count("\n"), text)


def blocks(lines: Iterable[tuple[int, str]]) -> Iterator[Block]:
    """Split the lines of a docstring at blank lines, list items and changes of indentation; skip code and tables."""
    parts: list[str] = []
    start, indent, hanging, literal = 0, 0, False, -1
    for number, line in lines:
        depth = len(line) - len(line.lstrip())
        if literal >= 0 and (not line.strip() or depth > literal):
            continue
        literal = -1
        skipped = not line.strip() or _UNDERLINE.match(line) or _DOCTEST.match(line) or line.lstrip()[0] in "|+"
        bullet = _BULLET.match(line)
        if parts and (skipped or bullet or (depth != indent and not (hanging and depth > indent))):
            yield Block(start, without_code("\n".join(parts)))
            parts = []
        if skipped:
            continue
        if not parts:
            start, indent, hanging = number, depth, bullet is not None
        parts.append(line[bullet.end() :] if bullet else line.strip())
        if line.rstrip().endswith("::"):
            literal = indent
    if parts:
        yield Block(start, without_code("\n".join(parts)))


def sentences(block: Block) -> Iterator[Sentence]:
    """Split a block after each full stop that a capital, a digit or code follows."""
    at = 0
    for end in (*(match.end() for match in _END.finditer(block.text)), len(block.text)):
        if text := block.text[at:end].strip():
            yield Sentence(block.line + block.text.count("\n", 0, at), " ".join(text.split()))
        at = end


def count_words(text: str) -> int:
    """Count the words and numbers of a sentence; single letters and signs of a formula are neither."""
    return sum(_WORD.search(word) is not None for word in text.split())


def count_semicolons(text: str) -> int:
    """Count the semicolons of a sentence outside brackets."""
    before = ""
    while text != before:
        before, text = text, _BRACKETS.sub("", text)
    return text.count(";")
