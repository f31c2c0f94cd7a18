"""Contents of README and the guides: commands, Python, data and output, each with its place."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from repository import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/tutorials").glob("*.md"))]
_BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"^\|.*\| `(penstock [^`|]+)`[^|]*(?:\||$)", re.MULTILINE)
_HEREDOC = re.compile(r"^(?:cat > (\S+) )?([^\n]*)<<'(\w+)'\n(.*?)^\3$", re.MULTILINE | re.DOTALL)

Kind = Literal["shell", "python", "data", "output"]


@dataclass(frozen=True)
class Piece:
    """A line of a shell block, or another block as a whole; ``file`` is what the page calls it."""

    kind: Kind
    text: str
    page: str
    line: int
    language: str = ""
    file: str = ""
    alone: bool = False
    """Whether the piece belongs to a table, where no row follows from the one before."""

    @property
    def bare(self) -> str:
        """A shell line without its comment."""
        return self.text.partition("  #")[0].strip()

    @property
    def place(self) -> str:
        """The place in the form that editors take."""
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        """The words of a shell line, without its comment."""
        return shlex.split(self.text, comments=True)


def pieces(path: Path) -> Iterator[Piece]:
    """Yield all blocks in the order of the page, then the commands of its tables; README has a separate test."""
    text = path.read_text(encoding="utf-8")
    page = path.relative_to(ROOT).as_posix()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        language, file, body = match[1], match[2] or "", match[3]
        if language == "bash":
            yield from _shell(body, page, line)
        elif language == "python":
            yield Piece("python", body, page, line, language, file)
        elif language == "text":
            yield Piece("output", body, page, line)
        elif language:
            yield Piece("data", body, page, line, language, file)
        else:
            assert not re.search(r"^\$? ?penstock ", body, re.MULTILINE), f"{page}:{line}: mark the block as bash"
    for match in _CELL.finditer(text) if path.name != "README.md" else ():
        yield Piece("shell", match[1], page, text.count("\n", 0, match.start()) + 1, alone=True)


def pieces_of_section(path: Path, title: str) -> Iterator[Piece]:
    """Yield the blocks of one section of a page, from its heading of the second level to the next."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begin = lines.index(f"## {title}") + 1
    end = next(
        (number for number, line in enumerate(lines, 1) if number > begin and line.startswith("## ")), len(lines)
    )
    yield from (piece for piece in pieces(path) if begin < piece.line < end)


def _shell(body: str, page: str, line: int) -> Iterator[Piece]:
    """Yield each command, with its continuation lines; a file within the block itself is data.

    ``cd job && …`` affects that line alone.
    """
    for document in _HEREDOC.finditer(body):
        if document[1]:
            yield Piece("data", document[4], page, line + body.count("\n", 0, document.start()), file=document[1])
    body = _HEREDOC.sub(lambda document: ("" if document[1] else document[2]) + "\n" * document[0].count("\n"), body)
    for number, text in enumerate(re.sub(r"\\\n *", "\0", body).split("\n"), line):
        parts = text.replace("\0", " ").split(" && ")
        for part in parts:
            elsewhere = part.startswith("cd ") and len(parts) > 1
            if part.strip() and not part.lstrip().startswith("#") and not elsewhere:
                yield Piece("shell", part.strip(), page, number)
