"""Old forms of the command line: each is called once, says what replaces it, and does what it did."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version
from test_cli_reference import COMMANDS
from typer.testing import CliRunner

from penstock.cli import compat
from penstock.cli.compat import OLD_OPTIONS, Old, current
from penstock.cli.main import app, main

pytestmark = pytest.mark.tier("quick")

FLAGS = ("--exit-zero", "--memory", "--allow-any-model")


def words_of(old: Old) -> list[str]:
    return [*old.command.split(), *(["plan.json"] if old.command == "export" else [])]


@pytest.mark.parametrize("old", OLD_OPTIONS, ids=lambda old: f"{old.command} {old.option}")
def test_an_old_option_is_replaced_with_a_note(old: Old, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(old)
    assert current([*words, old.option, "-h"]) == [*words, *([old.now] if old.now else []), "-h"]
    assert old.note in capsys.readouterr().err
    assert current([*words, f"{old.option}=x"]) == [*words, *([f"{old.now}=x"] if old.now else [])]


@pytest.mark.cases(8)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("old", OLD_OPTIONS, ids=lambda old: f"{old.command} {old.option}")
def test_the_command_runs_with_it(old: Old, capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` comes after all options are read, and ends with 64 for one that is not known."""
    value = [] if old.option in FLAGS else ["5" if "seconds" in old.option or "-s" in old.option else "x"]
    assert main([*words_of(old), old.option, *value, "--help"]) == 0
    assert old.note in capsys.readouterr().err


@pytest.mark.parametrize("old", OLD_OPTIONS, ids=lambda old: f"{old.command} {old.option}")
def test_the_command_takes_what_replaces_it_and_no_longer_has_it(old: Old) -> None:
    name = ("penstock", *(("export", "plan") if old.command == "export" else old.command.split()))
    taken = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert old.now is None or old.now in taken
    assert old.option not in taken


@pytest.mark.parametrize("old", OLD_OPTIONS, ids=lambda old: f"{old.command} {old.option}")
def test_the_version_that_drops_it_is_still_to_come(old: Old) -> None:
    assert Version(version("penstock")) < Version(old.goes_in)


def test_words_that_are_no_options_stay() -> None:
    assert current(["run", "plan.json", "--", "--model"]) == ["run", "plan.json", "--", "--model"]
    assert current(["compare", "--exit-zero"]) == ["compare", "--exit-zero"]
    assert current([]) == []


@pytest.mark.tier("ci")
def test_exit_zero_is_what_plan_does_anyway(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", "gpt2-small", "--cluster", "1x1xV100", "-b", "8", "--micro-batch-size", "8"]
    assert main(["plan", *asked, "--planner", "dp", "--exit-zero"]) == 0
    err = capsys.readouterr().err
    assert "--exit-zero of `penstock plan` is the default now" in err
    assert "--model of `penstock plan` is called --example now" in err
    assert err.count(compat.OLD_OPTIONS[0].goes_in) == 2


def test_no_command_declares_an_old_option() -> None:
    assert CliRunner().invoke(app, ["run", "plan.json", "--model", "mytrain:job"]).exit_code != 0
