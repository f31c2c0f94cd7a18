"""Which global batches a rank has under way while it runs a program, and so how often a loop's body has to be bound.

A program is prologue, repetitions of a body, epilogue: its *segments*. Each refers to a range of global batches, which
moves ahead by ``body_batches`` per repetition. As many global batches as the widest range has can be distinguished by
their number modulo that width, so everything that belongs to one (micro-batches, losses) is reused ``width`` later, and
a body is bound ``width / body_batches`` times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.schemas.program import UNSHIFTED, Instruction, Program


@dataclass(frozen=True)
class Window:
    """``width``: distinct global batches. ``highest``: the last one that each segment refers to, of the body
    in its first repetition. ``shown``: repetitions that are bound; the first ``phases`` are run again and again.

    ``instructions``: prologue, ``shown`` repetitions and epilogue, whose numbers follow on without the others.
    """

    program: Program
    width: int
    phases: int
    shown: int
    highest: tuple[int, int, int]
    instructions: tuple[Instruction, ...]

    @property
    def bounds(self) -> list[int]:
        """Where segments start and end in ``instructions``."""
        head, body = len(self.program.prologue), len(self.program.body)
        return [0, *(head + i * body for i in range(self.shown + 1)), len(self.instructions)]


def window(program: Program) -> Window:
    """The window of a program; a loop without global batches of its own counts as unrolled."""
    count, ahead = program.num_micro_batches, program.body_batches
    every = {held.stage: held.update_every for held in program.stages}
    steps: Counter[int] = Counter()
    prologue = program.prologue if ahead else tuple(program.instructions())
    first = _range(prologue, count, every, steps)
    if not ahead:
        width = max(program.batches, first[1] + 1)
        highest = max(first[1], program.batches - 1)
        return Window(program, width, 0, 0, (highest, 0, highest), prologue)
    before = Counter(steps)
    body = _range(program.body, count, every, steps)
    after = Counter({s: before[s] + program.repeat * (steps[s] - before[s]) for s in steps})
    last = _range(program.epilogue, count, every, after)
    widest = max(high - low + 1 for low, high in (first, body, last))
    phases = -(-widest // ahead)
    shown = min(program.repeat, 2 * phases + (program.repeat - 2 * phases) % phases)
    instructions = (
        *prologue,
        *(one for i in range(shown) for one in program.repetition(i)),
        *_moved(program.epilogue, (shown - program.repeat) * ahead * count),
    )
    return Window(
        program, phases * ahead, min(phases, shown), shown, (first[1], body[1], program.batches - 1), instructions
    )


def _range(
    instructions: Sequence[Instruction], count: int, every: dict[int, int], steps: Counter[int]
) -> tuple[int, int]:
    """The lowest and the highest global batch that instructions refer to; ``steps`` of each stage are counted on."""
    low, high = [], []
    for one in instructions:
        if one.kind == "STEP":
            at = steps[one.stage] * every.get(one.stage, count)
            low.append(at // count)
            high.append((at + every.get(one.stage, count) - 1) // count)
            steps[one.stage] += 1
        elif one.kind not in UNSHIFTED:
            low.append(one.micro_batch // count)
            high.append(low[-1])
    return min(low, default=0), max(high, default=-1)


def _moved(instructions: Iterable[Instruction], by: int) -> Iterable[Instruction]:
    for one in instructions:
        yield one if one.kind in UNSHIFTED else one._replace(micro_batch=one.micro_batch + by)
