"""Placement of receives where sends wait for them: each is posted at the moment at which its message is sent.

Without tags the receives of a pair of ranks have to be in the order of its sends. A send that waits until its receive
is posted hangs when the posting comes after an instruction that waits for the sender. All ranks are simulated side by
side, one operation each in turn; whenever a rank sends, the receive is put next in its peer's program. That simulation
proves that no ranks wait for each other in a circle (as ``_add_send_recv`` of torch's pipelining does; EXECUTOR A.1 and
C.2).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from penstock.schemas.program import WORDS
from penstock.solvers.lowering.kernels import (
    END_DIRECTION,
    END_PARTNER,
    END_RANK,
    END_STAGE,
    HELD_BUCKET,
    HELD_EXPECTED,
    Wiring,
)

Code = tuple[int, int, int, int]
_WORD = {word: number for number, word in enumerate(WORDS)}
_COMPUTE = frozenset(_WORD[word] for word in ("F", "B", "I", "W", "R"))
_FORWARD, _NEEDS_GRADIENTS = _WORD["F"], (_WORD["B"], _WORD["I"])
_SENDS = {_WORD["SEND_F"]: _WORD["RECV_F"], _WORD["SEND_B"]: _WORD["RECV_B"]}
_LOCAL = (_WORD["LOCAL_F"], _WORD["LOCAL_B"])
_RECEIVES = (_WORD["RECV_F"], _WORD["RECV_B"])
_REDUCE, _WAIT_REDUCE, _UNSHARD = _WORD["REDUCE"], _WORD["WAIT_REDUCE"], _WORD["UNSHARD"]


def posted_as_sent(wiring: Wiring, codes: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the same programs with receives where the messages are sent; from where they block, they are unchanged."""
    run = _Run(wiring, codes, starts)
    while sum(run.advance(rank) for rank in range(len(starts) - 1)):
        pass
    rows = [done + left[at:] for done, left, at in zip(run.done, run.left, run.at, strict=True)]
    sizes = np.cumsum([0, *(len(row) for row in rows)]).astype(np.int64)
    return np.asarray([code for row in rows for code in row], dtype=np.int32).reshape(-1, 4), sizes


class _Run:
    def __init__(self, wiring: Wiring, codes: np.ndarray, starts: np.ndarray) -> None:
        self.wiring = wiring
        programs = [codes[low:high] for low, high in pairwise(starts.tolist())]
        self.left: list[list[Code]] = [
            [(w, s, m, c) for w, s, m, c in each[~np.isin(each[:, 0], _RECEIVES)].tolist()] for each in programs
        ]
        self.at = [0] * len(programs)
        self.done: list[list[Code]] = [[] for _ in programs]
        self.arrived: Counter[tuple[int, int, int, int]] = Counter()
        self.joined: Counter[int] = Counter()
        self.waited: Counter[int] = Counter()
        self.gathering: set[int] = set()

    def advance(self, rank: int) -> bool:
        """Run a rank up to the end of its next operation; return whether it made progress."""
        begin, left = self.at[rank], self.left[rank]
        computed = False
        while self.at[rank] < len(left):
            code = left[self.at[rank]]
            if (computed and code[0] in _COMPUTE) or not self.can(rank, code):
                break
            computed = computed or code[0] in _COMPUTE
            self.done[rank].append(code)
            self.at[rank] += 1
            if code[0] in _SENDS or code[0] in _LOCAL:
                self.send(rank, code)
        return self.at[rank] > begin

    def can(self, rank: int, code: Code) -> bool:
        word, stage, m, _ = code
        h = int(self.wiring.held_of[rank, stage])
        if word in (_REDUCE, _WAIT_REDUCE):
            return self.meet(int(self.wiring.replicas[h, HELD_BUCKET]) + m, word == _REDUCE)
        if word == _UNSHARD:
            return self.gather(int(self.wiring.replicas[h, HELD_BUCKET]) + m)
        if word != _FORWARD and word not in _NEEDS_GRADIENTS:
            return True
        direction = 0 if word == _FORWARD else 1
        smaller = m % self.wiring.per_batch >= self.wiring.first_class
        wanted = self.wiring.replicas[h, HELD_EXPECTED + 2 * direction + smaller]
        return self.arrived[rank, stage, direction, m] == int(wanted)

    def meet(self, participant: int, takes: bool) -> bool:
        if takes:
            self.joined[participant] += 1
            return True
        low, high = self.wiring.bounds[self.wiring.table[participant] : self.wiring.table[participant] + 2]
        if any(self.joined[other] <= self.waited[participant] for other in self.wiring.participants[low:high].tolist()):
            return False
        self.waited[participant] += 1
        return True

    def gather(self, participant: int) -> bool:
        if participant not in self.gathering:
            self.gathering.add(participant)
            self.meet(participant, takes=True)
        if not self.meet(participant, takes=False):
            return False
        self.gathering.remove(participant)
        return True

    def send(self, rank: int, code: Code) -> None:
        """Count a message's arrival; if it leaves the rank, receive it next in the peer's program."""
        word, _, m, channel = code
        other = self.wiring.ends[self.wiring.ends[self.wiring.first[rank, 1] + channel, END_PARTNER]]
        peer, stage = int(other[END_RANK]), int(other[END_STAGE])
        self.arrived[peer, stage, int(other[END_DIRECTION]), m] += 1
        if peer != rank:
            back = int(self.wiring.ends[self.wiring.first[rank, 1] + channel, END_PARTNER] - self.wiring.first[peer, 1])
            self.done[peer].append((_SENDS[word], stage, m, back))
