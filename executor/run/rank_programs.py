"""What the ranks of a run are given to do: their programs, and which of them comes when. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import TRANSPORTS, Instruction, Program, Transport


def batches_per_step(program: Program) -> int:
    """Global batches of one step: under elastic averaging each pipeline trains one of its own (AvgPipe, section 3)."""
    return program.pipelines if program.update_rule == "elastic_averaging" else 1


def common_transports(programs: Iterable[Program]) -> tuple[Transport, ...]:
    """The transports that all of the programs were lowered for."""
    carried = [set(program.transports) for program in programs]
    return tuple(transport for transport in TRANSPORTS if all(transport in own for own in carried))


@dataclass(frozen=True, slots=True)
class Work:
    """``programs[i][rank]``: one list for plans that are run step by step; several are a ladder, or segments.

    ``segments``: numbers of the programs that are run one after the other from ``first_step`` on (periodic plans).
    """

    programs: tuple[tuple[Program, ...], ...]
    segments: tuple[int, ...] | None = None
    first_step: int | None = None

    @classmethod
    def of(cls, given: Work | Sequence[Program]) -> Work:
        """``given``, or one program per rank. Raises InvalidDocument when ranks have different numbers of programs."""
        work = given if isinstance(given, Work) else cls((tuple(given),))
        sizes = {len(programs) for programs in work.programs}
        if len(sizes) != 1 or 0 in sizes:
            raise InvalidDocument(f"every program of a run has one part per rank, not {sorted(sizes)}")
        return work

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.programs[0])

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that all programs were lowered for."""
        return common_transports(program for programs in self.programs for program in programs)

    def programs_of(self, rank: int) -> tuple[dict[str, Any], ...]:
        """Return the programs of a rank as JSON."""
        return tuple(programs[rank].to_json() for programs in self.programs)

    def instruction(self, rank: int, index: int, program: int) -> Instruction | None:
        """Instruction ``index`` of a rank's program ``program``; None where there is none."""
        return next(islice(self.programs[program][rank].instructions(), index, None), None)

    def program_at(self, step: int, steps: int, options: RunOptions) -> int:
        """The number of the program that trains ``step``, by the segments; 0 where there are none."""
        at = self.first_step or 0
        for number, length in zip(self.segments or (), options.segments(at, steps), strict=False):
            at += length
            if step < at:
                return number
        return 0
