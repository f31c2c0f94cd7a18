"""The output of ``nvidia-smi topo -m``: how the devices and network cards of one node reach each other.

.. [1] Its legend: X, NV# (# NVLinks), PIX (one PCIe bridge), PXB (several), PHB (a host bridge), NODE (several host
   bridges of a NUMA node), SYS (between NUMA nodes; SOC in old drivers), C2C (chip to chip).

Cells are separated by tabs as the tool prints them, or by blanks as terminals paste them. The columns after the matrix
(affinities) vary from driver to driver, are blank on rows of cards, and are not read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NamedTuple

from penstock.importers.cluster.facts import DeviceFacts, DeviceLinkFacts, NicFacts, NodeFacts, Place, SourceFacts
from penstock.importers.cluster.structured import shortened
from penstock.importers.lines import Faults

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\[4m(?=\s*GPU)|\[0m\s*$")
"""Underlining; terminals that lose the escape leave its tail."""
_DEVICE = re.compile(r"GPU([0-9]{1,4})")
_NVLINK = re.compile(r"NV([0-9]{1,3})")
_LEGEND_ENTRY = re.compile(r"\s*(NIC[0-9]+):\s*(\S+)\s*")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_WORD = re.compile(r"\S+")
_AFTER = ("CPU", "NUMA")
"""Headings of the columns after the matrix: CPU Affinity, NUMA Affinity, GPU NUMA ID."""
_PATHS: dict[str, Literal["nvlink", "pcie-switch", "pcie", "host-bridge", "socket"]] = {
    "C2C": "nvlink",
    "PIX": "pcie-switch",
    "PXB": "pcie",
    "PHB": "host-bridge",
    "NODE": "host-bridge",
    "SYS": "socket",
    "SOC": "socket",
}
_DISTANCE = ("C2C", "PIX", "PXB", "PHB", "NODE")
"""Paths from near to far; a path that is not among them (SYS) is near to nothing."""
_GLUED_NAMES = re.compile(r"(?:(?:GPU|NIC|mlx[0-9]_)[0-9]+){2,}")
_GLUED_NAME = re.compile(r"(?:GPU|NIC|mlx[0-9]_)[0-9]+")
_GLUED_PATHS = re.compile(r"(?:NV[0-9]+|PIX|PXB|PHB|NODE|SYS|SOC|C2C){2,}")
_AGAIN = "a tab was lost, as terminals do where a line wraps; take the text again with `nvidia-smi topo -m > topo.txt`"
_PATH_NAMES = "X, NV1 … NV99, PIX, PXB, PHB, NODE, SYS, SOC, C2C"


class _Cell(NamedTuple):
    text: str
    column: int


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    line: int
    cells: tuple[_Cell, ...]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """``columns``: devices and cards, with their positions; cards may be without a row."""

    columns: dict[str, int]
    line: int
    rows: dict[str, _Row]

    @property
    def devices(self) -> dict[str, int]:
        """Names of devices, with what the driver calls them."""
        return {name: int(match[1]) for name in self.columns if (match := _DEVICE.fullmatch(name))}

    def cell(self, row: str, column: str) -> _Cell:
        return self.rows[row].cells[self.columns[column]]


def read_nvidia_topo(text: str, source: str = "nvidia-smi topo -m") -> SourceFacts:
    """Read the devices of a node, the links between them, and which cards are near to which.

    The node has no name here. Raises InvalidDocument with all faults by line and column; among them a matrix that is
    cut off or not symmetric.
    """
    faults = Faults(f"the matrix of nvidia-smi {source!r}")
    lines = [_ANSI.sub("", line.rstrip("\r")) for line in text.lstrip("\ufeff").split("\n")]
    matrix = _read_matrix(lines, faults)
    _check_cells(matrix, faults)
    faults.stop()
    names = dict(_legend(lines))
    node = NodeFacts(
        name="",
        place=Place(source, line=matrix.line),
        devices=tuple(DeviceFacts(index=index) for index in sorted(matrix.devices.values())),
        device_links=tuple(_links(matrix)),
        nics=tuple(
            NicFacts(name=names.get(card, card), near=_near(matrix, card))
            for card in matrix.columns
            if card not in matrix.devices
        ),
    )
    return SourceFacts(format="nvidia-topo", source=source, nodes={"": node})


def _read_matrix(lines: Sequence[str], faults: Faults) -> _Matrix:
    """Return the first matrix of the text; a second one is a fault, as the two would be of different nodes."""
    headers = [number for number, line in enumerate(lines) if _is_header(line)]
    if not headers:
        beginning = next((line.strip() for line in lines if line.strip()), "")
        problem = f"it begins with {beginning[:40]!r}" if beginning else "it is empty"
        faults.add(None, f"there is no line of column names such as `GPU0 GPU1 …`; {problem}")
        faults.stop()
    start = headers[0]
    for again in headers[1:]:
        faults.add(again + 1, "a second matrix begins; give each node's in a file of its own")
    columns = list(takewhile(lambda cell: cell.text not in _AFTER, _words(lines[start])))
    _check_glue(columns, start + 1, faults)
    header = [cell.text for cell in columns]
    rows: dict[str, _Row] = {}
    for number in range(start + 1, headers[1] if len(headers) > 1 else len(lines)):
        cells = tuple(_cells(lines[number]))
        if not cells and rows:
            break
        if not cells:
            continue
        row = _Row(cells[0].text, number + 1, cells[1:])
        if row.name in rows:
            faults.add(row.line, f"the row {row.name} stands already in line {rows[row.name].line}", column=1)
        rows.setdefault(row.name, row)
    _check_rows(header, rows, start + 1, faults)
    return _Matrix({name: position for position, name in enumerate(header)}, start + 1, rows)


def _is_header(line: str) -> bool:
    words = [cell.text for cell in _words(line)]
    return len(words) > 1 and _DEVICE.fullmatch(words[0]) is not None and not any(map(_is_path, words[1:]))


def _is_path(word: str) -> bool:
    return word in _PATHS or word == "X" or _NVLINK.fullmatch(word) is not None


def _words(line: str) -> Iterator[_Cell]:
    return (_Cell(match[0], match.start() + 1) for match in _WORD.finditer(line))


def _cells(line: str) -> Iterator[_Cell]:
    """Yield the cells between tabs where there are tabs (a cell may be empty), else between blanks."""
    if "\t" not in line:
        yield from _words(line)
        return
    start = 0
    for part in line.split("\t"):
        if part.strip() or start:
            yield _Cell(part.strip(), start + len(part) - len(part.lstrip()) + 1)
        start += len(part) + 1


def _check_glue(columns: Sequence[_Cell], line: int, faults: Faults) -> None:
    """Refuse names of columns that have run together: all later faults would be of rows that are whole."""
    for cell in columns:
        if _GLUED_NAMES.fullmatch(cell.text):
            names = " and ".join(_GLUED_NAME.findall(cell.text))
            faults.add(line, f"{shortened(cell.text)} is {names} glued together: {_AGAIN}", column=cell.column)
    faults.stop()


def _check_rows(header: Sequence[str], rows: dict[str, _Row], line: int, faults: Faults) -> None:
    if doubles := sorted(name for name, count in Counter(header).items() if count > 1):
        faults.add(line, f"there are two columns {', '.join(doubles)}")
    names = set(header)
    for name in names:
        if not _NAME.fullmatch(name):
            faults.add(line, f"{shortened(name)} is no name of a device or card")
    missing = [name for name in header if _DEVICE.fullmatch(name) and name not in rows]
    if missing:
        faults.add(line, f"there is no row for {', '.join(missing)}; is the text cut off?", code="missing")
    for row in rows.values():
        if row.name not in names:
            faults.add(row.line, f"the row {shortened(row.name)} has no column of this name", column=1)
        elif len(row.cells) < len(header):
            glued = next((cell for cell in row.cells if _GLUED_PATHS.fullmatch(cell.text)), None)
            why = f"{shortened(glued.text)} is several cells: {_AGAIN}" if glued else "is the line cut off?"
            problem = f"{row.name} has {len(row.cells)} cells of {len(header)}; {why}"
            faults.add(row.line, problem, column=glued and glued.column, code="missing")
    faults.stop()


def _check_cells(matrix: _Matrix, faults: Faults) -> None:
    for a in matrix.rows:
        for b, position in matrix.columns.items():
            there = matrix.cell(a, b)
            back = matrix.cell(b, a) if b in matrix.rows else there
            line = matrix.rows[a].line
            if not _is_path(there.text):
                wrong = f"{there.text[:20]!r} is none of {_PATH_NAMES}" if there.text else "it is empty"
                faults.add(line, f"{a} to {b}: {wrong}", column=there.column)
            elif (a == b) != (there.text == "X"):
                wanted = "has to be X, itself" if a == b else "cannot be X, which means itself"
                faults.add(line, f"{a} to {b} is {there.text}; it {wanted}", column=there.column)
            elif matrix.columns[a] < position and there.text != back.text and _is_path(back.text):
                detail = f"{a} to {b} is {there.text}, but {b} to {a} is {back.text} (line {matrix.rows[b].line}"
                faults.add(line, f"{detail}, column {back.column}); both are one way", column=there.column)


def _links(matrix: _Matrix) -> Iterator[DeviceLinkFacts]:
    devices = sorted(matrix.devices, key=lambda name: matrix.devices[name])
    for position, a in enumerate(devices):
        for b in devices[position + 1 :]:
            code = matrix.cell(a, b).text
            ends = (matrix.devices[a], matrix.devices[b])
            if nvlink := _NVLINK.fullmatch(code):
                yield DeviceLinkFacts(*ends, path="nvlink", links=int(nvlink[1]))
            else:
                yield DeviceLinkFacts(*ends, path=_PATHS[code])


def _near(matrix: _Matrix, card: str) -> tuple[int, ...]:
    """Return the devices on the shortest path to a card; none where all are beyond the NUMA node."""
    codes = {index: matrix.cell(name, card).text for name, index in matrix.devices.items()}
    for code in _DISTANCE:
        if nearest := tuple(sorted(index for index, one in codes.items() if one == code)):
            return nearest
    return ()


def _legend(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of the cards, from ``NIC Legend:`` (newer drivers number the columns)."""
    for line in lines:
        if entry := _LEGEND_ENTRY.fullmatch(line):
            yield entry[1], entry[2]
