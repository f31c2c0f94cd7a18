"""HTML tables; all cell contents are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Return a table that scrolls sideways where it is too wide; columns ``numeric`` are aligned to the right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if i in numeric else ''}>{escape(value)}</{tag}>" for i, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>"
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'
