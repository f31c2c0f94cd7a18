"""A mark of a rank's position, in a file mapped into memory, readable after the rank was killed. Loads no torch.

The file holds two native 64-bit integers: the index of the running instruction, and the step (-1 before the first one).
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import Program

Mark: TypeAlias = "list[int] | memoryview[int]"
"""The memory to which a rank writes index and step."""


class Marked(NamedTuple):
    """The contents of a mark."""

    instruction: int
    step: int


_START = Marked(0, -1)


def write_mark(path: Path) -> None:
    """Write the file in its state before the first step."""
    path.write_bytes(array("q", _START).tobytes())


def open_mark(path: str | None) -> Mark:
    """Map the file into memory; without a file, return numbers that no other process reads."""
    if path is None:
        return list(_START)
    with Path(path).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 2 * array("q").itemsize)).cast("q")


def read_mark(path: Path) -> Marked:
    """Read the rank's position. OSError without a file, TypeError or ValueError for a file of another size."""
    return Marked(*array("q", path.read_bytes()))


def marked_instruction(path: Path, programs: Sequence[Mapping[str, Any]], segments: Sequence[int] = ()) -> str | None:
    """Return the instruction that a rank was at; None before its first step, or without a mark.

    ``segments``: the rank's programs in the order in which they train, from step 0; empty: the first one, each step.
    """
    try:
        index, step = read_mark(path)
    except (OSError, TypeError, ValueError):
        return None
    if step < 0:
        return None
    try:
        program = _program_at([Program.from_json(one) for one in programs], segments, step)
        instruction = next(islice(program.instructions(), index, None), None)
    except InvalidDocument:
        return None
    return where(step, index, str(instruction) if instruction is not None else None)


def _program_at(programs: Sequence[Program], segments: Sequence[int], step: int) -> Program:
    end = 0
    for number in segments:
        end += programs[number].batches
        if step < end:
            return programs[number]
    return programs[0]


def where(step: int | None, index: int | None, instruction: str | None) -> str | None:
    """Describe an instruction, with its step and its index in the program where they are known."""
    if instruction is None or step is None or index is None:
        return instruction
    return f"step {step}, instruction {index} ({instruction})"
