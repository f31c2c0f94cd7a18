"""A page's directory: its lines, snippets and data are done there, one after the other, as they stand."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Container, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from given import NAMES
from pages import Piece
from shown import CODES, ELSEWHERE, HERE, HOSTS, NOT_RUN, PYTHON_ELSEWHERE, PYTHON_SMALLER, SMALLER, STAY

from penstock.cli.convert.exporting import DEFAULT
from penstock.cli.main import app, main
from penstock.executor.node.settings import AgentSettings
from penstock.schemas.topology import ClusterTopology
from penstock.service.settings import Settings

UNFINISHED = re.compile(r"…|(?<![\w-])[A-Z]{3,}(?![\w-])")
"""Placeholders that a reader has to replace."""

Find = Callable[[str], Any]
"""Function that returns a fixture by its name; servers start when a page first needs them."""


class Sandbox:
    """The runner of one page's pieces; ``output`` returns what was printed since its last call.

    Rows of tables that are among ``in_full``, the lines of all blocks, are run where those are.
    """

    def __init__(
        self,
        directory: Path,
        base: Path,
        in_full: Container[str],
        find: Find,
        output: Callable[[], str],
        patch: pytest.MonkeyPatch,
    ) -> None:
        self._in_full = in_full
        self._directory, self._base, self._find, self._new_output, self._patch = directory, base, find, output, patch
        self._printed, self._names = "", dict[str, Any]()
        patch.chdir(directory)

    def take(self, piece: Piece) -> None:
        """Do what the piece says, or compare what it shows."""
        {"shell": self._line, "python": self._python, "data": self._data, "output": self._output}[piece.kind](piece)

    def _line(self, piece: Piece) -> None:
        words = piece.words
        if words[0] == "export":
            for setting in words[1:]:
                name, _, value = self._here(setting).partition("=")
                self._patch.setenv(name, value)
        elif words[0] == "cd":
            self._patch.chdir(self._directory / words[1])
        elif words[0] != "penstock":
            assert words[0] in ELSEWHERE, f"{piece.place}: {words[0]} is neither run nor listed"
        elif piece.bare in NOT_RUN or (piece.alone and piece.bare in self._in_full):
            if "…" not in words:
                parse(words[1:])
        elif piece.text.startswith(STAY) and "--show-settings" not in words:
            parameters = parse(shlex.split(self._here(piece.text), comments=True)[1:])
            if words[1] == "serve" and parameters["settings"] is None:
                options = {name: parameters[name] for name in ("host", "port", "database", "slots")}
                Settings.load(**{name: one for name, one in options.items() if one is not None}).refuse_unprotected()
        else:
            self._run(piece)

    def _run(self, piece: Piece) -> None:
        """Run a command of ours; a row of a table stands for itself, so its files are new."""
        if piece.alone:
            shutil.copytree(self._base, self._directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sqlite"))
        text = self._here(smaller(piece.text))
        words = shlex.split(text, comments=True)[1:]
        assert not any(UNFINISHED.search(word) for word in words), f"{piece.place}: what stands for {text!r} here?"
        into = None
        if words[-2:-1] == [">"]:
            *words, _, into = words
        code, printed = self._main(words, into)
        self._printed += printed
        wanted = CODES.get(shlex.join(piece.words), (0,))
        assert code in wanted, f"{piece.place}: penstock {shlex.join(words)} ended with {code}\n{printed}"

    def _main(self, words: list[str], into: str | None) -> tuple[int, str]:
        """Run a command; its standard output goes to the file ``into`` where the line has one. Return what is seen."""
        if into is None:
            return main(words), self._new_output()
        with open(into, "w") as file, redirect_stdout(file):
            code = main(words)
        return code, self._new_output()

    def _here(self, text: str) -> str:
        """Return the words of a line in the form that runs here."""
        for host in HOSTS:
            if host in text:
                text = text.replace(host, self._find("planner"))
        for shown, here in HERE.items():
            if shown in text:
                text = text.replace(shown, here(self._find, text) if callable(here) else here)
        return text

    def _output(self, piece: Piece) -> None:
        printed, self._printed = re.sub(r"\s+", " ", self._printed), ""
        for line in piece.text.splitlines():
            for part in re.sub(r"\s+", " ", line).split("…"):
                assert part.strip() in printed, f"{piece.place}: {part.strip()!r} was not printed in\n{printed}"

    def _data(self, piece: Piece) -> None:
        """Check that data can be read; write a file that the page names, and read a topology."""
        if piece.file:
            Path(piece.file).parent.mkdir(parents=True, exist_ok=True)
            Path(piece.file).write_text(piece.text)
        read: Mapping[str, Callable[[str], Any]] = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
        if piece.language in read:
            document = read[piece.language](piece.text)
            if "uniform" in document:
                ClusterTopology.read(self._written(piece, "shown.yaml"))
            if "models" in document:
                AgentSettings.load(self._written(piece, "shown.toml"), environ={})

    def _written(self, piece: Piece, name: str) -> Path:
        path = Path(name)
        path.write_text(self._here(piece.text))
        return path

    def _python(self, piece: Piece) -> None:
        """Run a block with the names that its page takes for granted; ``await`` may stand at its top."""
        if piece.file:
            Path(piece.file).write_text(piece.text)
        if any(words in piece.text for words in PYTHON_ELSEWHERE):
            return
        text = self._here(piece.text)
        for shown, less in PYTHON_SMALLER.items():
            text = text.replace(shown, less.replace("{}", shown))
        if not self._names:
            self._names |= {"__name__": "snippet"} | (NAMES[piece.page](self._find) if piece.page in NAMES else {})
        code = compile(text, piece.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, self._names))
        else:
            exec(code, self._names)
        self._printed += self._new_output()


def smaller(text: str) -> str:
    """Return the line with less to do."""
    for words, less in SMALLER.items():
        if words in text:
            text = text.replace(words, less.format(words))
    return text


def parse(words: list[str]) -> dict[str, Any]:
    """Read a command's options as it would, without doing anything; ``export PLAN`` leaves its command out."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0) if words[0] in command.commands else DEFAULT]
    return dict(command.make_context(command.name, words).params)
