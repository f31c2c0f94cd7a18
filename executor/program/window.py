"""The global batches that a rank has under way in a program, and the number of times that a loop's body is bound.

A program has *segments*: prologue, repetitions of a body, epilogue. Each refers to a range of global batches, which
moves ahead by ``body_batches`` per repetition. Let ``width`` be the number of global batches in the widest range,
rounded up. Batches then differ by their number modulo ``width``, so all objects of a batch (micro-batches, losses) are
reused ``width`` batches later, and a body is bound ``width / body_batches`` times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.schemas.program import UNSHIFTED, Instruction, Program


@dataclass(frozen=True)
class Window:
    """The window of a program. ``width``: the number of distinct global batches. ``shown``: repetitions that are bound.

    ``highest``: the last global batch to which each segment refers, for the body in its first repetition. The first
    ``phases`` repetitions run again and again.

    ``instructions``: prologue, ``shown`` repetitions and epilogue, with numbers as if there were no other repetitions.
    """

    program: Program
    width: int
    phases: int
    shown: int
    highest: tuple[int, int, int]
    instructions: tuple[Instruction, ...]

    @property
    def bounds(self) -> list[int]:
        """The bounds of segments in ``instructions``."""
        head, body = len(self.program.prologue), len(self.program.body)
        return [0, *(head + i * body for i in range(self.shown + 1)), len(self.instructions)]


def window(program: Program) -> Window:
    """Return the window of a program; a loop whose body has no new global batches counts as unrolled."""
    count, ahead = program.num_micro_batches, program.body_batches
    every = {entry.stage: entry.update_every for entry in program.stages}
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
    """Return the lowest and highest global batch of instructions; ``steps`` of each stage are counted in place."""
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
