"""Scripts, styles and pictures of the pages: read once, under addresses that hold a hash of all of them.

Modules import each other by relative addresses, so one hash identifies the whole set and each answer may be kept for
ever.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from penstock.report.drawing.assets import script, style
from penstock.schemas.errors import NotFound

_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Asset(NamedTuple):
    """One file as it is sent."""

    body: bytes
    media_type: str


@cache
def assets() -> dict[str, Asset]:
    """Read all files by name: the files of the pages, and the report's script and style."""
    bodies = {entry.name: entry.read_bytes() for entry in (files("penstock.service.pages") / "static").iterdir()}
    bodies |= {"report.css": style().encode(), "timeline.js": script().encode()}
    return {
        name: Asset(body, _MEDIA_TYPES[kind])
        for name, body in bodies.items()
        if (kind := name.rpartition(".")[2]) in _MEDIA_TYPES
    }


@cache
def edition() -> str:
    """Return the hash of all files, which is part of their addresses."""
    whole = hashlib.sha256()
    for name, asset in sorted(assets().items()):
        whole.update(name.encode() + b"\0" + asset.body)
    return whole.hexdigest()[:16]


def address(name: str) -> str:
    """Return the address of a file. Raises NotFound for an unknown name."""
    find(name)
    return f"/static/{edition()}/{name}"


def find(name: str) -> Asset:
    """Find a file by its name. Raises NotFound."""
    if name not in assets():
        raise NotFound(f"there is no file {name!r} for pages")
    return assets()[name]
