"""The rule that only the runtime uses CUDA."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.tier("quick")

ROOMS = ("executor", "schemas", "service", "solvers", "scripts", "src/penstock", "examples", "benchmarks", "docker")
MEASURES_KERNELS = {"benchmarks/gpu_blocks.py", "benchmarks/gpu_kernels.py", "benchmarks/gpu_operators.py"}
"""Kernels alone, without anything of Penstock between them and CUDA."""
RUNTIME = ROOT / "executor" / "runtime"


@pytest.mark.parametrize("room", ROOMS)
def test_torch_cuda_is_in_the_runtime_alone(room: str) -> None:
    files = [path for path in (ROOT / room).rglob("*.py") if RUNTIME not in path.resolve().parents]
    assert files
    names = {str(path.relative_to(ROOT)): path for path in files}
    uses = [f"{name}:{line}" for name in names.keys() - MEASURES_KERNELS for line in _uses_of_cuda(names[name])]
    assert not uses, f"executor/runtime/interface.py is the way to ask for this: {uses}"


def test_the_runtime_itself_would_be_found() -> None:
    assert list(_uses_of_cuda(RUNTIME / "cuda.py"))


@pytest.mark.parametrize(
    "text",
    ["torch.cuda.synchronize()", "import torch.cuda as gpu", "from torch.cuda import Stream", "from torch import cuda"],
)
def test_each_way_to_say_it_is_found(tmp_path: Path, text: str) -> None:
    path = tmp_path / "one.py"
    path.write_text(f"import torch\n{text}\n")
    assert _uses_of_cuda(path) == [2]


def _uses_of_cuda(path: Path) -> list[int]:
    """Return the lines with ``torch.cuda`` as code, or imported."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                lines.append(node.lineno)
            case ast.ImportFrom(module=str(module)) if module.startswith("torch.cuda"):
                lines.append(node.lineno)
            case ast.ImportFrom(module="torch", names=names) if any(name.name == "cuda" for name in names):
                lines.append(node.lineno)
            case ast.Import(names=names) if any(name.name.startswith("torch.cuda") for name in names):
                lines.append(node.lineno)
    return lines
