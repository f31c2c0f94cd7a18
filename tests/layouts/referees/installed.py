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
    """Where a release is; without it a test is skipped, but in the full tier it fails."""
    folder = INSTALLED / release
    if not folder.is_dir():
        say = pytest.fail if tier == "everything" else pytest.skip
        say(f"{release} is not installed: scripts/trainers")
    return folder


def under(release: str, referee: str, question: dict[str, Any], tier: str) -> Any:
    """What a referee's process, with the release on its path, answers in its last line."""
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
