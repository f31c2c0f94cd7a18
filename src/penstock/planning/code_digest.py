"""A digest of Penstock's code that answers depend on: a stored one is not taken for one of other code."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

ROOMS = ("schemas", "facts", "shapes", "solvers", "convert", "layouts", "planning")


@cache
def code_digest() -> str:
    """Return the digest of the installed code; call it at the start, before a checkout can change."""
    return digest_of(Path(__file__).parents[1])


def digest_of(package: Path) -> str:
    """Return 12 hexadecimal digits of SHA-256 over every file in `ROOMS` of a package, with its name."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((package / room).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(package)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]
