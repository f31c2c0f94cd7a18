"""The wiring of all ranks' programs as arrays, with the checks that need no order: ends agree and rows tile."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import numpy as np

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import Channel, Program, RankStage
from penstock.solvers.lowering.kernels import (
    END_MODULUS,
    END_PAIR,
    END_PARTNER,
    END_ROWS,
    END_SLOT,
    HELD_BASE,
    HELD_BUCKET,
    HELD_COLUMNS,
    HELD_EXPECTED,
    HELD_NUM_BUCKETS,
    Wiring,
)
from penstock.solvers.lowering.participants import participants_of
from penstock.solvers.lowering.rank_parts import own_micro_batches
from penstock.solvers.model.problem import prefix_sums

_WAYS = ("forward", "backward")
_Key = tuple[int, str, int, int, int]


def wire(programs: Sequence[Program]) -> Wiring:
    """Return the arrays of all ranks' replicas, channel ends and participants.

    Raises InvalidPlan when an end has no partner, when both ends of a channel disagree about rows, tag or codec, or
    when the rows that a replica receives do not tile its slice.
    """
    replicas = [(p.rank, one) for p in programs for one in p.stages]
    ends = [(p.rank, channel) for p in programs for channel in p.channels]
    number_of = {(rank, one.stage): h for h, (rank, one) in enumerate(replicas)}
    _check_numbers(programs, replicas, ends, number_of)
    micro_batches = [own_micro_batches(programs[rank], one) for rank, one in replicas]
    of_end = [number_of[rank, channel.stage] for rank, channel in ends]
    partner = _partners(ends)
    stage_of = [replicas[h][1] for h in of_end]
    _check_agreement(ends, partner, stage_of)
    lists, members = _lists(ends, number_of, len(replicas))
    table = np.zeros((len(replicas), HELD_COLUMNS), dtype=np.int64)
    table[:, :6] = [
        (rank, one.stage, each.start, each.stop, each.step, len(each))
        for (rank, one), each in zip(replicas, micro_batches, strict=True)
    ]
    table[:, HELD_EXPECTED : HELD_EXPECTED + 4] = _expected(replicas, ends, partner, stage_of, lists, members).reshape(
        len(replicas), 4
    )
    table[:, HELD_NUM_BUCKETS] = [len(one.buckets) for _, one in replicas]
    table[1:, HELD_BUCKET] = np.cumsum(table[:-1, HELD_NUM_BUCKETS])
    table[:, HELD_BASE:] = [
        (one.micro_batches[0], one.update_every, one.versions, _gathered(programs[rank], one)) for rank, one in replicas
    ]
    per_batch, classes = programs[0].num_micro_batches, programs[0].row_classes
    count = per_batch * programs[0].batches
    rows, num_slots, num_pairs = _end_table(ends, partner, [micro_batches[h] for h in of_end], count)
    held_of = np.full((len(programs), 1 + max(one.stage for _, one in replicas)), -1, dtype=np.int32)
    held_of[table[:, 0], table[:, 1]] = np.arange(len(replicas))
    first = prefix_sums([[len(p.stages) for p in programs], [len(p.channels) for p in programs]])
    return Wiring(
        held_of=held_of,
        first=np.ascontiguousarray(first.T),
        replicas=table,
        ends=rows,
        lists=lists,
        members=members,
        **participants_of(programs, replicas)._asdict(),
        num_slots=num_slots,
        num_pairs=num_pairs,
        num_micro_batches=count,
        per_batch=per_batch,
        first_class=classes[0][1] if len(classes) > 1 else per_batch,
    )


def _gathered(program: Program, stage: RankStage) -> int:
    """Return how many buckets that hold a stage's layers are gathered once a step."""
    if program.sharding != "parameters_kept":
        return 0
    buckets = [bucket for one in program.stages for bucket in one.buckets]
    return sum(first <= stage.last and stage.first <= last and group >= 0 for first, last, group in buckets)


