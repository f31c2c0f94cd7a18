"""What the README and the guides say is true: their code runs, their commands, options, links and files exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from penstock.cli.main import app
from penstock.examples import catalogue
from penstock.schemas.profile import ModelProfile

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/tutorials").glob("*.md"))]
NAMED = [path.name for path in GUIDES]


def _blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``penstock …`` line of a shell block, without what a shell adds."""
    for path in GUIDES:
        for block in _blocks(path, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("penstock "):
                    yield path.name, shlex.split(line.partition("#")[0])[1:]


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


def test_the_job_of_the_guide_trains(tmp_path: Path) -> None:
    """The job in docs/running.md is profiled as it stands."""
    from penstock.cli.main import main

    (code,) = _blocks(ROOT / "docs" / "running.md", "python")
    (tmp_path / "guidetrain.py").write_text(code)
    out = tmp_path / "p.json"
    options = ["--model", "guidetrain:job", "--directory", str(tmp_path), "--analytic", "V100"]
    assert main(["profile", *options, "-o", str(out)]) == 0
    assert len(ModelProfile.read(out).layers) == 8


@pytest.mark.parametrize(
    ("guide", "words"), list(_commands()), ids=lambda value: value if isinstance(value, str) else None
)
def test_commands_exist_with_their_options(guide: str, words: list[str]) -> None:
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"{guide}: penstock {words[0]}"
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    used = {word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)}
    assert used <= known, f"{guide}: penstock {command.name}"


def test_shipped_names_exist() -> None:
    for guide, words in _commands():
        for option, find in (("--model", catalogue.profile), ("--cluster", catalogue.cluster)):
            if option in words and words[0] in ("plan", "compare"):
                assert find(words[words.index(option) + 1]), guide


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
