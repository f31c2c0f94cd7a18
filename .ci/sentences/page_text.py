"""Prose of a Markdown page: no tables, code, HTML or targets of links."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sentences.prose import Block, blocks

_FENCE = re.compile(r"\s*(?:>\s*)*(`{3,}|~{3,})")
_HEADING = re.compile(r"#{1,6} +(.*)")
_MARKUP = re.compile(r"\s*(?:!!!|\?\?\?\+?|===|--8<--|\[[^\]]+\]: |<)")
_COMMENT = re.compile(r"<!--.*?-->|\A---\n.*?\n---\n", re.DOTALL)
_LINK = re.compile(
    r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\](?:\([^()\s]*(?:\([^()]*\)[^()\s]*)?(?: \"[^\"]*\")?\)|\[[^\]]*\])"
)
_TAG = re.compile(r"</?[a-z][^<>]*>|\{[:.#][^{}]*\}|\*\*|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)")


def page_blocks(text: str) -> Iterator[Block]:
    """Yield the paragraphs, list items and headings of a page."""
    lines: list[tuple[int, str]] = []
    fence = ""
    text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if fence or mark:
            if mark and not fence:
                fence = mark[1]
            elif mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
                fence = ""
            line = ""
        heading = _HEADING.match(line)
        if heading:
            yield Block(number, _plain(heading[1]), heading=True)
        lines.append((number, "" if heading or _MARKUP.match(line) else line.lstrip("> ") if line[:1] == ">" else line))
    for block in blocks(lines):
        yield block._replace(text=_plain(block.text))


def _plain(text: str) -> str:
    return _TAG.sub("", _LINK.sub(r"\1", text))
