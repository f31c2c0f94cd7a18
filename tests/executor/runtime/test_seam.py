"""Nothing but the runtime asks CUDA for anything."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from repository import ROOT

ROOMS = ("executor", "schemas", "service", "solvers", "scripts", "src/penstock", "examples")
RUNTIME = ROOT / "executor" / "runtime"


@pytest.mark.parametrize("room", ROOMS)
def test_torch_cuda_is_in_the_runtime_alone(room: str) -> None:
    files = [path for path in (ROOT / room).rglob("*.py") if RUNTIME not in path.resolve().parents]
    assert files
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in _uses_of_cuda(path)]
    assert not found, f"executor/runtime/interface.py is the way to ask for this: {found}"


def test_the_runtime_itself_would_be_found() -> None:
    assert list(_uses_of_cuda(RUNTIME / "cuda.py"))


def _uses_of_cuda(path: Path) -> list[int]:
    """Lines with ``torch.cuda`` as code, or imported."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                lines.append(node.lineno)
            case ast.ImportFrom(module=str(module)) if module.startswith("torch.cuda"):
                lines.append(node.lineno)
            case ast.Import(names=names) if any(name.name.startswith("torch.cuda") for name in names):
                lines.append(node.lineno)
    return lines
