"""The versions of torch for ranks, and the undocumented parts of torch that ranks need.

All other parts of torch that ranks use are documented, and exist from ``OLDEST`` on.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.torch_version import TorchVersion

from penstock.schemas.errors import UnsupportedRequest

OLDEST = "2.9"
TRIED = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1")
"""Versions with which ranks were tested (docs/running.md lists the tests); others of the same 2.x count as tried."""

NEEDED = (
    "_C._autograd._top_saved_tensors_default_hooks",
    "autograd.graph._engine_run_backward",
    "_foreach_copy_",
    "_foreach_norm",
    "nn.Module._call_impl",
)
"""Undocumented parts of torch that ranks need, by their names within ``torch``."""


CALL = "_compiled_call_impl"
"""The attribute of a module that, where it is set, is called instead of ``_call_impl``: forward with its hooks."""


def refuse_unfit_torch(version: str = torch.__version__, needed: Sequence[str] = NEEDED) -> None:
    """Raise UnsupportedRequest where ranks cannot run under this torch."""
    remedy = f"install torch {', '.join(TRIED[:-1])} or {TRIED[-1]}, which were tried"
    if TorchVersion(version) < OLDEST:
        raise UnsupportedRequest(f"torch {version} is too old: ranks need {OLDEST} or newer", remedy=remedy)
    missing = [name for name in needed if _undocumented(name) is None]
    if missing:
        raise UnsupportedRequest(f"torch {version} lacks torch.{missing[0]}, which ranks need", remedy=remedy)


def untried(version: str = torch.__version__) -> str | None:
    """Return a warning for a torch with which ranks were not tested; None for a tested one."""
    if _minor(version) in map(_minor, TRIED):
        return None
    return f"Penstock was not tried with torch {version}, but with {', '.join(TRIED)}: compare a run by --check"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _undocumented(name: str) -> Any:
    try:
        return attrgetter(name)(torch)
    except AttributeError:
        return None


top_saved_tensors_hooks = _undocumented(NEEDED[0])
"""A function that returns autograd's present hooks for saved tensors; its argument ignores that they are disabled."""

run_engine = _undocumented(NEEDED[1])
"""``torch.autograd.backward`` without its Python code, which takes longer than a small unit's gradient."""
