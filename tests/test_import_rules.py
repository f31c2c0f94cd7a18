"""Who may import whom (docs/architecture.md), seen in a fresh interpreter's ``sys.modules`` and in the source."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import pytest
from repository import ROOT

pytestmark = pytest.mark.tier("ci")

FOLDERS = ("schemas", "solvers", "executor", "service")
HEAVY = {"torch", "numpy", "numba", "networkx", "ortools", "fastapi", "uvicorn", "sqlalchemy", "jinja2", "httpx"}
STANDARD_LIBRARY_ONLY = (
    "penstock.schemas.amounts",
    "penstock.schemas.coverage",
    "penstock.schemas.program",
    "penstock.schemas.notation",
    "penstock.schemas.errors",
    "penstock.schemas.machine",
    "penstock.schemas.machine.processors",
)


RUN_NOT_IMPORTED = ("__main__", "migrations.env")
"""Files that are programs: Alembic runs its environment."""


def _modules(package: str) -> list[str]:
    """All modules of a package by name, from the folders that it really is."""
    start = (
        ROOT / package.rpartition(".")[2]
        if package.rpartition(".")[2] in FOLDERS
        else ROOT / "src" / "penstock" / "cli"
    )
    found = [package]
    found += [name for _, name, _ in pkgutil.walk_packages([str(start)], package + ".", onerror=lambda _: None)]
    return [name for name in found if not name.endswith(RUN_NOT_IMPORTED)]


def _loaded(names: list[str]) -> set[str]:
    """What a fresh interpreter has loaded after importing ``names``."""
    code = (
        "import importlib, json, sys\n"
        "before = set(sys.modules)\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def _roots(loaded: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in loaded}


def _ours(loaded: set[str]) -> set[str]:
    """Sub-packages and modules of penstock, two names deep."""
    return {".".join(name.split(".")[:2]) for name in loaded if name.startswith("penstock.")}


def test_schemas_import_nothing_of_ours() -> None:
    loaded = _loaded(_modules("penstock.schemas"))
    assert _ours(loaded) == {"penstock.schemas"}
    assert not _roots(loaded) & HEAVY


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ONLY)
def test_words_and_errors_need_the_standard_library_only(name: str) -> None:
    assert _roots(_loaded([name])) <= set(sys.stdlib_module_names) | {"penstock"}


def test_solvers_see_programs_and_errors_only() -> None:
    loaded = _loaded(_modules("penstock.solvers"))
    assert _ours(loaded) == {"penstock.solvers", "penstock.schemas"}
    of_schemas = {name for name in loaded if name.startswith("penstock.schemas.")}
    assert of_schemas <= set(STANDARD_LIBRARY_ONLY)
    assert not _roots(loaded) & {"torch", "pydantic", "fastapi", "sqlalchemy", "httpx"}


def test_executor_sees_schemas_only() -> None:
    loaded = _loaded(_modules("penstock.executor"))
    assert _ours(loaded) == {"penstock.executor", "penstock.schemas"}
    assert not _roots(loaded) & {"numba", "networkx", "ortools", "fastapi", "sqlalchemy"}


def test_the_agent_loads_no_torch() -> None:
    assert "torch" not in _loaded(["penstock.executor.node.agent"])


def test_ranks_load_no_documents_but_their_program_and_options() -> None:
    """Those of plans, runs and agents take a tenth of a rank's start."""
    loaded = _loaded(["penstock.executor.run.rank"])
    assert {"penstock.schemas.program", "penstock.schemas.api.run_options"} <= loaded
    assert not loaded & {"penstock.schemas.plan", "penstock.schemas.profile", "penstock.schemas.api.agents"}


def test_the_service_loads_no_torch_and_no_executor() -> None:
    """Examples by name bring the table of devices, which is data."""
    loaded = _loaded(_modules("penstock.service"))
    assert "torch" not in loaded
    assert "penstock.cli" not in _ours(loaded)
    assert {name for name in loaded if name.startswith("penstock.executor.")} <= {
        "penstock.executor.profiling",
        "penstock.executor.profiling.device_table",
    }


def test_the_command_line_starts_with_nothing_heavy() -> None:
    loaded = _loaded(["penstock.cli.main"])
    assert not _roots(loaded) & (HEAVY | {"pydantic"})
    assert _ours(loaded) == {"penstock.cli", "penstock.schemas"}


def test_the_package_itself_loads_nothing() -> None:
    loaded = _loaded(["penstock"])
    assert _roots(loaded) - set(sys.stdlib_module_names) == {"penstock"}
    assert _ours(loaded) == set()


