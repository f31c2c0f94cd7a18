"""``PENSTOCK_SERVER`` is what ``--server`` is where it is not given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_cli_reference import COMMANDS

from penstock.cli.main import main
from penstock.cli.service.remote import VARIABLE
from penstock.service.configuration import NOT_OURS, PREFIX

pytestmark = pytest.mark.tier("quick")

AWAY = "http://127.0.0.1:1"


def test_every_server_option_reads_the_variable() -> None:
    options: list[Any] = [one for command in COMMANDS.values() for one in command.params if "--server" in one.opts]
    assert len(options) >= 20
    for one in options:
        assert VARIABLE in ([one.envvar] if isinstance(one.envvar, str) else one.envvar)


def test_the_service_leaves_the_variable_alone() -> None:
    assert VARIABLE.removeprefix(PREFIX) in NOT_OURS


@pytest.mark.tier("ci")
def test_it_is_asked_unless_an_option_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--example", "gpt2-small", "--cluster", "1x1xV100", "-b", "8", "--micro-batch-size", "8"]
    planned = ["plan", *options, "--planner", "dp"]
    monkeypatch.setenv(VARIABLE, AWAY)
    assert main(planned) == 1
    assert AWAY in capsys.readouterr().err
    assert main([*planned, "--workers", "2"]) == 64
    assert "works only on this machine" in capsys.readouterr().err
    assert main(["jobs", "list"]) == 1
    assert AWAY in capsys.readouterr().err
    assert main([*planned, "--server", "", "-o", "plan.json"]) == 0
    monkeypatch.setenv(VARIABLE, "")
    assert main(["verify", "plan.json"]) == 0
