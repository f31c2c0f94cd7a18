"""The order of messages on each directed edge, for a transport without tags: both ends must have the same order.

An edge is a (sending rank, receiving rank). Its messages are the messages of all channels between the two, in the order
in which the programs issue them (EXECUTOR C.2). Standard library and ``schemas`` only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import Channel, Instruction, Program

Edge = tuple[int, int]
Messages = dict[Edge, list[str]]

_ENDS = {"SEND_F": True, "SEND_B": True, "RECV_F": False, "RECV_B": False}


def messages(program: Program) -> Messages:
    """Return a rank's messages on each of its edges, in the program's order.

    ``F 0>1 m`` is a forward message of micro-batch m from stage 0 to stage 1.
    """
    by_edge: Messages = {}
    for one in program.instructions():
        sends = _ENDS.get(one.kind)
        if sends is None:
            continue
        channel = program.channels[one.channel]
        low, high = channel.rows[program.row_class(one.micro_batch % program.num_micro_batches)]
        if high > low:
            edge = (program.rank, channel.peer) if sends else (channel.peer, program.rank)
            by_edge.setdefault(edge, []).append(_word(channel, one, sends))
    return by_edge


def _word(channel: Channel, one: Instruction, sends: bool) -> str:
    source, target = (channel.stage, channel.peer_stage) if sends else (channel.peer_stage, channel.stage)
    return f"{channel.kind} {source}>{target} {one.micro_batch}"


def digests(local: Messages) -> dict[Edge, str]:
    """Return one short text per edge, which differs if the messages or their order differ."""
    return {
        edge: f"{len(words)}:{hashlib.sha256(' '.join(words).encode()).hexdigest()}" for edge, words in local.items()
    }


def differing_edge(everyone: Sequence[Mapping[Edge, str]]) -> Edge | None:
    """Return the first edge whose two ranks have different messages; ``everyone``: the digests of each rank."""
    edges = sorted({edge for each in everyone for edge in each})
    return next((edge for edge in edges if everyone[edge[0]].get(edge) != everyone[edge[1]].get(edge)), None)


def refuse_order(edge: Edge, sent: Sequence[str], received: Sequence[str]) -> InvalidPlan:
    """Create the error that names the first message on which the ends of an edge disagree."""
    count = min(len(sent), len(received))
    number = next((k for k in range(count) if sent[k] != received[k]), count)
    here = sent[number] if number < len(sent) else "nothing"
    there = received[number] if number < len(received) else "nothing"
    return InvalidPlan(
        f"rank {edge[0]} sends {len(sent)} messages to rank {edge[1]}, which receives {len(received)}: number {number} "
        f"is {here!r} (direction, stages, micro-batch) on rank {edge[0]} and {there!r} on rank {edge[1]}; "
        "NCCL has no tags",
        remedy="start all ranks with programs that were lowered together: submit the run or export the bundle again",
    )


def edges(everyone: Sequence[Mapping[Edge, str]]) -> list[Edge]:
    """Return all edges of a run, in the one order in which all ranks create their communicators."""
    return sorted({edge for each in everyone for edge in each})
