"""A bound program: its segments as lists of calls, and what they work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.executor.program.global_batch import GlobalBatch
from penstock.executor.program.window import Window
from penstock.executor.stage.held_stage import Cell
from penstock.schemas.program import Program

Call = tuple[Callable[..., Any], tuple[Any, ...]]
Wait = Callable[[], object] | None


@dataclass
class Code:
    """One segment of a program: its calls, and what a traced run waits for before each."""

    calls: list[Call]
    waits: list[Wait]


@dataclass
class Bound:
    """A program bound to the stages of a rank.

    ``batches``: the global batches that can be under way; ``cells``: by stage and number within the window.
    """

    program: Program
    window: Window
    batches: list[GlobalBatch]
    cells: dict[tuple[int, int], Cell]
    segments: list[Code] = field(default_factory=list)

    @property
    def prologue(self) -> Code:
        return self.segments[0]

    @property
    def phases(self) -> list[Code]:
        return self.segments[1:-1]

    @property
    def epilogue(self) -> Code:
        return self.segments[-1]
