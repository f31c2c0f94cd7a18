"""Runs programs without computing, in the plainest way: the oracle of the checks of lowering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from penstock.schemas.program import Channel, Held, Instruction, Program

Key = tuple[str, int, int, int, int, int]
"""One message: F or B, sending stage, receiving stage, sending rank, receiving rank, micro-batch."""


class Bad(Exception):
    """An instruction that cannot be right, whatever the other ranks do."""


class Twin:
    def __init__(self, programs: Sequence[Program], rendezvous: bool) -> None:
        self.programs = programs
        self.rendezvous = rendezvous
        self.code = [list(p.instructions()) for p in programs]
        self.at = [0] * len(programs)
        self.done: Counter[tuple[int, Instruction]] = Counter()
        self.sent: dict[Key, int] = {}
        self.posted: dict[Key, int] = {}
        self.counts: Counter[tuple[str, int, int]] = Counter()
        self.open: list[set[Key]] = [set() for _ in programs]

    def run(self) -> str:
        """``ok``, ``stuck`` or ``bad``."""
        try:
            while sum(self.advance(rank) for rank in range(len(self.programs))):
                pass
            if any(at < len(code) for at, code in zip(self.at, self.code, strict=True)):
                return "stuck"
            self.check_end()
        except Bad:
            return "bad"
        return "ok"

    def advance(self, rank: int) -> bool:
        start = self.at[rank]
        while self.at[rank] < len(self.code[rank]) and self.execute(rank, self.code[rank][self.at[rank]]):
            self.done[rank, self.code[rank][self.at[rank]]] += 1
            self.at[rank] += 1
        return self.at[rank] > start

    def has(self, rank: int, kind: str, one: Instruction) -> bool:
        return self.done[rank, Instruction(kind, one.stage, one.micro_batch)] > 0

    def execute(self, rank: int, one: Instruction) -> bool:
        if one.channel != -1 and one.kind in ("F", "B", "I", "W", "R", "REDUCE", "WAIT_REDUCE", "STEP"):
            raise Bad
        if one.kind in ("F", "B", "I", "W", "R"):
            return self.compute(rank, one)
        if one.kind in ("SEND_F", "SEND_B", "LOCAL_F", "LOCAL_B"):
            return self.send(rank, one)
        if one.kind in ("RECV_F", "RECV_B"):
            self.receive(rank, one)
            return True
        self.update(rank, one)
        return True

    def held(self, rank: int, stage: int) -> Held:
        for held in self.programs[rank].stages:
            if held.stage == stage:
                return held
        raise Bad

    def own(self, held: Held) -> range:
        first, last = held.micro_batches
        if held.dispatch == "rows":
            return range(first, last + 1)
        return range(first + held.replica, last + 1, len(held.ranks))

    def compute(self, rank: int, one: Instruction) -> bool:
        held = self.held(rank, one.stage)
        f, b, i, w, r = (self.has(rank, kind, one) for kind in "FBIWR")
        allowed = {"F": not f, "B": f and not b and not i, "I": f and not b and not i, "W": i and not w}
        allowed["R"] = f and not r and not b and not i
        if one.micro_batch not in self.own(held) or not allowed[one.kind]:
            raise Bad
        if one.kind in "FBI":
            direction = "F" if one.kind == "F" else "B"
            needed = set(self.needed(rank, held, direction, one.micro_batch))
            mine = {k for k in self.open[rank] if (k[0], k[2], k[5]) == (direction, one.stage, one.micro_batch)}
            if not mine <= self.sent.keys():
                return False
            if mine != needed:
                raise Bad
            self.open[rank] -= mine
        return True

    def carries(self, rank: int, channel: Channel, micro_batch: int) -> bool:
        rows = channel.rows[self.programs[rank].row_class(micro_batch)]
        peer = self.held(channel.peer, channel.peer_stage)
        return (
            rows[0] < rows[1]
            and micro_batch in self.own(peer)
            and micro_batch in self.own(self.held(rank, channel.stage))
        )

    def needed(self, rank: int, held: Held, direction: str, micro_batch: int) -> list[Key]:
        source = held.previous if direction == "F" else held.next
        return [
            (direction, c.peer_stage, c.stage, c.peer, rank, micro_batch)
            for c in self.programs[rank].channels
            if (c.kind, c.stage, c.peer_stage) == (direction, held.stage, source) and self.carries(rank, c, micro_batch)
        ]

    def channel(self, rank: int, one: Instruction, sends: bool) -> Channel:
        channels = self.programs[rank].channels
        if not 0 <= one.channel < len(channels) or one.micro_batch >= self.programs[rank].num_micro_batches:
            raise Bad
        channel = channels[one.channel]
        forward = channel.kind == "F"
        held = self.held(rank, one.stage)
        target = held.next if forward == sends else held.previous
        if (channel.kind, channel.stage, channel.peer_stage) != (one.kind[-1], one.stage, target):
            raise Bad
        if (channel.peer == rank) != one.kind.startswith("LOCAL") or not self.carries(rank, channel, one.micro_batch):
            raise Bad
        return channel

    def send(self, rank: int, one: Instruction) -> bool:
        c = self.channel(rank, one, sends=True)
        key = (c.kind, c.stage, c.peer_stage, rank, c.peer, one.micro_batch)
        local = c.peer == rank
        if key in self.sent and self.done[rank, one]:
            raise Bad
        if key not in self.sent:
            if not (
                self.has(rank, "F", one) if c.kind == "F" else self.has(rank, "B", one) or self.has(rank, "I", one)
            ):
                raise Bad
            self.sent[key] = self.counts["sent", rank, c.peer]
            self.counts["sent", rank, c.peer] += not local
            if local:
                self.posted[key] = 0
                self.sent[key] = 0
                self.open[rank].add(key)
        return local or not self.rendezvous or key in self.posted

    def receive(self, rank: int, one: Instruction) -> None:
        c = self.channel(rank, one, sends=False)
        key = (c.kind, c.peer_stage, c.stage, c.peer, rank, one.micro_batch)
        if key in self.posted:
            raise Bad
        self.posted[key] = self.counts["received", c.peer, rank]
        self.counts["received", c.peer, rank] += 1
        self.open[rank].add(key)

    def update(self, rank: int, one: Instruction) -> None:
        held = self.held(rank, one.stage)
        own = self.own(held)
        left = sum(not any(self.done[rank, Instruction(kind, one.stage, m)] for kind in ("B", "W")) for m in own)
        if self.done[rank, one] or left > (one.kind == "REDUCE"):
            raise Bad
        waited = [
            self.has(rank, "WAIT_REDUCE", one._replace(micro_batch=b))
            for b in range(sum(group >= 0 for *_, group in held.buckets))
        ]
        if one.kind == "STEP" and (one.micro_batch or not all(waited)):
            raise Bad
        if one.kind != "STEP" and one.micro_batch >= sum(group >= 0 for *_, group in held.buckets):
            raise Bad
        if one.kind == "WAIT_REDUCE" and not self.has(rank, "REDUCE", one):
            raise Bad

    def check_end(self) -> None:
        for rank, program in enumerate(self.programs):
            for held in program.stages:
                for m in self.own(held):
                    one = Instruction("F", held.stage, m)
                    if not self.done[rank, one] or not (self.has(rank, "B", one) or self.has(rank, "W", one)):
                        raise Bad
                if not self.done[rank, Instruction("STEP", held.stage, 0)]:
                    raise Bad
        if self.sent.keys() != self.posted.keys() or any(self.open):
            raise Bad


def verdict(programs: Sequence[Program], transport: str) -> str:
    """What the checks should say: ``ok``, ``stuck``, ``disordered`` or ``bad``."""
    twin = Twin(programs, rendezvous=False)
    found = twin.run()
    if transport == "gloo":
        return found
    if any(twin.sent[key] != twin.posted[key] for key in twin.sent.keys() & twin.posted.keys()):
        return "disordered"
    found = found if found != "ok" else Twin(programs, rendezvous=True).run()
    return found if found != "ok" or reduces_in_one_order(programs) else "bad"


def reduces_in_one_order(programs: Sequence[Program]) -> bool:
    """Whether any two ranks that share two groups start both groups' all-reduces in the same order."""
    orders = [list(dict.fromkeys(i.stage for i in p.instructions() if i.kind == "REDUCE")) for p in programs]
    return all(
        [stage for stage in one if stage in other] == [stage for stage in other if stage in one]
        for one, other in combinations(orders, 2)
    )
