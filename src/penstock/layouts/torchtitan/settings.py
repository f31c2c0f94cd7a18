"""torchtitan's settings, as one table of tables, in every form that they are given in.

Read are TOML and JSON, flags (``--parallelism.pipeline_parallel_degree 4``) and the Python of newer versions
(``config.parallelism.pipeline_parallel_degree = 4``, of which nothing is run).

.. [1] torchtitan, ``config/job_config.py``, ``config/manager.py``.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from penstock.importers.lines import Faults
from penstock.layouts.texts import place
from penstock.schemas.errors import InvalidDocument

CHECKPOINT = "activation_checkpoint"
TABLES = ("parallelism", "training", CHECKPOINT, "experimental")
_FLAG = re.compile(
    rf"--({'|'.join(TABLES)})\.([a-z_]+)(?:(?:[ \t]*=[ \t]*|[ \t]+)(?!--)(\"[^\"\n]*\"|'[^'\n]*'|[^\s'\"]+))?"
)
_PYTHON = re.compile(r"(?m)^(?:def |from |import |class |\s*config\.\w)")
OLD_NAMES = {
    "batch_size": "local_batch_size",
    "pipeline_parallel_module_fqns_per_model_part": "module_fqns_per_model_part",
}


class Settings:
    """The tables. Methods that return a value note a fault for what is none, with its line where that can be seen.

    ``remarks``: values that are given more than once and differ.
    """

    def __init__(self, text: str, source: str) -> None:
        self.text, self.faults = text, Faults(source)
        self.remarks: list[str] = []
        self._tables: dict[str, dict[str, Any]] = {}
        for name, table in _parsed(text, source, self.remarks).items():
            if name not in TABLES:
                continue
            if not isinstance(table, dict):
                self.faults.add(self.line(name), f"{name} is no table")
                continue
            into = "parallelism" if name == "experimental" else name
            renamed = {OLD_NAMES.get(str(key), str(key)): value for key, value in table.items()}
            self._tables[into] = renamed | self._tables.get(into, {})
        self.faults.stop("[parallelism], [training] and [activation_checkpoint], as in torchtitan's configuration")

    @property
    def empty(self) -> bool:
        """Whether it says nothing of what is asked for."""
        return not any(self._tables.values())

    def get(self, table: str, name: str) -> Any:
        """Return the value; None where there is none."""
        return self._tables.get(table, {}).get(name)

    def line(self, name: str) -> int | None:
        """Where the name stands, if it does."""
        found = re.search(rf"(?<![\w.]){re.escape(name)}\b|\.{re.escape(name)}\b", self.text)
        return None if found is None else place(self.text, found.start())[0]

    def fault(self, name: str, detail: str) -> None:
        """At the line of a name."""
        self.faults.add(self.line(name), detail, code="layout")

    def number(self, table: str, name: str, least: int = 1) -> int | None:
        """None where it is absent or left to torchtitan (-1)."""
        value = self.get(table, name)
        if value is None or value == -1:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 10**9:
            self.fault(name, f"{table}.{name} is {value!r}, no number from {least} on")
            return None
        return value


def _parsed(text: str, source: str, remarks: list[str]) -> dict[str, Any]:
    try:
        if text.lstrip().startswith("{"):
            data = json.loads(text)
        elif _FLAG.search(text):
            data = _of_flags(text)
        elif _PYTHON.search(text):
            data = _of_python(text, remarks)
        else:
            data = tomllib.loads(text)
    except SyntaxError as error:
        raise InvalidDocument(
            f"{source} is no Python, line {error.lineno}, column {error.offset}: {error.msg}"
        ) from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        raise InvalidDocument(f"{source} is neither TOML nor JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidDocument(f"{source} holds {type(data).__name__}, no tables")
    return data


def _of_flags(text: str) -> dict[str, Any]:
    data: dict[str, dict[str, Any]] = {}
    for table, name, value in _FLAG.findall(re.sub(r"(?m)(^|(?<=\s))#.*$", "", text)):
        data.setdefault(table, {})[name] = _plain(value.strip("'\""))
    return data


def _plain(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return word


def _of_python(text: str, remarks: list[str]) -> dict[str, Any]:
    """``….table.name = value`` and ``ParallelismConfig(name=value)``; where a value is none, the text of it.

    Of several values of one name the last one counts; ``remarks`` says where.
    """
    found: dict[tuple[str, str], list[tuple[Any, int]]] = {}
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign | ast.Call)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        for table, name, value in _said(node):
            found.setdefault((table, name), []).append((value, node.lineno))
    data: dict[str, dict[str, Any]] = {}
    for (table, name), values in found.items():
        data.setdefault(table, {})[name] = values[-1][0]
        if any(value != values[-1][0] for value, _line in values):
            times, line = len(values), values[-1][1]
            remarks.append(f"{table}.{name} is given {times} times; the last one counts, line {line}")
    return data


def _said(node: ast.Assign | ast.Call) -> Iterator[tuple[str, str, Any]]:
    """Table, name and value of what an assignment or a call says."""
    if isinstance(node, ast.Assign):
        if isinstance(target := node.targets[0], ast.Attribute):
            table = target.value.attr if isinstance(target.value, ast.Attribute) else ""
            if table in TABLES:
                yield table, target.attr, _plain(ast.unparse(node.value))
            elif target.attr == CHECKPOINT:
                yield CHECKPOINT, "mode", _mode(node.value)
    elif isinstance(node.func, ast.Name | ast.Attribute):
        called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        table = {"ParallelismConfig": "parallelism", "TrainingConfig": "training"}.get(called, "")
        for each in node.keywords:
            if table and each.arg:
                yield table, each.arg, _plain(ast.unparse(each.value))
            elif each.arg == CHECKPOINT:
                yield CHECKPOINT, "mode", _mode(each.value)


def _mode(value: ast.expr) -> str:
    """Of 0.3's ``FullAC.Config()``, ``SelectiveAC.Config()`` or None; of anything else its text."""
    text = ast.unparse(value)
    known = {"FullAC": "full", "SelectiveAC": "selective", "None": "none"}
    return next((mode for name, mode in known.items() if text.startswith(name)), text)
