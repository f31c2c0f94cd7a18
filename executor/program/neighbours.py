"""What an instruction has to know of those around it, read off a program before it is bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from penstock.schemas.program import Held, Instruction, Program

GRADIENTS = ("B", "W")
"""Instructions that add to the gradients of parameters."""

_NAMED = 8
"""The most awaited ranks that a message names."""

_MESSAGES = ("SEND_F", "LOCAL_F", "SEND_B", "LOCAL_B")


class Neighbours:
    """Of each instruction, by its index.

    ``next_gradient``: the backward that makes the last gradient of a REDUCE's bucket, where one follows.
    ``step_number``: how many STEPs of its stage come before a STEP. ``idle``: backwards that have no rows here.
    """

    def __init__(
        self, instructions: Sequence[Instruction], stages: Mapping[int, Held], idle: Collection[int] = ()
    ) -> None:
        self._instructions = instructions
        self._stages = stages
        self._last_send: dict[tuple[str, int, int], int] = {}
        self.next_gradient: dict[int, Instruction] = {}
        self.step_number: dict[int, int] = {}
        steps: Counter[int] = Counter()
        for index, one in enumerate(instructions):
            if one.kind in _MESSAGES:
                self._last_send[one.kind[-1], one.stage, one.micro_batch] = index
            elif one.kind == "STEP":
                self.step_number[index] = steps[one.stage]
                steps[one.stage] += 1
        self._find_gradients(idle)

    def is_last(self, index: int) -> bool:
        """Whether no later message reads what this one reads."""
        one = self._instructions[index]
        return self._last_send.get((one.kind[-1], one.stage, one.micro_batch)) == index

    def _find_gradients(self, idle: Collection[int]) -> None:
        """A bucket's gradients come from any stage that holds its layers, up to that stage's STEP."""
        latest: dict[int, Instruction] = {}
        for index in range(len(self._instructions) - 1, -1, -1):
            one = self._instructions[index]
            if one.kind in GRADIENTS and index not in idle:
                latest[one.stage] = one
            elif one.kind == "STEP":
                latest.pop(one.stage, None)
            elif one.kind == "REDUCE":
                first, last, _ = self._stages[one.stage].buckets[one.micro_batch]
                for number, follower in latest.items():
                    held = self._stages[number]
                    if held.first <= first and last <= held.last:
                        self.next_gradient[index] = follower


def awaited(program: Program, instruction: Instruction) -> list[int]:
    """Return the ranks whose messages or sums an instruction needs or takes; none where they are too many to name.

    All others where it is no matter of some ranks: sums of the norm, and barriers, which follow the last instruction.
    """
    ranks = sorted(_awaited(program, instruction) - {program.rank})
    return ranks if len(ranks) <= _NAMED else []


def _awaited(program: Program, instruction: Instruction) -> set[int]:
    kind, number = instruction.kind, instruction.micro_batch
    if kind.startswith(("SEND", "RECV")):
        return {program.channels[instruction.channel].peer}
    stage = program.stage(instruction.stage)
    if kind in ("F", "B", "I"):
        end = ("F", stage.stage, stage.previous) if kind == "F" else ("B", stage.stage, stage.next)
        return {one.peer for one in program.channels if (one.kind, one.stage, one.peer_stage) == end}
    if kind == "REDUCE_SHARED":
        return set(program.groups[program.shared[number].group])
    if kind in ("REDUCE", "WAIT_REDUCE", "UNSHARD"):
        groups = (stage.buckets[number][2], *stage.expert_groups[number : number + 1])
        return {rank for group in groups if group >= 0 for rank in program.groups[group]}
    return set(range(program.world_size))
