"""References of code, scripts and pages: sections of the theory, decisions, and files of the repository."""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pages import ROOT

THEORY = ROOT / "docs/theory"
FOLDERS = (
    "docs",
    "schemas",
    "solvers",
    "executor",
    "service",
    "src",
    "examples",
    "benchmarks",
    "scripts",
    "tests",
)
_DOCS = re.compile(r"\b(?:(ALGORITHMS|BOUNDS|SOLVERS|EXECUTOR)\b(?:\.md)?|docs/theory/(\w+)\.md`*)(?:'s?)?,? ?")
_PREFIX = r"(?:sections? |§ ?|[Aa]ppendix |\[)?"
_PART = re.compile(_PREFIX + r"(?:[Pp]art )?(I{1,3})(?:\.(\d+(?:\.\d+)*))?(?!\w)\]?")
_PART_ONE = re.compile(r"[Pp]art (I{1,3})")
_SECTION = re.compile(_PREFIX + r"(R-\d+|P\d+|[A-Z](?:\.\d+)*|\d+(?:\.\d+)*)(?!\w| =)\]?")
_AND = re.compile(r"(?: \([^()]*\))?(,? and | or |, | to )")
_RANGE = re.compile(r"[–-](?=[A-Z0-9])")
_HEADING = re.compile(r"^#{1,4} (?:Part |Appendix )?(\S+)(?: (\d+(?:\.\d+)*)\b)?", re.MULTILINE)
_REMARK = re.compile(r"^(?:[-*|] ?)?[*\[]*(R-\d+)\b", re.MULTILINE)
_QUOTES = re.compile(r"^\w*(\"{3}|'{3}|\"|')|(\"{3}|'{3}|\"|')$")
_ROMAN = re.compile(r"I{1,3}")


@dataclass(frozen=True)
class Prose:
    """Text of a file that people read. ``explains``: it is a comment, a docstring, a page or a shell script, and not
    another string."""

    file: str
    line: int
    text: str
    explains: bool = True


@dataclass(frozen=True)
class Citation:
    """``section`` of a page of the theory, "" for all of it."""

    page: str
    section: str


@cache
def files() -> tuple[Path, ...]:
    """Return the repository's files, without links and generated files."""
    paths = list(ROOT.glob("*.*"))
    for folder in (*FOLDERS, "docker", ".ci"):
        for place, inner, names in os.walk(ROOT / folder):
            inner[:] = [each for each in inner if each != "__pycache__"]
            paths += [Path(place) / name for name in names]
    return tuple(sorted(path for path in paths if path.is_file() and not path.is_symlink()))


@cache
def prose() -> tuple[Prose, ...]:
    """Return the prose of every Python file, page and script, without the samples of the test itself."""
    texts: list[Prose] = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        script = not path.suffix and name.startswith(("scripts/", ".ci/"))
        if name == "tests/docs/test_citations.py" or not (script or path.suffix in (".py", ".md", ".sh", ".toml")):
            continue
        text = path.read_text(encoding="utf-8")
        pythonic = path.suffix == ".py" or (script and "python" in text.partition("\n")[0])
        texts += python(name, text) if pythonic else paragraphs(name, text)
    return tuple(texts)


def paragraphs(name: str, text: str) -> Iterator[Prose]:
    """Yield the paragraphs that blank lines separate."""
    for match in re.finditer(r"(?:^.+\n?)+", text, re.MULTILINE):
        yield Prose(name, text.count("\n", 0, match.start()) + 1, match[0])


def python(name: str, text: str) -> Iterator[Prose]:
    """Yield comments and strings of a module; neighbours, such as the lines of a comment, are one text."""
    run: list[str] = []
    line, explains = 0, True
    fresh = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        comment = token.type == tokenize.COMMENT
        quoted = tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE")
        if (comment or quoted) and run and explains == (comment or fresh):
            run.append(_plain(token.string, comment))
        else:
            if run:
                yield Prose(name, line, "\n".join(run), explains)
            run = [_plain(token.string, comment)] if comment or quoted else []
            line, explains = token.start[0], comment or fresh
        fresh = token.type == tokenize.NEWLINE or (comment and fresh)
        if token.type == tokenize.NEWLINE and run:
            yield Prose(name, line, "\n".join(run), explains)
            run = []


def _plain(token: str, comment: bool) -> str:
    return token.removeprefix("#").strip() if comment else _QUOTES.sub("", token)


def citations(text: str) -> Iterator[Citation]:
    """Yield the citations in a text, one for each section.

    Examples: ``ALGORITHMS 2.6-2.8``, ``BOUNDS Part II, 1.5 and 1.6``, ``EXECUTOR``, ``docs/theory/judge.md, section
    4``.
    """
    text = re.sub(r"\s+", " ", text)
    for match in _DOCS.finditer(text):
        page = f"{(match[1] or match[2]).lower()}.md"
        sections = list(_sections(text, match.end()))
        yield from (Citation(page, section) for section in sections or [""])


def _sections(text: str, at: int) -> Iterator[str]:
    part = ""
    while True:
        if (match := _PART.match(text, at)) and (len(match[1]) > 1 or match[2] or _PART_ONE.match(text, at)):
            part = f"{match[1]}."
            section = part + match[2] if match[2] else match[1]
        elif match := _SECTION.match(text, at):
            section = part + match[1]
        else:
            return
        yield section
        at = match.end()
        if between := _RANGE.match(text, at):
            last = _SECTION.match(text, between.end())
            if last:
                yield from _between(section, part + last[1])
        if not (joint := between or _AND.match(text, at)):
            return
        at = joint.end()


def _between(first: str, last: str) -> Iterator[str]:
    """Yield sections after the first and before the last of a range."""
    (chapter, low), (other, high) = (re.split(r"(?<=\D)(?=\d+$)|^(?=\d+$)", each) for each in (first, last))
    assert chapter == other, f"{first} to {last} is a range over several chapters: name them"
    yield from (f"{chapter}{number}" for number in range(int(low) + 1, int(high)))


def sections(text: str) -> set[str]:
    """Return the parts of a page that can be cited.

    These are the numbers of its headings, below a heading ``Part II`` with ``II.`` before them, and its remarks
    ``R-1``,
    ``R-2``, …, each at the beginning of a line.
    """
    citable = set(_REMARK.findall(text))
    part = ""
    for match in _HEADING.finditer(text):
        number = match[1].rstrip(".,:")
        if _ROMAN.fullmatch(number):
            part = number
            citable |= {part, f"{part}.{match[2]}"} if match[2] else {part}
            continue
        numbered = number[0].isdigit()
        if numbered and part:
            citable.add(f"{part}.{number}")
        if not numbered or part in ("", "I"):
            citable.add(number)
    return citable


def anchors(text: str) -> set[str]:
    """Return the ids that the headings of a page get."""
    ids: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        while slug in ids:
            name, _, number = slug.rpartition("_")
            slug = f"{name}_{int(number) + 1}" if name and number.isdigit() else f"{slug}_1"
        ids.add(slug)
    return ids
