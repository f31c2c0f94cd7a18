"""Rooms of the sources: few files each, a docstring that says where to start, short functions, no import circles."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import networkx
import pytest
import tiers
from repository import ROOT

FOLDERS = ("schemas", "solvers", "executor", "service", "src/penstock", "examples")
MOST_FILES = 15
MIRRORED = ("solvers", "executor", "service", "src/penstock/cli", "src/penstock/importers")
OF_TESTS = {"solvers": {"audit", "judge/page"}}
"""Rooms of tests about several rooms of the sources: claims of all planners, and a page that is a simulator."""
MOST_LINES = 60
MOST_LINES_OF_A_FILE = 500
LONG_FILES = {
    "schemas/program.py": "what a program is and how it is written, in one file without dependencies",
}
COMPILED = re.compile(r"kernels?\.py$|/clocks/|/compiled/")
LONG = {
    "src/penstock/cli": "the signature of a command has its options",
    "src/penstock/questions/answer.py": "the signature of penstock.plan has the fields of a request",
}


@cache
def _modules() -> dict[str, Path]:
    """Return our modules by the name that they are imported by."""
    paths = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "penstock" in folder and (ROOT / "src/penstock" / path.relative_to(ROOT / folder).parts[0]).is_symlink():
                continue
            parts = path.relative_to(ROOT / "src" if folder.startswith("src") else ROOT).with_suffix("").parts
            name = ".".join(parts if folder.startswith("src") else ("penstock", *parts))
            paths[name.removesuffix(".__init__")] = path
    return paths


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _parsed() -> None:
    for path in _modules().values():
        _tree(path)


def test_files_of_tests_have_names_of_their_own() -> None:
    """Without packages, pytest imports them by their names alone."""
    files = (path for path in (ROOT / "tests").rglob("*.py") if path.name not in {"__init__.py", "conftest.py"})
    names = Counter(path.name for path in files)
    assert not [name for name, count in names.items() if count > 1]


def _rooms() -> dict[str, list[Path]]:
    files = sorted(_modules().values(), key=lambda path: path.parent.as_posix())
    return {room.relative_to(ROOT).as_posix(): list(paths) for room, paths in groupby(files, lambda path: path.parent)}


def test_rooms_hold_few_files() -> None:
    files = [*_modules().values(), *(ROOT / "tests").rglob("*.py")]
    crowds = Counter(path.parent.relative_to(ROOT).as_posix() for path in files if path.name != "__init__.py")
    crowded = {room: number for room, number in crowds.items() if number > MOST_FILES}
    assert not crowded


@pytest.mark.parametrize("folder", MIRRORED)
def test_tests_have_the_rooms_of_what_they_test(folder: str) -> None:
    tests = ROOT / "tests" / folder.removeprefix("src/penstock/")
    rooms = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    assert len(rooms) > 1
    assert {room for room in rooms if not any((ROOT / folder / room).glob("*.py"))} == OF_TESTS.get(folder, set())


@pytest.mark.parametrize(
    "room", [room for room in _rooms() if not room.endswith(("/versions", "src/penstock", "schedulers/kubernetes"))]
)
def test_a_room_says_what_it_holds_and_where_to_start(room: str) -> None:
    text = ast.get_docstring(_tree(ROOT / room / "__init__.py")) or ""
    assert re.search(r"^May import: \S", text, re.MULTILINE), text
    start = re.search(r"^Start reading at (.*)", text, re.MULTILINE | re.DOTALL)
    assert start, text
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", start[1]):
        assert (ROOT / room / name).exists(), f"{room}/__init__.py names {name}"


@pytest.mark.parametrize("folder", tiers.FOLDERS)
def test_a_folder_that_has_a_tier_exists(folder: str) -> None:
    assert (ROOT / "tests" / folder).is_dir()


def test_only_tests_with_several_cases_have_a_number_of_cases() -> None:
    """The number is for the ci tier; later tiers run every case."""
    single = [
        f"{path.name}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.cases" in path.read_text(encoding="utf-8")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef)
        and (marks := [ast.unparse(each) for each in node.decorator_list])
        and any(each.startswith("pytest.mark.cases") for each in marks)
        and (
            any("tier('nightly')" in each or "tier('everything')" in each for each in marks)
            or not (any("parametrize" in each or "usefixtures" in each for each in marks) or node.args.args)
        )
    ]
    assert single == []


def _functions() -> Iterator[tuple[str, str, int]]:
    for path in _modules().values():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path.relative_to(ROOT).as_posix(), node.name, (node.end_lineno or 0) - node.lineno + 1


def test_functions_are_short() -> None:
    long = [
        f"{path}: {name} has {lines} lines"
        for path, name, lines in _functions()
        if lines > MOST_LINES and not COMPILED.search(path) and not path.startswith(tuple(LONG))
    ]
    assert long == []


def test_a_name_of_a_class_of_solvers_says_which_one_it_is() -> None:
    """At most two classes have one name."""
    names = Counter(
        node.name
        for path in _modules().values()
        if path.is_relative_to(ROOT / "solvers")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: number for name, number in names.items() if number > 2} == {}


def test_files_are_short() -> None:
    """Files of compiled kernels may be longer: functions that are compiled together are read together."""
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines()) for path in _modules().values()
    }
    long = {name for name, number in lines.items() if number > MOST_LINES_OF_A_FILE and not COMPILED.search(name)}
    assert long == LONG_FILES.keys()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count; those for the type checker alone do not."""
    graph = networkx.DiGraph()
    modules = _modules()
    for name, path in modules.items():
        for module, imported in _imports(_tree(path)):
            whole = f"{module}.{imported}"
            graph.add_edge(name, whole if whole in modules else module)
    assert [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1] == []


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that a module imports from one of ours when it runs."""
    for_types: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for_types |= {each for statement in node.body for each in ast.walk(statement)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in for_types and (node.module or "").startswith("penstock"):
            yield from ((node.module or "", alias.name) for alias in node.names)
