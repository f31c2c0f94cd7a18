"""The place of compiled kernels on disk, and a check whether all are there. Numba is not imported for that.

``PENSTOCK_KERNELS`` of the environment names the place. By default there is one per version of ours in the user's
cache; all installations of that version share it. Settings for other functions (``NUMBA_CACHE_DIR``, its locators) do
not move our kernels.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import penstock.solvers

_COMPILES = (b"from penstock.solvers.compiled.decorators ", b"from numba", b"import numba")
_IMPORTS = re.compile(rb"^from penstock\.([\w.]+) import", re.MULTILINE)
_DECLARES = re.compile(rb"^@(?:compiled|loop|threaded|plain)$", re.MULTILINE)
COMPLETE = "complete-"
"""Prefix of the file that marks every kernel as compiled for a processor."""


def place() -> Path:
    """Return the directory that kernels are read from, and kept in where it can be written."""
    if configured := os.environ.get("PENSTOCK_KERNELS"):
        return Path(configured)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/nonexistent"), ".cache"))
    return base / "penstock" / _version_of_kernels()


def folder(file: str) -> str | None:
    """Return the name of the directory, in ``place()``, for the kernels of a source file.

    It is the file's room within the package, wherever that is installed, if ``place()`` is of this version alone.
    None if it is not, or for a file outside the package: these need a name made from the file's whole path.
    """
    if os.environ.get("PENSTOCK_KERNELS"):
        return None
    rooms = Path(file).resolve().parent, Path(penstock.solvers.__path__[0]).resolve()
    return ".".join(rooms[0].relative_to(rooms[1]).parts) if rooms[0].is_relative_to(rooms[1]) else None


def kept() -> tuple[int, Path]:
    """Return the number of compiled kernels, and their directory."""
    directory = place()
    return sum(1 for _ in directory.rglob("*.nbi")), directory


def declared() -> int:
    """Return the number of kernels that the sources declare, which is their number once all are compiled."""
    package = Path(penstock.solvers.__path__[0])
    return sum(len(_DECLARES.findall(path.read_bytes())) for path in package.rglob("*.py"))


@contextmanager
def sole_compiler(wait: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of the kernels' directory, so that installations that share it do not compile the same twice.

    Parameters
    ----------
    wait
        Called once, before waiting, where another process holds the lock.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # nothing can be written there, so nothing is shared
            place().mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((place() / "compiling.lock").open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait()
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def all_kept() -> bool:
    """Return whether every kernel is compiled for this processor, so that nothing waits for the compiler."""
    return (place() / _complete()).exists()


def note_all_kept() -> None:
    """Note that every kernel is compiled for this processor, unless they could not be kept."""
    with suppress(OSError):
        place().mkdir(parents=True, exist_ok=True)
        (place() / _complete()).touch()


@cache
def _complete() -> str:
    """Return the digest of numba's target: its settings, or else this processor and its features.

    If installations do not share their kernels (``folder``), the digest is of this one alone.
    """
    from llvmlite import binding  # type: ignore[import-untyped]

    configured = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    target = configured if any(configured) else (binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten())
    installed = penstock.solvers.__path__[0] if os.environ.get("PENSTOCK_KERNELS") else ""
    words = "/".join((*(each or "" for each in target), _version_of_kernels(), installed))
    return COMPLETE + hashlib.sha256(words.encode()).hexdigest()[:12]


@cache
def _version_of_kernels() -> str:
    try:
        ours = version("penstock")
    except PackageNotFoundError:
        ours = "unknown"
    return f"kernels-{ours}-{_digest_of_kernels(Path(penstock.solvers.__path__[0]))}-{sys.implementation.cache_tag}"


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
