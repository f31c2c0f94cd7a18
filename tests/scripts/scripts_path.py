"""Directory of the scripts, and the environment of a process that imports them."""

from __future__ import annotations

import os

from repository import ROOT

SCRIPTS = ROOT / "scripts"


def environment() -> dict[str, str]:
    """Return the environment of a process that imports the scripts."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))}
