"""Explanations why ranks hang, for the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from simulated_cuda.entries import Entry, Gathers, Joins, Makes, words

if TYPE_CHECKING:
    from simulated_cuda.engine import RankState, Run


def stuck(run: Run) -> Iterator[str]:
    """Yield a sentence for each rank that hangs: what its host waits for, what runs, and what cannot start."""
    for rank in run.ranks:
        at_end = rank.at == len(rank.log)
        left = list(rank.unfinished())
        if at_end and not left:
            continue
        host = "its host is through" if at_end else f"its host is {_host_words(run, rank)}"
        parts = [f"{words(rank.log[i])} runs, {_missing(run, rank.log[i])}" for i in left if i in rank.running]
        parts += [
            f"queue {number} begins with {words(rank.log[queue[0]])}: {run.holds(rank, queue[0])}"
            for number, queue in enumerate(rank.queues)
            if queue
        ]
        yield f"rank {rank.number} hangs: {'; '.join([host, *parts])}"


def _host_words(run: Run, rank: RankState) -> str:
    entry = rank.log[rank.at]
    text = words(entry)
    if isinstance(entry, Gathers):
        met = run.met[entry.group, entry.number]
        missing = [other for other in met[rank.number].members if other not in met]
        text += f", which ranks {missing} have not entered"
    if isinstance(entry, Makes):
        missing = [other for other in entry.members if len(run.created[other]) < len(run.created[rank.number])]
        text += f", which ranks {missing} have not come to"
    return text


def _missing(run: Run, entry: Entry) -> str:
    if not isinstance(entry, Joins):
        return "which will end"
    there = run.kernels[entry.communicator, entry.number].entries
    missing = []
    for other in run.members[entry.communicator]:
        if other not in there:
            is_launched = any(
                isinstance(one, Joins) and (one.communicator, one.number) == (entry.communicator, entry.number)
                for one in run.ranks[other].log[: run.ranks[other].at]
            )
            missing.append(f"{other} (which {'has not started' if is_launched else 'has not launched'} its own)")
    return f"waiting for rank {', '.join(missing)}"
