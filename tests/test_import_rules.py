"""Allowed imports (docs/architecture.md), seen in a fresh interpreter's ``sys.modules`` and in the source."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
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
    """Return all modules of a package by name, from the folders that it really is."""
    start = (
        ROOT / package.rpartition(".")[2]
        if package.rpartition(".")[2] in FOLDERS
        else ROOT / "src" / "penstock" / "cli"
    )
    names = [package]
    names += [name for _, name, _ in pkgutil.walk_packages([str(start)], package + ".", onerror=lambda _: None)]
    return [name for name in names if not name.endswith(RUN_NOT_IMPORTED)]


def _loaded(names: list[str]) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after importing ``names``."""
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
    """Return sub-packages and modules of penstock, two names deep."""
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


def test_executor_sees_schemas_and_facts_only() -> None:
    loaded = _loaded(_modules("penstock.executor"))
    assert _ours(loaded) == {"penstock.executor", "penstock.facts", "penstock.schemas"}
    assert not _roots(loaded) & {"numba", "networkx", "ortools", "fastapi", "sqlalchemy"}


def test_the_agent_loads_no_torch() -> None:
    assert "torch" not in _loaded(["penstock.executor.node.agent"])


def test_ranks_load_no_documents_but_their_program_and_options() -> None:
    """Documents of plans, runs and agents take a tenth of a rank's start."""
    loaded = _loaded(["penstock.executor.run.rank_main"])
    assert {"penstock.schemas.program", "penstock.schemas.api.run_options"} <= loaded
    assert not loaded & {"penstock.schemas.plan", "penstock.schemas.profile", "penstock.schemas.api.agents"}


