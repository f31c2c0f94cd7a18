"""Penstock plans distributed training: stages, devices, degrees and orders, with a proven bound.

The Python API is resolved lazily: importing the package, as every rank does, loads no solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import errors as errors
    from penstock.calibration.calibrate import calibrate as calibrate
    from penstock.calibration.throughput import calibrate_throughput as calibrate_throughput
    from penstock.exporting.layouts import layout_text as layout_text
    from penstock.importers.topology import import_topology as import_topology
    from penstock.layouts.even import EvenLayout as EvenLayout
    from penstock.layouts.even import even_layout as even_layout
    from penstock.placing import place as place
    from penstock.planning.explain import explain as explain
    from penstock.planning.fits import fits as fits
    from penstock.planning.judge import judge as judge
    from penstock.planning.programs.lower import ladder as ladder
    from penstock.planning.programs.lower import programs as programs
    from penstock.questions.answer import Answer as Answer
    from penstock.questions.answer import plan as plan
    from penstock.questions.by_name import compare as compare
    from penstock.questions.by_name import import_layout as import_layout
    from penstock.questions.by_name import sweep as sweep
    from penstock.questions.solve import solve as solve
    from penstock.solvers.explanation.other_layout import Layout as Layout

_API = {
    **dict.fromkeys(("Answer", "plan"), "penstock.questions.answer"),
    **dict.fromkeys(("ladder", "programs"), "penstock.planning.programs.lower"),
    **dict.fromkeys(("compare", "import_layout", "sweep"), "penstock.questions.by_name"),
    "fits": "penstock.planning.fits",
    "judge": "penstock.planning.judge",
    "solve": "penstock.questions.solve",
    "calibrate": "penstock.calibration.calibrate",
    "calibrate_throughput": "penstock.calibration.throughput",
    "explain": "penstock.planning.explain",
    "place": "penstock.placing",
    "import_topology": "penstock.importers.topology",
    **dict.fromkeys(("EvenLayout", "even_layout"), "penstock.layouts.even"),
    "layout_text": "penstock.exporting.layouts",
    "Layout": "penstock.solvers.explanation.other_layout",
}
"""The module that defines each name of the Python API."""


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("penstock.errors")
    if name not in _API:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; it has {', '.join(_API)}")
    try:
        return getattr(import_module(_API[name]), name)
    except ModuleNotFoundError as error:
        from penstock.schemas.errors import MissingExtra

        if (error.name or "").startswith("penstock"):
            raise
        raise MissingExtra(
            f"penstock.{name} needs {error.name!r}, which is not installed",
            remedy="pip install 'penstock[solvers]'",
        ) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_API, "errors"])
