"""Where a rank is: a file that it maps into memory, so that it can be read after the rank was killed.

Two native 64-bit integers: the index of the running instruction, and the step (-1 before the first one).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.executor.agent_state import where
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import Program


def write_mark(path: Path) -> None:
    """Make the file as it is before the first step."""
    path.write_bytes(array("q", (0, -1)).tobytes())


def marked_instruction(path: Path, program: Mapping[str, Any]) -> str | None:
    """The instruction that the rank of ``program`` was at; None before its first step."""
    index, step = array("q", path.read_bytes())
    if step < 0:
        return None
    try:
        instruction = next(islice(Program.from_json(program).instructions(), index, None), None)
    except InvalidDocument:
        return None
    return where(step, index, str(instruction) if instruction is not None else None)
