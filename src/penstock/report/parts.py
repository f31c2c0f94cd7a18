"""Parts of a page that are opened on demand: a heading, what is in it in a few words, and the rest below."""

from __future__ import annotations

from html import escape


def part(name: str, title: str, gist: str, body: str, *, opened: bool = False) -> str:
    """Return a part of a page; ``gist`` is its one line that is always seen, ``name`` its id."""
    return (
        f'<details class="part" id="{name}"{" open" if opened else ""}><summary><h2>{escape(title)}</h2> '
        f'<span class="gist">{escape(gist)}</span></summary>\n{body}\n</details>'
    )
