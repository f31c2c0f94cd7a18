"""The command line as a whole: docs/cli.md has every command, exit codes are as it says, names are completed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from test_commands import _profile, _topology
from typer.main import get_command

from penstock.cli.main import app, main
from penstock.cli.plan import planning

PAGE = ROOT / "docs" / "cli.md"
ROW = re.compile(r"^\| `(penstock [a-z ]+)` \| ([^|]+) \| `(penstock [^`|]+)` \|$", re.MULTILINE)
FROM_DOCUMENTS = (
    *("report", "rank", "profile", "probe", "import", "export", "schema", "serve", "worker", "agent", "delete"),
    "ask",
)
"""Commands whose answer is a document, or that stay, or that have nothing to say."""


def commands(group: Any, path: tuple[str, ...] = ("penstock",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that is no group, with its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def first_sentence(command: Any) -> str:
    """Return the first sentence of ``--help``, without its full stop."""
    text: str = " ".join(command.help.partition("\n\n")[0].split())
    return text.removesuffix(".")


COMMANDS = dict(commands(get_command(app)))


@pytest.mark.tier("quick")
def test_the_page_has_every_command_with_an_example_that_it_takes() -> None:
    rows = {tuple(name.split()): (line, example) for name, line, example in ROW.findall(PAGE.read_text("utf-8"))}
    assert rows.keys() == COMMANDS.keys()
    for name, (line, example) in rows.items():
        assert line == first_sentence(COMMANDS[name]), "the page says what --help says"
        words = shlex.split(example)
        assert tuple(words[: len(name)]) == name
        options = {
            option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words[len(name) :] if word.startswith("-")} <= options, example
        required = [one for one in COMMANDS[name].params if one.required and one.param_type_name == "option"]
        assert all(set(one.opts) & set(words) for one in required), example


@pytest.mark.tier("quick")
def test_every_answer_can_be_had_as_json() -> None:
    for name, command in COMMANDS.items():
        if not set(name) & set(FROM_DOCUMENTS):
            assert any("--json" in parameter.opts for parameter in command.params), name


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("codes")
    (place / "p.json").write_text(json.dumps(_profile()))
    for name, topology in (("one", _topology(devices=1)), ("two", _topology()), ("small", _topology("2000 B"))):
        (place / f"{name}.yaml").write_text(topology)
    (place / "torn.json").write_text("{")
    return place


def asking(topology: str, *more: str) -> tuple[str, ...]:
    return "plan", "-p", "p.json", "-t", f"{topology}.yaml", "-b", "8", *more


GOOD, OTHER = asking("one", "--planner", "dp"), asking("two", "--planner", "model-parallel")
CODES = [
    pytest.param(GOOD, 0, id="optimal"),
    pytest.param((*GOOD, "--require-optimal"), 0, id="optimal-and-required"),
    pytest.param(OTHER, 0, id="feasible"),
    pytest.param((*OTHER, "--require-optimal"), 2, id="feasible-and-optimal-required"),
    pytest.param(asking("small", "--planner", "dp"), 3, id="infeasible"),
    pytest.param(asking("small", "--planner", "dp", "--require-optimal"), 3, id="infeasible-and-optimal-required"),
    pytest.param(asking("two", "--planner", "dapple", "--time-limit", "0"), 4, id="limit"),
    pytest.param(("compare", *GOOD[1:]), 0, id="compare"),
    pytest.param(("verify", "plan.json"), 0, id="good-plan"),
    pytest.param(("verify", "bad.json"), 1, id="faulty-plan"),
    pytest.param(("verify", "bad.json", "--json"), 1, id="faulty-plan-json"),
    pytest.param(("verify", "torn.json"), 65, id="torn-document"),
    pytest.param(("verify", "nowhere.json"), 65, id="no-document"),
    pytest.param(("verify", "plan.json", "--server", "http://127.0.0.1:1"), 1, id="no-service"),
    pytest.param((*GOOD, "-o", "/dev/null/plan.json"), 1, id="not-writable"),
    pytest.param(("plan", "--such"), 64, id="no-such-option"),
    pytest.param(("plna",), 64, id="no-such-command"),
    pytest.param((), 64, id="nothing"),
    pytest.param(("calibrate", "p.json", "torn.json", "--json"), 64, id="two-answers-on-one-output"),
    pytest.param(("--version",), 0, id="version"),
]


@pytest.mark.parametrize(("words", "code"), CODES)
def test_exit_codes(
    words: tuple[str, ...], code: int, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    if words[:1] == ("verify",) and not (files / "plan.json").exists():
        assert main([*GOOD, "-o", "plan.json"]) == 0
        document = json.loads((files / "plan.json").read_text())
        document["plan"]["prediction"]["time_per_global_batch_ns"] += 10**6
        (files / "bad.json").write_text(json.dumps(document))
    assert main(list(words)) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("met", "code"), [(RuntimeError("ours"), 70), (KeyboardInterrupt(), 130)])
def test_what_nobody_expects(met: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(options: object, **_more: object) -> None:
        raise met

    monkeypatch.setattr(planning, "request_of", fails)
    assert main(list(GOOD)) == code


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("penstock plan --example gpt2-", {"gpt2-small", "gpt2-xl"}),
        ("penstock compare --planner pipe", {"pipedream", "pipedream-2bw"}),
        ("penstock plan --schedule gp", {"gpipe"}),
        ("penstock plan --cluster 1x8xH", {"1x8xH100"}),
        ("penstock jobs wa", {"watch"}),
    ],
)
def test_names_are_completed_in_bash(words: str, wanted: set[str]) -> None:
    variables = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [sys.executable, "-P", "-m", "penstock.cli.main"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert wanted <= set(done.stdout.split()), done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_is_code_that_the_shell_takes(shell: str) -> None:
    variables = {"_PENSTOCK_COMPLETE": f"source_{shell}"}
    command = [sys.executable, "-P", "-m", "penstock.cli.main"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert "_PENSTOCK_COMPLETE" in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
