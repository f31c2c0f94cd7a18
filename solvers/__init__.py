"""Planning, scheduling, judging and proving, on plain frozen arrays.

May import: the standard library; of ours `schemas.program`, `.notation`, `.coverage`, `.errors` and `.amounts`.
Start reading at `model/problem.py` (a question), then `solve/` (how it is answered) and `judge/simulate.py`.
"""

import hashlib
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_COMPILES = (b"from penstock.solvers.compiled.", b"from numba import", b"import numba")
_IMPORTS = re.compile(rb"^from penstock\.([\w.]+) import", re.MULTILINE)


def _digest_of_kernels(package: Path) -> str:
    """Hash every file of ``package`` that holds a compiled function, and every file that such a file imports from.

    Numba notices a change of a function's own file, but not of the files whose code and constants it compiled in.
    """
    texts = {path: path.read_bytes() for path in package.rglob("*.py")}
    hashed = {path for path, text in texts.items() if any(sign in text for sign in _COMPILES)}
    for path in tuple(hashed):
        for module in _IMPORTS.findall(texts[path]):
            hashed.add(package.parent.joinpath(*module.decode().split(".")).with_suffix(".py"))
    digest = hashlib.sha256()
    for path in sorted(hashed):
        digest.update(texts[path] if path in texts else path.read_bytes())
    return digest.hexdigest()[:12]


def _keep_compiled_kernels() -> None:
    """Give numba a directory per version of ours that we may write, so that nobody waits for a compiler twice."""
    try:
        ours = version("penstock")
    except PackageNotFoundError:
        ours = "unknown"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/nonexistent"), ".cache"))
    digest = _digest_of_kernels(Path(__file__).parent)
    path = base / "penstock" / f"kernels-{ours}-{digest}-{sys.implementation.cache_tag}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(path, os.W_OK):
        os.environ["NUMBA_CACHE_DIR"] = str(path)


if "NUMBA_CACHE_DIR" not in os.environ:
    _keep_compiled_kernels()
