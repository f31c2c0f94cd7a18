"""Properties of instructions that depend on other instructions, computed before a program is bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from penstock.schemas.program import Instruction, Program, RankStage

GRADIENTS = ("B", "W")
"""Instructions that add to the gradients of parameters."""

_NAMED = 8
"""The most ranks that a message about a wait names."""

_MESSAGES = ("SEND_F", "LOCAL_F", "SEND_B", "LOCAL_B")


class Neighbours:
    """Properties of instructions, by index.

    ``next_gradient``: the backward that makes the last gradient of a REDUCE's bucket, where one follows.
    ``step_number``: the number of STEPs of its stage before a STEP. ``idle``: backwards without rows here.
    """

    def __init__(
        self, instructions: Sequence[Instruction], stages: Mapping[int, RankStage], idle: Collection[int] = ()
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
        """Return whether no later message reads the tensors that this one reads."""
        one = self._instructions[index]
        return self._last_send.get((one.kind[-1], one.stage, one.micro_batch)) == index

    def _find_gradients(self, idle: Collection[int]) -> None:
        """Find the last gradient of each bucket, from any stage with its layers, before that stage's STEP."""
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
                    entry = self._stages[number]
                    if entry.first <= first and last <= entry.last:
                        self.next_gradient[index] = follower


def awaited(program: Program, instruction: Instruction) -> list[int]:
    """Return the ranks whose messages or sums an instruction needs; empty where they are too many to name.

    Sums of the norm, and barriers, which follow the last instruction, need all other ranks.
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