def _end_table(
    ends: list[tuple[int, Channel]], partner: list[int], micro_batches: list[range], num_micro_batches: int
) -> tuple[np.ndarray, int, int]:
    """Return the ends in the form of ``Wiring``, and the numbers of slots and pairs."""
    pairs: dict[tuple[int, int], int] = {}
    rows = np.zeros((len(ends), 12), dtype=np.int64)
    slots = 0
    for e, (rank, channel) in enumerate(ends):
        sends = _sends(channel)
        route = (rank, channel.peer) if sends else (channel.peer, rank)
        turn, modulus = _turn(rank, channel, micro_batches[e], micro_batches[partner[e]])
        rows[e, : END_MODULUS + 1] = (
            rank,
            channel.stage,
            channel.kind == "B",
            sends,
            channel.peer == rank,
            turn,
            modulus,
        )
        rows[e, END_ROWS : END_ROWS + len(channel.rows)] = [high - low for low, high in channel.rows]
        rows[e, [END_PARTNER, END_PAIR]] = partner[e], pairs.setdefault(route, len(pairs))
        if sends:
            rows[e, END_SLOT] = rows[partner[e], END_SLOT] = slots
            slots += -(-num_micro_batches // modulus)
    return rows, slots, len(pairs)


def _check_numbers(
    programs: Sequence[Program],
    replicas: list[tuple[int, RankStage]],
    ends: list[tuple[int, Channel]],
    number_of: dict[tuple[int, int], int],
) -> None:
    if [p.rank for p in programs] != list(range(len(programs))):
        raise InvalidPlan(
            f"the programs are of the ranks {[p.rank for p in programs]}; expected one for each rank in order"
        )
    alike = {(p.num_micro_batches, p.batches, p.groups, p.shared, p.update_rule, p.sharding) for p in programs}
    if len(alike) > 1:
        raise InvalidPlan(
            "the programs do not agree on micro-batches, global batches, groups, ties, the update rule or the sharding"
        )
    classes = {p.row_classes for p in programs}
    if len(classes) > 1 or not 1 <= len(programs[0].row_classes) <= 2:
        raise InvalidPlan(f"the programs have the row classes {sorted(classes)}; expected the same one or two in all")
    count = len(programs[0].row_classes)
    parts: list[tuple[int, RankStage | Channel]] = [*replicas, *ends]
    for rank, part in parts:
        if len(part.rows) != count:
            raise InvalidPlan(f"rank {rank} has rows for {len(part.rows)} classes in stage {part.stage}, not {count}")
    if len(number_of) < len(replicas):
        raise InvalidPlan("a rank holds a stage twice")
    for rank, channel in ends:
        if (rank, channel.stage) not in number_of:
            raise InvalidPlan(f"rank {rank} has a channel of stage {channel.stage}, which it does not hold")


def _sends(channel: Channel) -> bool:
    return (channel.stage < channel.peer_stage) == (channel.kind == "F")


def _key(rank: int, channel: Channel) -> _Key:
    return rank, channel.kind, channel.stage, channel.peer_stage, channel.peer


def _partners(ends: list[tuple[int, Channel]]) -> list[int]:
    number_of = {_key(rank, channel): e for e, (rank, channel) in enumerate(ends)}
    partners = []
    for rank, c in ends:
        other = number_of.get((c.peer, c.kind, c.peer_stage, c.stage, rank))
        if other is None:
            raise InvalidPlan(
                f"rank {rank} exchanges {_what(c)} of stages {c.stage} and {c.peer_stage} with rank {c.peer}, "
                f"but rank {c.peer} has no such channel"
            )
        partners.append(other)
    return partners


def _what(channel: Channel) -> str:
    return "activations" if channel.kind == "F" else "gradients"


def _check_agreement(ends: list[tuple[int, Channel]], partner: list[int], stage_of: list[RankStage]) -> None:
    """Check that both ends have the same rows of the micro-batch, the same tag and the same codec."""
    for e, (rank, channel) in enumerate(ends):
        other = ends[partner[e]][1]
        mine, theirs = _rows_of(channel, stage_of[e]), _rows_of(other, stage_of[partner[e]])
        if (mine, channel.tag, channel.codec) != (theirs, other.tag, other.codec):
            raise InvalidPlan(
                f"ranks {rank} and {channel.peer} disagree about the {_what(channel)} between stages "
                f"{channel.stage} and {channel.peer_stage}: rows {mine}, tag {channel.tag}, codec {channel.codec} "
                f"here, rows {theirs}, tag {other.tag}, codec {other.codec} there"
            )


def _rows_of(channel: Channel, stage: RankStage) -> list[tuple[int, int]]:
    """Return a channel's rows, counted in the micro-batch."""
    return [
        (low + start, low + end) if start < end else (0, 0)
        for (start, end), (low, _) in zip(channel.rows, stage.rows, strict=True)
    ]


def _lists(
    ends: list[tuple[int, Channel]], number_of: dict[tuple[int, int], int], count: int
) -> tuple[np.ndarray, np.ndarray]:
    members: list[list[int]] = [[] for _ in range(4 * count)]
    for e, (rank, channel) in enumerate(ends):
        which = 2 * (channel.kind == "B") + _sends(channel)
        members[4 * number_of[rank, channel.stage] + which].append(e)
    flat = np.array([e for one in members for e in one], dtype=np.int64)
    return prefix_sums([len(one) for one in members]), flat


def _expected(
    replicas: list[tuple[int, RankStage]],
    ends: list[tuple[int, Channel]],
    partner: list[int],
    stage_of: list[RankStage],
    lists: np.ndarray,
    members: np.ndarray,
) -> np.ndarray:
    """Return the numbers of messages that a micro-batch receives, by replica, direction and row class.

    Their rows must tile the slice. From a round-robin stage one replica sends the whole slice; from another stage each
    replica sends its part.
    """
    expected = np.zeros((len(replicas), 2, 2), dtype=np.int64)
    for h, (rank, one) in enumerate(replicas):
        for direction in (0, 1):
            at = 4 * h + 2 * direction
            received = members[lists[at] : lists[at + 1]].tolist()
            for c, (low, high) in enumerate(one.rows):
                parts = sorted(ends[e][1].rows[c] for e in received if ends[e][1].rows[c][1] > ends[e][1].rows[c][0])
                in_turn = bool(received) and stage_of[partner[received[0]]].dispatch == "round_robin"
                if received and not (_all_whole(parts, high - low) if in_turn else _tile(parts, high - low)):
                    raise InvalidPlan(
                        f"the rows {parts} that rank {rank} receives {_WAYS[direction]} for stage "
                        f"{one.stage} do not tile its {high - low} rows of a micro-batch"
                    )
                expected[h, direction, c] = min(len(parts), 1) if in_turn else len(parts)
    return expected


def _tile(parts: list[tuple[int, int]], rows: int) -> bool:
    at = 0
    for low, high in parts:
        if low != at:
            return False
        at = high
    return at == rows


def _all_whole(parts: list[tuple[int, int]], rows: int) -> bool:
    return bool(parts) and all(part == (0, rows) for part in parts)


def _turn(rank: int, channel: Channel, numbers: range, other: range) -> tuple[int, int]:
    """Return (turn, modulus): both replicas hold the micro-batches m with m mod modulus = turn."""
    modulus = lcm(numbers.step, other.step)
    for m in range(modulus):
        if (m - numbers.start) % numbers.step == 0 and (m - other.start) % other.step == 0:
            return m, modulus
    raise InvalidPlan(
        f"rank {rank} in stage {channel.stage} and rank {channel.peer} in stage {channel.peer_stage} have no "
        "micro-batch in common, but a channel"
    )
