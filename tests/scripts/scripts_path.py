"""Where the scripts lie, and how a process finds them."""

from __future__ import annotations

import os

from repository import ROOT

SCRIPTS = ROOT / "scripts"


def environment() -> dict[str, str]:
    """Of a process that imports them."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))}
