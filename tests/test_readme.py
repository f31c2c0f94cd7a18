"""README's code and every command of its table run; links of README and guides lead somewhere, files they name exist.

Other commands and snippets: ``tests/docs``.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from pathlib import Path

import pytest
from repository import ROOT

from penstock.cli.main import main

GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/tutorials").glob("*.md"))]
NAMED = [path.name for path in GUIDES]
NOT_RUN = {
    "scripts/gpu-check": ("needs a GPU", "tests/scripts/test_gpu_check.py"),
    "penstock serve": ("runs until it is stopped", "tests/docs/test_every_command.py"),
    "penstock worker": ("runs until it is stopped", "tests/docs/test_every_command.py"),
    "penstock agent --server http://127.0.0.1:8642 --job mytrain=examples.mytrain:job --cpu-devices 2": (
        "needs a service, and runs until it is stopped",
        "tests/docs/test_every_command.py",
    ),
    "scripts/images": ("needs root, debootstrap and a network", "tests/docker/test_deployments.py"),
    "kubectl apply -k docker/kubernetes": ("needs a cluster", "tests/docker/test_deployments.py"),
}
"""Commands of the table that are not run here: why, and the test that covers them."""


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.tier("ci")
def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = _blocks(ROOT / "README.md", "python")
    assert 8 <= len(code.splitlines()) <= 12
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "per global batch" in out
    assert "forward" in out, "the timeline's legend"
    assert (tmp_path / "plan.json").is_file()


def _table() -> list[str]:
    """Return the commands of README's table, in order."""
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|[^|]*\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [command for cell in rows for command in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.tier("everything")
@pytest.mark.timeout(600)
def test_the_commands_of_the_table_run_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, in a directory that has the examples of a clone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PENSTOCK_DATABASE", str(tmp_path / "penstock.sqlite"))
    monkeypatch.setattr("penstock.calibration.trust.LARGEST_FACTOR", math.inf)  # a busy machine's times are no fault
    run = [command for command in _table() if command not in NOT_RUN]
    assert len(run) >= 13
    for command in run:
        program, *words = shlex.split(command)
        assert program == "penstock", command
        assert main(words) == 0, command
    for file in ("profile.json", "plan.json", "plan.html", "cluster.json", "job/job.sbatch", "saved", "better.json"):
        assert (tmp_path / "out" / file).exists(), file
    assert {path.name for path in tmp_path.iterdir()} - {"examples", "penstock.sqlite"} == {"out"}


def test_commands_that_are_not_run_are_of_the_table_and_covered_elsewhere() -> None:
    assert NOT_RUN.keys() <= set(_table())
    for _, test in NOT_RUN.values():
        assert (ROOT / test).is_file(), test
    for command in NOT_RUN:
        if command.startswith("scripts/"):
            assert (ROOT / command).is_file(), command


def test_the_first_screen_has_what_a_stranger_needs() -> None:
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    for words in ("scripts/demo", "scripts/test", "import penstock", "docs/timeline.svg"):
        assert words in first


def test_the_gain_on_a_script_is_the_tutorials() -> None:
    """The tutorial's output is compared with what its command prints (tests/docs)."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    today, best, ratio, bound = re.findall(r"([\d.]+)(?: s|×)", readme.partition("GPT-2 small on four V100")[2])[:4]
    (printed,) = [
        block for block in _blocks(ROOT / "docs/tutorials/megatron-user.md", "text") if "best within" in block
    ]
    assert printed.startswith(f"{today} s per global batch")
    assert f"megatron can express: {best} s" in printed
    assert f"none takes less than {bound} s" in printed
    assert ratio == f"{float(today) / float(best):.2f}"


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
        place = ROOT / "src" / "penstock" / name if name.startswith("cli/") else ROOT / name
        if "yours" not in name:
            assert place.exists(), name


def test_the_overview_of_the_service_shows_the_same_picture() -> None:
    shown = ROOT / "service" / "pages" / "static" / "example.svg"
    assert shown.read_text(encoding="utf-8") == (ROOT / "docs" / "timeline.svg").read_text(encoding="utf-8")
