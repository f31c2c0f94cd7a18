"""``rocm-smi --showtopo``: how the AMD devices of one node reach each other.

.. [1] rocm-smi, ``showHwTopology``: blocks between two GPUs of weights (15 for each XGMI hop), hops and link types
   (XGMI, PCIE), and NUMA nodes, which are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from penstock.importers.cluster.facts import DeviceFacts, DeviceLinkFacts, NodeFacts, Place, SourceFacts
from penstock.importers.cluster.structured import shortened
from penstock.importers.lines import Faults

_BLOCK = re.compile(r"=+ *(Weight|Link Type) between two GPUs *=+")
_DEVICE = re.compile(r"GPU([0-9]{1,4})")
_TYPES = ("XGMI", "PCIE")
_DIRECT = 15
"""Weight of a pair between which there is an XGMI link."""

Table = dict[int, dict[int, str]]
"""Cells by the indices of row and column."""


def read_rocm_topo(text: str, source: str = "rocm-smi --showtopo") -> SourceFacts:
    """Read the devices of a node without a name, and the links between them.

    Raises InvalidDocument with all faults by line; among them a matrix that is cut off.
    """
    faults = Faults(f"the matrices of rocm-smi {source!r}")
    lines = [line.strip() for line in text.lstrip("\ufeff").split("\n")]
    tables = {
        block[1]: (number + 1, _table(lines, number + 1, faults))
        for number, line in enumerate(lines)
        if (block := _BLOCK.fullmatch(line))
    }
    if "Link Type" not in tables:
        faults.add(None, "there is no block 'Link Type between two GPUs'; give all of the output", code="missing")
    faults.stop()
    line, types = tables["Link Type"]
    _line, weights = tables.get("Weight", (0, {}))
    links = tuple(_links(types, weights, line, faults))
    faults.stop()
    devices = tuple(DeviceFacts(index=index) for index in sorted(types))
    node = NodeFacts(name="", place=Place(source, line=line), devices=devices, device_links=links)
    return SourceFacts(format="rocm-topo", source=source, nodes={"": node})


def _table(lines: Sequence[str], start: int, faults: Faults) -> Table:
    """Return the matrix whose line of columns is at ``start``; it ends before a line that is no row."""
    columns = _indices(lines[start].split() if start < len(lines) else [])
    if not columns:
        faults.add(start + 1, "there is no line of column names such as `GPU0 GPU1 …` after the block's title")
    table: Table = {}
    for number in range(start + 1, len(lines)):
        name, *cells = lines[number].split() or [""]
        row = _DEVICE.fullmatch(name)
        if row is None:
            break
        if len(cells) != len(columns):
            problem = f"{name} has {len(cells)} cells of {len(columns)}; is the line cut off?"
            faults.add(number + 1, problem, code="missing")
        table[int(row[1])] = dict(zip(columns, cells, strict=False))
    if missing := [f"GPU{index}" for index in columns if index not in table]:
        faults.add(start + 1, f"there is no row for {', '.join(missing)}; is the text cut off?", code="missing")
    if odd := [f"GPU{index}" for index in table if index not in columns]:
        faults.add(start + 1, f"there is no column for {', '.join(odd)}", code="missing")
    return table


def _indices(words: Sequence[str]) -> list[int]:
    """Return the devices that a line of columns names; none where a word is no device, or stands there twice."""
    matches = [_DEVICE.fullmatch(word) for word in words]
    indices = [int(match[1]) for match in matches if match is not None]
    return indices if len(indices) == len(words) == len(set(indices)) else []


def _links(types: Table, weights: Table, line: int, faults: Faults) -> Iterator[DeviceLinkFacts]:
    """Yield a link for each pair; no link of a pair whose XGMI way leads over other devices."""
    for a in sorted(types):
        for b in sorted(index for index in types if index > a):
            kind, back = types[a][b].upper(), types[b][a].upper()
            if kind not in _TYPES or kind != back:
                words = f"{shortened(kind)} and {shortened(back)}" if kind != back else shortened(kind)
                faults.add(
                    line, f"GPU{a} and GPU{b} are joined by {words}; known are {' and '.join(_TYPES)}, both ways"
                )
            elif kind == "PCIE":
                yield DeviceLinkFacts(a, b, path="pcie")
            elif weights.get(a, {}).get(b, str(_DIRECT)) == str(_DIRECT):
                yield DeviceLinkFacts(a, b, path="nvlink")
