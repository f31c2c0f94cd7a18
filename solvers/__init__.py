"""Planning, scheduling, judging and proving, on plain frozen arrays."""

import hashlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.schemas.program import KINDS, LOOK_AHEAD, WORDS


def _digest_of_kernels() -> str:
    """Numba notices a change of the file of a function, but not of those whose code and constants it took in."""
    folder = Path(__file__).parent
    known = hashlib.sha256()
    for path in sorted([*(folder / "kernels").glob("*.py"), folder / "tables.py"]):
        known.update(path.read_bytes())
    known.update(repr((KINDS, LOOK_AHEAD, WORDS)).encode())
    return known.hexdigest()[:12]


def _keep_compiled_kernels() -> None:
    """Give numba a directory per version of ours that we may write, so that nobody waits for a compiler twice."""
    try:
        ours = version("penstock")
    except PackageNotFoundError:
        ours = "unknown"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/nonexistent"), ".cache"))
    path = base / "penstock" / f"kernels-{ours}-{_digest_of_kernels()}-{sys.implementation.cache_tag}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(path, os.W_OK):
        os.environ["NUMBA_CACHE_DIR"] = str(path)


if "NUMBA_CACHE_DIR" not in os.environ:
    _keep_compiled_kernels()
