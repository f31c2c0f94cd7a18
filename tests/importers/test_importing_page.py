"""docs/importing-topologies.md: its commands run on the shipped samples, and its table is hardware.yaml."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import get_args

import pytest

from penstock.cli.main import main
from penstock.importers.cluster.hardware_page import renewed
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.topology_import import Format, ImportOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "importing-topologies.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^penstock import .*$", PAGE, re.MULTILINE)


def test_the_table_is_that_of_the_data() -> None:
    assert renewed(PAGE) == PAGE, "python -m penstock.importers.cluster.hardware_page docs/importing-topologies.md"


def test_formats_and_options_are_all_there() -> None:
    assert re.findall(r"^\| `([a-z0-9][a-z0-9-]+)` \|", PAGE, re.MULTILINE) == list(get_args(Format))
    for field in ImportOptions.model_fields:
        assert f"`{field}`" in PAGE or f"--{field}" in PAGE, field


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_do_what_they_say(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples" / "clusters", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert main(words[1:]) == 0
    assert ClusterTopology.read(words[words.index("-o") + 1]).nodes


def test_the_python_of_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT / "examples" / "clusters")
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(code, {})
    assert "gpu[01-02,04,06]" in capsys.readouterr().out