@pytest.mark.parametrize("name", [*FOLDERS, "examples", "tests", "benchmarks"])
def test_an_installation_has_one_name(name: str, tmp_path: Path) -> None:
    """A training project may own these names: an editable install puts ``src/`` on the path, not the repository."""
    command = [sys.executable, "-P", "-c", f"import penstock; import {name}"]
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=60, check=False)
    assert f"No module named '{name}'" in done.stderr


SOLVERS = ROOT / "solvers"
ROOMS: dict[str, set[str]] = {
    "compiled": set(),
    "model": set(),
    "costs": {"model", "compiled"},
    "degrees": {"model", "costs"},
    "verify": {"model", "costs"},
    "lowering": {"model", "compiled", "costs"},
    "judge": {"model", "compiled", "costs"},
    "schedules": {"model", "compiled", "costs", "judge"},
    "bounds": {"model", "compiled", "costs", "schedules"},
    "improve": {"model", "compiled", "costs", "degrees", "judge", "schedules", "bounds"},
    "grid": {"model", "compiled", "costs"},
    "planners": {"model", "compiled", "costs", "judge", "schedules", "bounds", "improve", "grid"},
    "explanation": {"model", "costs", "judge", "schedules", "bounds", "improve", "planners", "degrees"},
    "solve": {
        *("model", "compiled", "costs", "judge", "schedules", "bounds", "improve", "grid", "planners"),
        *("verify", "lowering", "explanation", "degrees"),
    },
    "placement": {"model", "costs", "degrees", "judge", "schedules", "bounds", "grid", "planners", "solve"},
}
"""What modules of each room may import besides those of their own room. Each ``__init__`` says the same."""


class Edge(NamedTuple):
    """An import, by module names within ``solvers``, and its line."""

    source: str
    target: str
    line: int

    @property
    def place(self) -> str:
        """``file:line imports module``."""
        return f"solvers/{self.source.replace('.', '/')}.py:{self.line} imports {self.target}"


def _sources(root: Path) -> dict[str, Path]:
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in sorted(root.rglob("*.py"))}
    return {name.removesuffix("__init__").rstrip("."): path for path, name in names.items()}


def _imports(tree: ast.Module, modules: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    prefix = "penstock.solvers"
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix(f"{prefix}.") in modules else node.module for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from ((name.removeprefix(f"{prefix}."), node.lineno) for name in names if name.startswith(f"{prefix}."))


def _edges(root: Path) -> list[Edge]:
    modules = _sources(root)
    found = []
    for source, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [Edge(source, target, line) for target, line in _imports(tree, modules) if target != source]
    return found


@pytest.fixture(scope="module")
def edges() -> list[Edge]:
    return _edges(SOLVERS)


def _room(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.tier("quick")
def test_every_folder_is_a_room() -> None:
    assert {path.name for path in SOLVERS.iterdir() if path.is_dir() and path.name != "__pycache__"} == set(ROOMS)


@pytest.mark.tier("quick")
def test_the_rooms_have_an_order() -> None:
    order = nx.DiGraph((room, other) for room, others in ROOMS.items() for other in others)
    assert nx.is_directed_acyclic_graph(order)


@pytest.mark.tier("quick")
def test_rooms_import_what_lies_below(edges: list[Edge]) -> None:
    """What stands against the order; circles within a room are for ``test_house``."""
    against = [e.place for e in edges if _room(e.target) not in {_room(e.source), *ROOMS[_room(e.source)]}]
    assert against == [], "\n".join(against)


@pytest.mark.tier("quick")
def test_planners_do_not_import_each_other(edges: list[Edge]) -> None:
    """What packages of planners share lies in ``grid``, or beside the packages."""
    packages = {path.name for path in (SOLVERS / "planners").iterdir() if (path / "__init__.py").exists()}

    def package(module: str) -> str | None:
        return module.split(".")[1] if module.startswith("planners.") and module.split(".")[1] in packages else None

    between = [e.place for e in edges if (source := package(e.source)) and package(e.target) not in {source, None}]
    assert between == [], "\n".join(between)


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_the_docstring_of_a_room_says_what_it_may_import(room: str) -> None:
    text = ast.get_docstring(ast.parse((SOLVERS / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    may = text.partition("May import: ")[2].partition("\nStart reading")[0]
    said = {name for name in ROOMS if f"`solvers.{name}`" in may}
    assert said == ROOMS[room], f"solvers/{room}/__init__.py: write 'May import: …' with these rooms"


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    "text",
    [
        "from penstock.solvers.solve.driver import solve",
        "import penstock.solvers.solve.driver",
        "def plan():\n    from penstock.solvers.solve import driver",
        "if TYPE_CHECKING:\n    from penstock.solvers.solve.driver import solve",
    ],
)
def test_an_import_is_seen_wherever_it_stands(text: str) -> None:
    assert [name for name, _line in _imports(ast.parse(text), {"solve.driver": 0})] == ["solve.driver"]
