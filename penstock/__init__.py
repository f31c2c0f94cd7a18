"""Penstock plans pipeline-parallel training: stages, devices and orders, with a proven bound.

The Python API is resolved lazily: importing the package, as every rank does, loads no solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api import Answer as Answer
    from penstock.api import compare as compare
    from penstock.api import judge as judge
    from penstock.api import plan as plan
    from penstock.api import programs as programs
    from penstock.api import solve as solve

_API = ("Answer", "compare", "judge", "plan", "programs", "solve")


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; it has {', '.join(_API)}")
    try:
        from penstock import api
    except ModuleNotFoundError as error:
        from penstock.schemas.errors import MissingExtra

        if (error.name or "").startswith("penstock"):
            raise
        raise MissingExtra(
            f"penstock.{name} needs {error.name!r}, which is not installed",
            remedy="pip install 'penstock[solvers]'",
        ) from None
    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
