"""Tables and the other blocks that a plan's page is made of: values, which pages and the terminal render."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from penstock.schemas.amounts import amount, duration, percent


class Cell(NamedTuple):
    """A cell's text, the number by which its column is sorted, and a title that is shown under the pointer."""

    text: str
    value: float | None = None
    title: str = ""


NONE = "–"
"""The text of a cell without a value."""


def of_amount(size: int | None) -> Cell:
    """Return the cell of a number of bytes; a dash for None."""
    return Cell(NONE) if size is None else Cell(amount(size), size)


def of_duration(time_ns: float | None) -> Cell:
    """Return the cell of a time in ns; a dash for None."""
    return Cell(NONE) if time_ns is None else Cell(duration(time_ns), time_ns)


def of_share(share: float | None) -> Cell:
    """Return the cell of a share, in percent; a dash for None."""
    return Cell(NONE) if share is None else Cell(percent(share), share)


def _span(first: Cell, last: Cell) -> Cell:
    """Return the cell of a run of rows: one text, or the ends of both."""
    if first.text == last.text:
        return first
    start, end = first.text, last.text
    for mark in ("–", " … "):
        start, end = start.split(mark)[0], end.split(mark)[-1]
    return Cell(f"{start}{' … ' if '/' in start else '–'}{end}", first.value)


class Column(NamedTuple):
    """A column's heading. ``numeric``: aligned to the right; ``brief``: also where there is little room."""

    head: str
    numeric: bool = False
    brief: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of cells; ``total``: how many rows there are, of which these are the first."""

    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    total: int = 0

    @classmethod
    def of(
        cls,
        columns: Sequence[Column],
        rows: Iterable[Sequence[Cell | str]],
        caption: str = "",
        *,
        most: int | None = None,
    ) -> Table:
        """Return a table of at most ``most`` rows; a cell that is a text has no other value."""
        cells = [tuple(each if isinstance(each, Cell) else Cell(each) for each in row) for row in rows]
        return cls(tuple(columns), tuple(cells[:most]), caption, len(cells))

    @property
    def more(self) -> str:
        """Return how many rows are shown, where there are more; else an empty text."""
        return f"{len(self.rows):,} of {self.total:,} rows are shown." if self.total > len(self.rows) else ""

    def folded(self, places: int, most: int) -> Table:
        """Return the table with neighbouring rows as one where they differ in the first ``places`` columns alone.

        These columns then have both ends. Of more than ``most`` rows the first and the last ones stay.
        """
        groups: list[list[tuple[Cell, ...]]] = []
        for row in self.rows:
            if groups and [cell.text for cell in groups[-1][0][places:]] == [cell.text for cell in row[places:]]:
                groups[-1].append(row)
            else:
                groups.append([row])
        rows = [tuple(_span(a, b) for a, b in zip(group[0], group[-1], strict=True)) for group in groups]
        if len(rows) > most:
            gap = (Cell("…"), Cell(f"{len(rows) - most + 1} more"), *(Cell("") for _ in self.columns[2:]))
            rows = [*rows[: most - 2], gap, rows[-1]]
        return Table(self.columns, tuple(rows), self.caption, len(rows))

    def brief(self) -> Table:
        """Return the table with the columns that are shown where there is little room."""
        kept = [i for i, column in enumerate(self.columns) if column.brief]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return Table(tuple(self.columns[i] for i in kept), rows, self.caption, self.total)


class Bar(NamedTuple):
    """A row of a bar chart.

    ``parts``: lengths from zero by name of their sort; ``error``: half the length of the whisker at the bar's end.
    """

    label: str
    parts: tuple[tuple[str, float], ...]
    text: str
    error: float = 0.0
    address: str = ""
    is_pale: bool = False
    """Whether it is drawn pale: a layout that cannot run."""

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(length for _sort, length in self.parts)


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero, and a line across all of them, such as a bound or a capacity."""

    kind: ClassVar[str] = "bars"
    rows: tuple[Bar, ...]
    caption: str = ""
    line: float | None = None
    line_text: str = ""

    @property
    def sorts(self) -> tuple[str, ...]:
        """The names of the parts, each once, in the order of the first bar that has it."""
        return tuple(dict.fromkeys(sort for row in self.rows for sort, _length in row.parts))

    @property
    def end(self) -> float:
        """The length that fills the chart's width."""
        return 1.02 * max((row.total + row.error for row in self.rows), default=0.0) or 1.0

    @property
    def drawn(self) -> tuple[tuple[Bar, tuple[tuple[int, float, float], ...], tuple[float, float]], ...]:
        """Each bar with its rectangles (number of the sort, start and length) and its whisker, in percent."""
        sorts, scale = self.sorts, 100 / max(self.end, self.line or 0.0)
        rows = []
        for row in self.rows:
            start, rectangles = 0.0, []
            for sort, length in row.parts:
                rectangles.append((sorts.index(sort), round(start * scale, 3), round(length * scale, 3)))
                start += length
            whisker = (round((start - row.error) * scale, 3), round((start + row.error) * scale, 3))
            rows.append((row, tuple(rectangles), whisker))
        return tuple(rows)

    @property
    def mark(self) -> float | None:
        """The place of the line, in percent."""
        return None if self.line is None else round(100 * self.line / max(self.end, self.line), 3)


@dataclass(frozen=True)
class Text:
    """A paragraph; ``style``: ``hint`` for a remark, ``h3`` for a heading."""

    kind: ClassVar[str] = "text"
    text: str
    style: str = ""


@dataclass(frozen=True)
class Bullets:
    """Sentences of a list."""

    kind: ClassVar[str] = "bullets"
    entries: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    kind: ClassVar[str] = "facts"
    entries: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Drawing:
    """A picture as markup, with its caption."""

    kind: ClassVar[str] = "drawing"
    markup: str
    caption: str = ""


@dataclass(frozen=True)
class Folded:
    """Blocks that are shown on demand, below a summary."""

    kind: ClassVar[str] = "folded"
    summary: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Columns:
    """Groups of blocks, side by side where there is room."""

    kind: ClassVar[str] = "columns"
    groups: tuple[tuple[Block, ...], ...]


Block = Table | Bars | Text | Bullets | Facts | Drawing | Folded | Columns


@dataclass(frozen=True)
class Section:
    """A part of a page with its heading and a gist, one line that is always seen; the blocks are opened on demand."""

    name: str
    title: str
    gist: str
    blocks: tuple[Block, ...]
    opened: bool = False
