"""Check whether programs run to their end, and explain why when they do not.

All programs are checked with buffered sends, which never wait (gloo). For NCCL they are also checked with rendezvous,
where a send ends when its receive is posted, and for an equal order of the messages on both ends of each pair, because
messages there have no tags (EXECUTOR C.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import KINDS, WITHIN_PASSES, WORDS, Instruction, Program, Transport
from penstock.solvers.lowering import kernels as kernel
from penstock.solvers.lowering.kernels import (
    END_DIRECTION,
    END_PAIR,
    END_PARTNER,
    END_RANK,
    END_SENDS,
    END_STAGE,
    PARTICIPANT,
    Wiring,
)
from penstock.solvers.model.problem import prefix_sums

_WORD = {word: number for number, word in enumerate(WORDS)}
_SHOWN = 6
_SENDING = (_WORD["SEND_F"], _WORD["SEND_B"])
_RECEIVING = (_WORD["RECV_F"], _WORD["RECV_B"])


def check(
    programs: Sequence[Program], wiring: Wiring, codes: np.ndarray, starts: np.ndarray, transport: Transport
) -> None:
    """Run the programs without computing. Raises InvalidPlan naming ranks and their next instructions.

    The instructions are in ``codes``; any instructions in ``programs`` are ignored.
    """
    _Check(tuple(programs), wiring, codes, starts).run(transport)


def codes_of(programs: Sequence[Program]) -> tuple[np.ndarray, np.ndarray]:
    """Return the instructions of programs as (N, 4) int32, and where each rank's start, (R + 1) int64.

    Raises InvalidPlan for an instruction of an unknown kind, or with a negative stage or micro-batch.
    """
    for program in programs:
        for one in program.instructions():
            if one.kind not in _WORD or one.stage < 0 or one.micro_batch < 0:
                raise InvalidPlan(f"rank {program.rank} ({program.device}) has {one}, which is not an instruction")
    rows = [[(_WORD[i.kind], i.stage, i.micro_batch, i.channel) for i in p.instructions()] for p in programs]
    starts = prefix_sums([len(row) for row in rows])
    return np.array([one for row in rows for one in row], dtype=np.int32).reshape(-1, 4), starts


def instruction(code: Sequence[int]) -> Instruction:
    """Return one row of codes as an instruction."""
    return Instruction(WORDS[code[0]], int(code[1]), int(code[2]), int(code[3]))


@dataclass(frozen=True)
class _Check:
    programs: tuple[Program, ...]
    wiring: Wiring
    codes: np.ndarray
    starts: np.ndarray

    @cached_property
    def at(self) -> np.ndarray:
        """Return where each rank stopped."""
        return np.zeros(len(self.programs), dtype=np.int64)

    @cached_property
    def waiting(self) -> np.ndarray:
        """Return the channel end, or the participant of a collective, as which each rank waits, or -1."""
        return np.zeros(len(self.programs), dtype=np.int64)

    @cached_property
    def joined(self) -> np.ndarray:
        """Return how often each participant has joined its collective."""
        return np.zeros(len(self.wiring.table), dtype=np.int64)

    def run(self, transport: Transport) -> None:
        self.check_recomputed()
        passes = [(False, False)] if transport == "gloo" else [(False, True), (True, False)]
        for rendezvous, ordered in passes:
            result = kernel.advance(
                self.wiring, self.codes, self.starts, rendezvous, ordered, self.at, self.waiting, self.joined
            )
            finding, where, detail = map(int, result)
            if finding == kernel.OK:
                continue
            if finding == kernel.STUCK:
                raise self.stuck(where, rendezvous)
            if finding == kernel.OUT_OF_ORDER:
                raise self.out_of_order(where, detail)
            if finding in _LEFT_OVER:
                raise self.left_over(finding, where, detail)
            raise InvalidPlan(f"{self.name(where)} cannot run {self.next(where)}: {_REASONS[finding]}")
        if self.programs[0].sharding in WITHIN_PASSES:
            self.check_passes()
        if transport == "nccl":
            self.check_reductions()

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.programs[rank].device})"

    def next(self, rank: int) -> str:
        """Return the current instruction of a rank, with its number."""
        position = int(self.at[rank])
        if position >= self.starts[rank + 1]:
            return "its end"
        return f"{instruction(self.codes[position])} (instruction {position - int(self.starts[rank])})"

    def stuck(self, rank: int, rendezvous: bool) -> InvalidPlan:
        """Follow the wait-for relation until a rank repeats, or one has ended."""
        seen: list[int] = []
        while rank not in seen and self.at[rank] < self.starts[rank + 1]:
            seen.append(rank)
            rank = self.missing(rank)
        circle = seen[seen.index(rank) :] if rank in seen else [*seen[-1:], rank]
        lines = [f"{self.name(one)} is at {self.next(one)}{self.wait(one)}" for one in circle[:_SHOWN]]
        if len(circle) > _SHOWN:
            lines.append(f"and so on through {len(circle)} ranks")
        if rank not in seen:
            return InvalidPlan("the programs do not end: " + "; ".join(lines))
        how = "when a send has to wait for its receive" if rendezvous else "even when no send waits"
        remedy = (
            "transport gloo, or warm-ups of neighbouring stages that differ less"
            if rendezvous
            else "another order of the operations on one of these ranks"
        )
        return InvalidPlan(f"the ranks wait for each other in a circle, {how}: " + "; ".join(lines), remedy=remedy)

    def missing(self, rank: int) -> int:
        """Return the rank that a waiting one waits for."""
        waits, wiring = int(self.waiting[rank]), self.wiring
        if waits > PARTICIPANT:
            return int(wiring.ends[wiring.ends[waits, END_PARTNER], END_RANK])
        participant = PARTICIPANT - waits
        low, high = wiring.bounds[wiring.table[participant] : wiring.table[participant] + 2]
        late = [other for other in wiring.participants[low:high] if self.joined[other] < self.joined[participant]]
        return int(wiring.participant_rank[late[0]])

    def wait(self, rank: int) -> str:
        waits = int(self.waiting[rank])
        if self.at[rank] >= self.starts[rank + 1] or waits == -1:
            return ""
        if waits <= PARTICIPANT:
            word = WORDS[self.codes[self.at[rank], 0]].removeprefix("WAIT_")
            return f" and waits for the {word} of rank {self.missing(rank)}"
        ends = self.wiring.ends
        other = int(ends[waits, END_PARTNER])
        word = "RECV" if ends[waits, END_SENDS] else "SEND"
        what = f"{ends[other, END_STAGE]}{word}_{'FB'[ends[waits, END_DIRECTION]]}{self.codes[self.at[rank], 2]}"
        return f" and waits for {what} of rank {ends[other, END_RANK]}"

    def out_of_order(self, rank: int, number: int) -> InvalidPlan:
        """Return the error for a pair's message ``number``, which ``rank`` was the second to count."""
        code = self.codes[self.at[rank]]
        end = self.wiring.first[rank, 1] + code[3]
        ends = self.wiring.ends
        pair, other = ends[end, END_PAIR], int(ends[ends[end, END_PARTNER], END_RANK])
        sender, receiver = (rank, other) if code[0] in _SENDING else (other, rank)
        sent = self.message(sender, pair, number, _SENDING)
        received = self.message(receiver, pair, number, _RECEIVING)
        return InvalidPlan(
            f"messages from {self.name(sender)} to {self.name(receiver)} are not received in the order in which they "
            f"are sent: number {number} is {sent} there and {received} here; this transport has no tags",
            remedy="transport gloo, or the same order on both ranks",
        )

    def message(self, rank: int, pair: int, number: int, words: tuple[int, ...]) -> str:
        """Return the instruction of the given message of a pair on one of its ranks."""
        codes = self.codes[self.starts[rank] : self.starts[rank + 1]]
        mine = codes[np.isin(codes[:, 0], words)]
        mine = mine[self.wiring.ends[self.wiring.first[rank, 1] + mine[:, 3], END_PAIR] == pair]
        return str(instruction(mine[number])) if number < len(mine) else "nothing"

    def left_over(self, finding: int, where: int, detail: int) -> InvalidPlan:
        wiring = self.wiring
        if finding == kernel.NEVER_RUN:
            rank, stage = (int(x) for x in wiring.replicas[where, :2])
            return InvalidPlan(
                f"{self.name(rank)} never runs {stage}F{detail}, or not {stage}B{detail} (nor {stage}I{detail} and "
                f"{stage}W{detail}); every replica runs each of its micro-batches once",
            )
        if finding == kernel.NEVER_STEPPED:
            rank, stage = (int(x) for x in wiring.replicas[where, :2])
            return InvalidPlan(f"{self.name(rank)} never runs {stage}STEP0: stage {stage} would not be trained")
        if finding == kernel.NEVER_USED:
            return InvalidPlan(
                f"{self.name(where)} posts a receive for stage {wiring.ends[detail, END_STAGE]} that nothing waits for"
            )
        rank, stage = int(wiring.ends[where, END_RANK]), int(wiring.ends[where, END_STAGE])
        peer = int(wiring.ends[wiring.ends[where, END_PARTNER], END_RANK])
        word = "FB"[wiring.ends[where, END_DIRECTION]]
        return InvalidPlan(f"{self.name(rank)} runs {stage}SEND_{word}{detail}, which {self.name(peer)} never receives")

    def check_recomputed(self) -> None:
        """Check that every R is of a stage that recomputes layers: single modules run again within their backward."""
        if not (self.codes[:, 0] == _WORD["R"]).any():
            return
        for rank, program in enumerate(self.programs):
            codes = self.codes[self.starts[rank] : self.starts[rank + 1]]
            plain = [stage.stage for stage in program.stages if not stage.recompute]
            wrong = codes[(codes[:, 0] == _WORD["R"]) & np.isin(codes[:, 1], plain)]
            if wrong.size:
                one = instruction(wrong[0])
                modules = next(stage.modules for stage in program.stages if stage.stage == one.stage)
                again = f"only {', '.join(modules)} of each layer, within its backward" if modules else "nothing"
                raise InvalidPlan(
                    f"{self.name(rank)} cannot run {one}: stage {one.stage} recomputes {again}",
                    remedy="leave R out of the order, or recompute layers of the stage",
                )

    def check_passes(self) -> None:
        """Check that ranks that sum or gather inside their operations run these in the same order."""
        first: dict[int, tuple[int, np.ndarray]] = {}
        for rank, program in enumerate(self.programs):
            codes = self.codes[self.starts[rank] : self.starts[rank + 1]]
            mine = codes[codes[:, 0] < len(KINDS)]
            for group in sorted({group for one in program.stages for _, _, group in one.buckets if group >= 0}):
                other, theirs = first.setdefault(group, (rank, mine))
                if np.array_equal(mine, theirs):
                    continue
                alike = np.all(mine[: len(theirs)] == theirs[: len(mine)], axis=1)
                at = int(np.argmin(alike)) if not alike.all() else len(alike)
                lines = [
                    f"{self.name(one)} runs {instruction(row[at]) if at < len(row) else 'nothing'}"
                    for one, row in ((other, theirs), (rank, mine))
                ]
                raise InvalidPlan(
                    f"with sharding {program.sharding} the ranks of a group need one order of operations, but as "
                    "operation "
                    f"{at} {', '.join(lines)}",
                    remedy="the same order of operations on all replicas",
                )

    def check_reductions(self) -> None:
        """Check that ranks that are in two groups start their all-reduces in the same order."""
        orders: dict[tuple[int, int], tuple[int, list[int]]] = {}
        for rank in range(len(self.programs)):
            reduced = self.reduced(rank)
            for pair in combinations(sorted(set(reduced)), 2):
                order = [group for group in reduced if group in pair]
                other, before = orders.setdefault(pair, (rank, order))
                if before != order:
                    raise InvalidPlan(
                        f"{self.name(other)} reduces {self.layers(before)}, {self.name(rank)} {self.layers(order)}, "
                        "but this transport needs one order",
                        remedy="transport gloo, or the same order of last backwards on both ranks",
                    )

    def reduced(self, rank: int) -> list[int]:
        """Return the groups of a rank's reductions and gathers of buckets, in order."""
        codes = self.codes[self.starts[rank] : self.starts[rank + 1]]
        started = codes[np.isin(codes[:, 0], (_WORD["REDUCE"], _WORD["UNSHARD"]))]
        return [self.programs[rank].stage(int(s)).buckets[k][2] for s, k in started[:, 1:3].tolist()]

    def layers(self, order: Sequence[int]) -> str:
        """Return the first groups of an order in words."""
        of_group = {
            group: (first, last) for p in self.programs for one in p.stages for first, last, group in one.buckets
        }
        return " before ".join("layers {} to {}".format(*of_group[group]) for group in dict.fromkeys(order))


_LEFT_OVER = (kernel.NEVER_RUN, kernel.NEVER_STEPPED, kernel.NEVER_USED, kernel.NEVER_POSTED)
_REASONS = {
    kernel.NOT_HELD: "it does not hold this stage",
    kernel.NOT_OWN: "this micro-batch is not one of its replica's",
    kernel.TWICE: "it has been run before",
    kernel.TOO_EARLY: "what it needs on this rank has not run yet; F comes before B, B before SEND_B, all before STEP",
    kernel.BAD_CHANNEL: "its channel does not carry this",
    kernel.NOT_RECEIVED: "a receive that it needs has not been posted, or was posted for nothing",
    kernel.BAD_BUCKET: "each bucket is reduced once, then waited for, then the stage steps; each tie is in its group; "
    "what is gathered once a step is gathered, and let go of, once before it",
    kernel.NOT_WHOLE: "the parameters of the stage are not gathered: UNSHARD comes before the first F, RESHARD after "
    "the last B or W",
    kernel.MIXED: "the gradients of a round have to run between the previous step and its step",
    kernel.BAD_VERSION: "the stage does not keep so old a version of its weights",
}
