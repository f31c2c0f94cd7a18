"""``--help``: commands stand in panels, and each command and each option can be understood alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_cli_reference import COMMANDS, first_sentence

from penstock.cli import panels
from penstock.cli.main import app, main

pytestmark = pytest.mark.tier("quick")

PANELS = {
    panels.PLAN: {
        "ask",
        "list",
        "plan",
        "compare",
        "place",
        "sweep",
        "verify",
        "simulate",
        "explain",
        "report",
        "fits",
    },
    panels.MEASURE: {"profile", "probe", "calibrate", "tune"},
    panels.RUN: {"run", "rank", "agent"},
    panels.SERVICE: {"serve", "worker", "jobs", "runs", "keys", "db", "doctor"},
    panels.CONVERT: {"import", "export", "schema"},
}
LONGEST = 105
"""Characters of a command's first sentence."""
OPTIONS = [(" ".join(name), one) for name, command in COMMANDS.items() for one in command.params if one.name != "help"]
PRIVATE = re.compile(r"\b(beside|behind|so many|is told|speaks of|goes to|nobody|somebody)\b(?! steps)")


def test_every_command_is_in_the_panel_of_what_it_is_for() -> None:
    shown: dict[str, set[str]] = {}
    for one in (*app.registered_commands, *app.registered_groups):
        shown.setdefault(str(one.rich_help_panel), set()).add(str(one.name))
    assert shown == PANELS


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_a_command_says_in_the_imperative_what_it_does_with_an_example(name: tuple[str, ...]) -> None:
    command = COMMANDS[name]
    sentence = first_sentence(command)
    first = sentence.split()[0]
    assert first[0].isupper()
    assert not first.endswith("s"), "the imperative"
    assert len(sentence) <= LONGEST
    assert not PRIVATE.search(command.help), command.help
    example = " ".join(command.help.partition("Example:")[2].split())
    called = name[:-1] if name[1:] == ("export", "plan") else name
    assert " ".join(called) in example


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=[f"{name}-{one.name}" for name, one in OPTIONS])
def test_an_option_can_be_read_alone(command: str, option: Any) -> None:
    text = option.help or ""
    assert len(text.split()) >= 3, "a sentence of its own"
    assert text[0].isupper() or text[0] == "-", text
    assert text.endswith("."), text
    assert not PRIVATE.search(text), text
    if option.param_type_name == "option":
        assert option.rich_help_panel, "its group"
        if option.default is not None and not option.is_flag:
            default = getattr(option.default, "value", option.default)
            assert option.show_default or f"(default: {default})" in text, "the default is shown"


@pytest.mark.tier("ci")
def test_help_shows_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    for panel in ("Model and cluster", "Planner", "Training", "Search", "Output", "Service"):
        assert f"─ {panel} ─" in out
