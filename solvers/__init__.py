"""Planning, scheduling, judging and proving, on plain frozen arrays."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def _keep_compiled_kernels() -> None:
    """Give numba a directory per version of ours that we may write, so that nobody waits for a compiler twice."""
    try:
        ours = version("penstock")
    except PackageNotFoundError:
        ours = "unknown"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/nonexistent"), ".cache"))
    path = base / "penstock" / f"kernels-{ours}-{sys.implementation.cache_tag}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(path, os.W_OK):
        os.environ["NUMBA_CACHE_DIR"] = str(path)


if "NUMBA_CACHE_DIR" not in os.environ:
    _keep_compiled_kernels()
