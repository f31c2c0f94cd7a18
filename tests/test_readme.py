"""The README's code runs; links of README and guides lead somewhere, and files that they name exist.

Their commands and other snippets: ``tests/docs``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/tutorials").glob("*.md"))]
NAMED = [path.name for path in GUIDES]


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = _blocks(ROOT / "README.md", "python")
    assert 8 <= len(code.splitlines()) <= 12
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "per global batch" in out
    assert "forward" in out, "the timeline's legend"
    assert (tmp_path / "plan.json").is_file()


def test_the_first_screen_has_what_a_stranger_needs() -> None:
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    for words in ("scripts/demo", "scripts/test", "import penstock", "docs/timeline.svg"):
        assert words in first


@pytest.mark.parametrize("path", GUIDES, ids=NAMED)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", GUIDES, ids=NAMED)
def test_files_named_in_code_marks_exist(path: Path) -> None:
    """`schemas/errors.py`, `scripts/demo`: whatever looks like a path of this repository."""
    folders = "schemas|solvers|executor|service|penstock|scripts|tests|examples|cli"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", path.read_text(encoding="utf-8")):
        place = ROOT / "penstock" / name if name.startswith("cli/") else ROOT / name
        if "yours" not in name:
            assert place.exists(), name
