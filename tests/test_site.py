"""The documentation as a site: every page is reached, every link and anchor leads somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs/decisions"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= {path.parent.name for path in (tmp_path / "site").glob("*/index.html")}


def test_every_decision_is_listed() -> None:
    listed = (DECISIONS / "index.md").read_text()
    for path in DECISIONS.glob("0*.md"):
        title = path.read_text().splitlines()[0].removeprefix("# ")
        assert f"- [{title}]({path.name})" in listed
