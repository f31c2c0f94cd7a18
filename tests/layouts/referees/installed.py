"""The trainers' own code, as ``scripts/trainers`` installs it: a folder for each release, without its dependencies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

sys.path.append(str(ROOT / "scripts"))
from trainers import INSTALLED, RELEASES

HERE = Path(__file__).parent
__all__ = ["INSTALLED", "RELEASES", "folder_of", "under"]


def folder_of(release: str, tier: str) -> Path:
    """Return the folder of a release; without it skip the test, or fail it in the full tier."""
    folder = INSTALLED / release
    if not folder.is_dir():
        say = pytest.fail if tier == "everything" else pytest.skip
        say(f"{release} is not installed: scripts/trainers")
    return folder


def under(release: str, referee: str, question: dict[str, Any], tier: str) -> Any:
    """Return the last line of a referee's process that has the release on its path."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "processes" / referee)],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder_of(release, tier))},
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().rpartition("\n")[2])