def test_the_service_loads_no_torch_and_no_executor() -> None:
    loaded = _loaded(_modules("penstock.service"))
    assert "torch" not in loaded
    assert "penstock.cli" not in _ours(loaded)
    assert {name for name in loaded if name.startswith("penstock.executor.")} <= {
        "penstock.executor.profiling",
        "penstock.facts.device_table",
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


ROOMS: dict[str, set[str]] = {
    "schemas": set(),
    "facts": {"schemas"},
    "shapes": {"schemas", "facts"},
    "solvers": {"schemas"},
    "executor": {"schemas", "facts"},
    "importers": {"schemas"},
    "examples": {"schemas", "facts", "shapes", "executor", "importers"},
    "convert": {"schemas", "facts", "shapes", "solvers"},
    "layouts": {"schemas", "shapes", "solvers", "convert", "importers", "examples"},
    "planning": {"schemas", "shapes", "solvers", "executor", "convert", "layouts", "examples"},
    "manifests": {"schemas", "importers", "planning"},
    "placing": {"schemas", "solvers", "convert", "importers", "planning"},
    "calibration": {"schemas", "facts", "solvers", "executor", "convert", "planning"},
    "report": {"schemas", "solvers", "layouts", "planning", "calibration"},
    "exporting": {"schemas", "solvers", "convert", "layouts", "planning", "manifests", "report"},
    "workers": {"schemas", "solvers", "planning"},
    "questions": {
        *("schemas", "facts", "shapes", "solvers", "importers", "examples", "convert", "layouts", "planning"),
        *("placing", "calibration", "report", "exporting", "workers"),
    },
    "client": {"schemas"},
    "service": {
        *("schemas", "shapes", "solvers", "convert", "importers", "examples", "planning", "manifests"),
        *("calibration", "report", "exporting", "workers", "questions"),
    },
    "cli": {
        *("schemas", "facts", "shapes", "solvers", "executor", "convert", "layouts", "importers", "examples"),
        *("planning", "manifests", "placing", "calibration", "report", "exporting", "workers", "questions"),
        *("client", "service"),
    },
}
"""The rooms of the package in their order, and what each may import besides its own modules."""
ROOMS_WITHIN: dict[str, dict[str, set[str]]] = {
    "solvers": {
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
        "placement": {"model", "costs", "degrees", "bounds", "grid", "planners", "solve"},
    },
    "service": {
        "configuration": set(),
        "settings": {"configuration"},
        "logs": set(),
        "metrics": set(),
        "db": {"settings", "metrics"},
        "problems": {"logs", "db"},
        "idempotency": {"db", "problems"},
        "parsing": set(),
        "security": {"settings", "db", "problems"},
        "jobs": {"settings", "logs", "metrics", "db", "problems", "parsing", "security"},
        "runs": {"db", "security", "jobs"},
        "services": {"settings", "db", "idempotency", "security", "jobs", "runs"},
        "readiness": {"db", "services"},
        "pages": {"db", "problems", "parsing", "security", "jobs", "runs", "services", "readiness"},
        "http": {
            *("settings", "logs", "metrics", "db", "problems", "idempotency", "parsing", "security", "jobs"),
            *("runs", "services", "readiness", "pages"),
        },
    },
}
"""The same within two rooms; a module beside the folders is a separate room."""
FACADE = ("penstock", "penstock.errors")
"""The Python API: names of all rooms, loaded when they are used."""


class Edge(NamedTuple):
    """An import, by module names, and its line."""

    source: str
    target: str
    line: int

    @property
    def place(self) -> str:
        """``module:line imports module``."""
        return f"{self.source}:{self.line} imports {self.target}"


def _sources(root: Path, package: str) -> dict[str, Path]:
    names = {path: ".".join((package, *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


@cache
def _package() -> dict[str, Path]:
    """Return the file of every module of the package."""
    modules = {}
    for folder in (*FOLDERS, "examples"):
        modules |= _sources(ROOT / folder, f"penstock.{folder}")
    source = ROOT / "src" / "penstock"
    linked = {source / folder for folder in (*FOLDERS, "examples")}
    every = _sources(source, "penstock")
    return modules | {name: path for name, path in every.items() if not linked & set(path.parents)}


def _imports(tree: ast.Module, modules: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """Yield what a file imports, wherever the import stands, and the ``module:function`` that it names."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            names = [name for name in [node.value.partition(":")[0]] if name in modules and "." in name]
        yield from ((name, node.lineno) for name in names if name.partition(".")[0] == "penstock")  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def edges() -> list[Edge]:
    modules = _package()
    imports = []
    for source, path in sorted(modules.items()):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports += [Edge(source, target, line) for target, line in _imports(tree, modules) if target != source]
    return imports


def _room(module: str, depth: int = 1) -> str:
    return ".".join(module.split(".")[depth : depth + 1])


@pytest.mark.tier("quick")
def test_every_module_is_in_a_room() -> None:
    assert {_room(name) for name in _package() if name not in FACADE} == set(ROOMS)
    assert len(ROOMS) <= 20


@pytest.mark.tier("quick")
@pytest.mark.parametrize("outer", ROOMS_WITHIN)
def test_every_module_of_a_large_room_is_in_a_room_of_it(outer: str) -> None:
    within = {_room(name, 2) for name in _package() if name.startswith(f"penstock.{outer}.")}
    assert within == set(ROOMS_WITHIN[outer])


@pytest.mark.tier("quick")
@pytest.mark.parametrize("rooms", [ROOMS, *ROOMS_WITHIN.values()])
def test_the_rooms_have_an_order(rooms: dict[str, set[str]]) -> None:
    """Each may import rooms before it."""
    names = list(rooms)
    pairs = [(names.index(room), names.index(other)) for room, others in rooms.items() for other in others]
    order = nx.DiGraph((room, other) for room, others in rooms.items() for other in others)
    assert nx.is_directed_acyclic_graph(order)
    assert all(other < room for room, other in pairs)


@pytest.mark.tier("quick")
def test_rooms_import_what_lies_below(edges: list[Edge]) -> None:
    """What stands against the order; circles within a room are for ``test_house``."""
    edges = [edge for edge in edges if edge.source not in FACADE]
    against = [e.place for e in edges if _room(e.target) not in {_room(e.source), *ROOMS[_room(e.source)]}]
    for outer, rooms in ROOMS_WITHIN.items():
        within = [
            (e, _room(e.source, 2), _room(e.target, 2)) for e in edges if _room(e.source) == outer == _room(e.target)
        ]
        against += [e.place for e, source, target in within if source and target not in {"", source, *rooms[source]}]
    assert against == [], "\n".join(against)


@pytest.mark.tier("quick")
def test_no_room_is_allowed_what_it_does_not_import(edges: list[Edge]) -> None:
    met = {(_room(edge.source), _room(edge.target)) for edge in edges}
    assert {(room, other) for room, others in ROOMS.items() for other in others} - met == set()
    for outer, rooms in ROOMS_WITHIN.items():
        met = {(_room(e.source, 2), _room(e.target, 2)) for e in edges if _room(e.source) == outer == _room(e.target)}
        assert {(room, other) for room, others in rooms.items() for other in others} - met == set()


@pytest.mark.tier("quick")
def test_planners_do_not_import_each_other(edges: list[Edge]) -> None:
    """What packages of planners share lies in ``grid``, or beside the packages."""
    packages = {path.name for path in (ROOT / "solvers" / "planners").iterdir() if (path / "__init__.py").exists()}

    def package(module: str) -> str | None:
        is_of_one = module.startswith("penstock.solvers.planners.") and _room(module, 3) in packages
        return _room(module, 3) if is_of_one else None

    between = [e.place for e in edges if (source := package(e.source)) and package(e.target) not in {source, None}]
    assert between == [], "\n".join(between)


@pytest.mark.parametrize(
    ("module", "rooms"),
    [
        *((f"penstock.{room}", may) for room, may in ROOMS.items()),
        *(
            (f"penstock.{outer}.{room}", {f"{outer}.{other}" for other in may})
            for outer, rooms in ROOMS_WITHIN.items()
            for room, may in rooms.items()
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_docstring_of_a_room_says_what_it_may_import(module: str, rooms: set[str]) -> None:
    path = _package()[module]
    if path.name != "__init__.py":
        return  # a module beside the folders: its imports are its first lines
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    may = text.partition("May import: ")[2].partition("\nStart reading")[0]
    every = {*ROOMS, *(f"{outer}.{room}" for outer, within in ROOMS_WITHIN.items() for room in within)}
    named = {name for name in every if f"`{name}`" in may}
    is_within = module.count(".") == 2
    assert {name for name in named if ("." in name) == is_within} == rooms, f"{path}: write 'May import: …' with these"


@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    "text",
    [
        "from penstock.solvers.solve.driver import solve",
        "import penstock.solvers.solve.driver",
        "def plan():\n    from penstock.solvers.solve import driver",
        "if TYPE_CHECKING:\n    from penstock.solvers.solve.driver import solve",
        "ENTRY = 'penstock.solvers.solve.driver:solve'",
    ],
)
def test_an_import_is_seen_wherever_it_stands(text: str) -> None:
    modules = {"penstock.solvers.solve.driver": 0}
    assert [name for name, _line in _imports(ast.parse(text), modules)] == ["penstock.solvers.solve.driver"]
