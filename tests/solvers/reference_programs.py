"""A plain run of programs that computes no numbers: the oracle of the checks of lowering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from penstock.schemas.program import Channel, Instruction, Program, RankStage

Key = tuple[str, int, int, int, int, int]
"""One message: F or B, sending stage, receiving stage, sending rank, receiving rank, micro-batch."""


class Bad(Exception):
    """An instruction that cannot be right, whatever the other ranks do."""


class Reference:
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
        self.gradients: set[tuple[int, int, int]] = set()
        self.steps: Counter[tuple[int, int]] = Counter()
        self.reduced: Counter[tuple[int, int, int]] = Counter()
        self.whole: Counter[tuple[int, int, int]] = Counter()
        """State of buckets gathered once a step: 1 while their parameters are whole, 2 from then to the step."""
        self.came: Counter[tuple[object, ...]] = Counter()
        self.left: Counter[tuple[object, ...]] = Counter()
        self.owned: dict[tuple[int, int], list[int]] = {}
        self.age: dict[tuple[int, int], int] = {}
        self.used: dict[tuple[int, int, int], int] = {}
        """Number of updates in the weights that a forward uses, by rank, stage and micro-batch."""

    def run(self) -> str:
        """Run all programs; return ``ok``, ``stuck`` or ``bad``."""
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
        messages = ("SEND_F", "SEND_B", "LOCAL_F", "LOCAL_B", "RECV_F", "RECV_B")
        part = self.part_of(rank, one.stage)
        if one.channel != -1 and one.kind not in messages:
            raise Bad
        if one.kind in ("F", "B", "I", "W", "R"):
            return self.compute(rank, one)
        if one.kind in ("SEND_F", "SEND_B", "LOCAL_F", "LOCAL_B"):
            return self.send(rank, one)
        if one.kind in ("RECV_F", "RECV_B"):
            self.receive(rank, one)
            return True
        if one.kind in ("REDUCE", "WAIT_REDUCE"):
            return self.reduce(rank, part, one)
        if one.kind in ("UNSHARD", "RESHARD"):
            return self.shard(rank, part, one)
        if one.kind in ("REDUCE_SHARED", "NORM", "WAIT_NORM"):
            return self.meet_all(rank, one)
        if one.kind == "STEP":
            self.step(rank, part, one)
        elif one.kind == "VERSION":
            if one.micro_batch >= part.versions:
                raise Bad
            self.age[rank, one.stage] = one.micro_batch
        return True

    def part_of(self, rank: int, stage: int) -> RankStage:
        for part in self.programs[rank].stages:
            if part.stage == stage:
                return part
        raise Bad

    def batches_of(self, part: RankStage) -> list[int]:
        """Return the replica's micro-batches in all global batches."""
        existing = self.owned.get((part.stage, part.replica))
        if existing is not None:
            return existing
        program = self.programs[0]
        first, last = part.micro_batches
        stop = (program.batches - 1) * program.num_micro_batches + last + 1
        turns = len(part.ranks) if part.dispatch == "round_robin" else 1
        batches = [m for m in range(first, stop) if m % turns == part.replica % turns]
        self.owned[part.stage, part.replica] = batches
        return batches

    def round_of(self, part: RankStage, micro_batch: int) -> int:
        return (micro_batch - part.micro_batches[0]) // part.update_every

    def compute(self, rank: int, one: Instruction) -> bool:
        part = self.part_of(rank, one.stage)
        f, b, i, w, r = (self.has(rank, kind, one) for kind in "FBIWR")
        allowed = {"F": not f, "B": f and not b and not i, "I": f and not b and not i, "W": i and not w}
        allowed["R"] = f and not r and not b and not i
        if one.micro_batch not in self.batches_of(part) or not allowed[one.kind]:
            raise Bad
        for other in self.programs[rank].stages if self.keeps(rank) else ():
            for k, (first, last, group) in enumerate(other.buckets):
                layers = set(range(first, last + 1)) & set(range(part.first, part.last + 1))
                if group >= 0 and layers and self.whole[rank, other.stage, k] != 1:
                    raise Bad
        gradient = one.kind in ("B", "W")
        if gradient and part.buckets and self.round_of(part, one.micro_batch) != self.steps[rank, one.stage]:
            raise Bad
        if one.kind in "FBI":
            direction = "F" if one.kind == "F" else "B"
            needed = set(self.needed(rank, part, direction, one.micro_batch))
            mine = {k for k in self.open[rank] if (k[0], k[2], k[5]) == (direction, one.stage, one.micro_batch)}
            if not mine <= self.sent.keys():
                return False
            if mine != needed:
                raise Bad
            self.open[rank] -= mine
        if one.kind == "F":
            newest = self.steps[rank, one.stage]
            self.used[rank, one.stage, one.micro_batch] = newest - self.age.get((rank, one.stage), 0)
        if gradient:
            self.gradients.add((rank, one.stage, one.micro_batch))
        return True

    def carries(self, rank: int, channel: Channel, micro_batch: int) -> bool:
        rows = channel.rows[self.programs[rank].row_class(micro_batch)]
        peer = self.part_of(channel.peer, channel.peer_stage)
        return (
            rows[0] < rows[1]
            and micro_batch in self.batches_of(peer)
            and micro_batch in self.batches_of(self.part_of(rank, channel.stage))
        )

    def needed(self, rank: int, part: RankStage, direction: str, micro_batch: int) -> list[Key]:
        source = part.previous if direction == "F" else part.next
        return [
            (direction, c.peer_stage, c.stage, c.peer, rank, micro_batch)
            for c in self.programs[rank].channels
            if (c.kind, c.stage, c.peer_stage) == (direction, part.stage, source) and self.carries(rank, c, micro_batch)
        ]

    def channel(self, rank: int, one: Instruction, sends: bool) -> Channel:
        channels = self.programs[rank].channels
        if not 0 <= one.channel < len(channels):
            raise Bad
        channel = channels[one.channel]
        forward = channel.kind == "F"
        part = self.part_of(rank, one.stage)
        target = part.next if forward == sends else part.previous
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

    def missing(self, rank: int, part: RankStage, bucket: tuple[int, int, int]) -> int:
        """Count the gradients that a bucket lacks for its stage's next step, over all stages with its layers."""
        lacking = 0
        for other in self.programs[rank].stages:
            if any(other.first <= layer <= other.last for layer in range(bucket[0], bucket[1] + 1)):
                due = [m for m in self.batches_of(other) if self.round_of(other, m) <= self.steps[rank, part.stage]]
                lacking += sum((rank, other.stage, m) not in self.gradients for m in due)
        return lacking

    def reduce(self, rank: int, part: RankStage, one: Instruction) -> bool:
        if one.micro_batch >= len(part.buckets) or self.programs[rank].update_rule == "elastic_averaging":
            raise Bad
        bucket = part.buckets[one.micro_batch]
        place = rank, one.stage, one.micro_batch
        starts = one.kind == "REDUCE"
        if self.keeps(rank) and starts and not self.whole[place]:
            raise Bad
        if bucket[2] < 0 or self.reduced[place] != (0 if starts else 1) or self.missing(rank, part, bucket) > starts:
            raise Bad
        if not self.meet(rank, self.programs[rank].groups[bucket[2]], bucket, starts, not starts):
            return False
        self.reduced[place] += 1
        return True

    def keeps(self, rank: int) -> bool:
        return self.programs[rank].sharding == "parameters_kept"

    def shard(self, rank: int, part: RankStage, one: Instruction) -> bool:
        begins, place = one.kind == "UNSHARD", (rank, one.stage, one.micro_batch)
        if one.micro_batch >= len(part.buckets) or not self.keeps(rank) or self.whole[place] != (0 if begins else 1):
            raise Bad
        bucket = part.buckets[one.micro_batch]
        if bucket[2] < 0 or (not begins and self.missing(rank, part, bucket)):
            raise Bad
        entered = self.came[rank, *bucket] > self.left[rank, *bucket]
        if begins and not self.meet(rank, self.programs[rank].groups[bucket[2]], bucket, not entered, True):
            return False
        self.whole[place] += 1
        return True

    def meet_all(self, rank: int, one: Instruction) -> bool:
        program = self.programs[rank]
        if one.kind != "REDUCE_SHARED":
            everybody = tuple(range(program.world_size))
            return self.meet(rank, everybody, ("norm",), one.kind == "NORM", one.kind == "WAIT_NORM")
        if one.micro_batch >= len(program.shared):
            raise Bad
        group = program.groups[program.shared[one.micro_batch].group]
        if rank not in group:
            raise Bad
        what = "tie", one.micro_batch
        entered = self.came[rank, *what] > self.left[rank, *what]
        return self.meet(rank, group, what, not entered, True)

    def meet(self, rank: int, group: tuple[int, ...], what: tuple[object, ...], comes: bool, waits: bool) -> bool:
        """Come to the meeting of a group, wait there until all ranks have come as often, or both."""
        self.came[rank, *what] += comes
        if not waits:
            return True
        number = self.left[rank, *what]
        if self.came[rank, *what] <= number:
            raise Bad
        if any(self.came[other, *what] <= number for other in group):
            return False
        self.left[rank, *what] += 1
        return True

    def step(self, rank: int, part: RankStage, one: Instruction) -> None:
        program, place = self.programs[rank], (rank, one.stage)
        first, last = part.micro_batches
        count = (program.batches - 1) * program.num_micro_batches + last + 1 - first
        if one.micro_batch or not part.buckets or self.steps[place] * part.update_every >= count:
            raise Bad
        for k, bucket in enumerate(part.buckets):
            grouped = bucket[2] >= 0 and program.update_rule != "elastic_averaging"
            if self.missing(rank, part, bucket) or (grouped and self.reduced[rank, one.stage, k] != 2):
                raise Bad
            if grouped and self.keeps(rank) and self.whole[rank, one.stage, k] != 2:
                raise Bad
            self.reduced[rank, one.stage, k] = self.whole[rank, one.stage, k] = 0
        self.steps[place] += 1

    def check_end(self) -> None:
        for rank, program in enumerate(self.programs):
            for part in program.stages:
                for m in self.batches_of(part):
                    one = Instruction("F", part.stage, m)
                    if not self.done[rank, one] or not (self.has(rank, "B", one) or self.has(rank, "W", one)):
                        raise Bad
                first, last = part.micro_batches
                count = (program.batches - 1) * program.num_micro_batches + last + 1 - first
                if part.buckets and self.steps[rank, part.stage] * part.update_every < count:
                    raise Bad
        if self.sent.keys() != self.posted.keys() or any(self.open):
            raise Bad


def verdict(programs: Sequence[Program], transport: str) -> str:
    """Return the verdict that the checks must give: ``ok``, ``stuck``, ``disordered`` or ``bad``."""
    reference = Reference(programs, rendezvous=False)
    result = reference.run()
    if transport == "gloo":
        return result
    if any(reference.sent[key] != reference.posted[key] for key in reference.sent.keys() & reference.posted.keys()):
        return "disordered"
    result = result if result != "ok" else Reference(programs, rendezvous=True).run()
    return result if result != "ok" or reduces_in_one_order(programs) else "bad"


def reduces_in_one_order(programs: Sequence[Program]) -> bool:
    """Return whether any two ranks that share two groups start both groups' all-reduces in the same order."""
    orders = []
    for program in programs:
        buckets = {part.stage: part.buckets for part in program.stages}
        orders.append([buckets[i.stage][i.micro_batch][2] for i in program.instructions() if i.kind == "REDUCE"])
    return all(
        [group for group in one if group in other] == [group for group in other if group in one]
        for one, other in combinations(orders, 2)
    )
