"""Files of measured rows: sections of rows with named columns, one row a line. Nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Rows(NamedTuple):
    """One section: the names of its columns, and its rows; times in ns, sizes in bytes."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def named(self) -> Iterator[dict[str, Any]]:
        """Return each row as a dict by the names of the columns."""
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)


def written(about: Mapping[str, Any], sections: Mapping[str, Rows]) -> str:
    """Return the file's text; fractions of a ns are dropped."""
    parts = [f'"about": {json.dumps(about, indent=1)}']
    for name, section in sections.items():
        rows = ",\n".join(json.dumps([_whole(value) for value in row]) for row in section.rows)
        parts.append(f'"{name}": {{"columns": {json.dumps(list(section.columns))}, "rows": [\n{rows}\n]}}')
    return "{" + ",\n".join(parts) + "}\n"


def read(path: Path) -> tuple[dict[str, Any], dict[str, Rows]]:
    """Read a file; return its description of itself, and its sections."""
    document = json.loads(path.read_text(encoding="utf-8"))
    about: dict[str, Any] = document.pop("about")
    return about, {name: Rows(section["columns"], section["rows"]) for name, section in document.items()}


def _whole(value: Any) -> Any:
    return round(value) if isinstance(value, float) else value
