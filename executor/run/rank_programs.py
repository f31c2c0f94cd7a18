"""The work of the ranks of a run: their programs, and the program of each step. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import TRANSPORTS, Instruction, Program, Transport


def batches_per_step(program: Program) -> int:
    """Count the global batches of one step: under elastic averaging one per pipeline (AvgPipe, section 3)."""
    return program.pipelines if program.update_rule == "elastic_averaging" else 1


def common_transports(programs: Iterable[Program]) -> tuple[Transport, ...]:
    """Return the transports for which all of the programs were lowered."""
    carried = [set(program.transports) for program in programs]
    return tuple(transport for transport in TRANSPORTS if all(transport in each for each in carried))


@dataclass(frozen=True, slots=True)
class Work:
    """The programs of a run, ``programs[i][rank]``: one list for stepwise plans; several are a ladder, or segments.

    ``segments``: numbers of the programs that run one after the other from ``first_step`` on (periodic plans).
    """

    programs: tuple[tuple[Program, ...], ...]
    segments: tuple[int, ...] | None = None
    first_step: int | None = None

    @classmethod
    def of(cls, source: Work | Sequence[Program]) -> Work:
        """Return ``source``, or a program per rank, as Work. Raises InvalidDocument for unequal numbers of programs."""
        work = source if isinstance(source, Work) else cls((tuple(source),))
        sizes = {len(programs) for programs in work.programs}
        if len(sizes) != 1 or 0 in sizes:
            raise InvalidDocument(f"every program of a run has one part per rank, not {sorted(sizes)}")
        return work

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.programs[0])

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that all programs were lowered for."""
        return common_transports(program for programs in self.programs for program in programs)

    def programs_of(self, rank: int) -> tuple[dict[str, Any], ...]:
        """Return the programs of a rank as JSON."""
        return tuple(programs[rank].to_json() for programs in self.programs)

    def instruction(self, rank: int, index: int, program: int) -> Instruction | None:
        """Return instruction ``index`` of a rank's program ``program``; None if the program is shorter."""
        return next(islice(self.programs[program][rank].instructions(), index, None), None)

    def program_at(self, step: int, steps: int, options: RunOptions) -> int:
        """Return the number of the program that trains ``step``, by the segments; 0 without segments."""
        at = self.first_step or 0
        for number, length in zip(self.segments or (), options.segments(at, steps), strict=False):
            at += length
            if step < at:
                return number
        return 0
