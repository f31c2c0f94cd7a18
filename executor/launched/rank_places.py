"""The assignment of ranks to processes: by node and number there, never by the launcher's order. Loads no torch.

Every process computes it from the announcements of all, so all come to the same result or the same error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.schemas.errors import Conflict, UnsupportedRequest
from penstock.schemas.ranks.bundle import JobBundle, natural

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Presence:
    """The announcement of a process: its place, and its arguments.

    ``machine``: a text that is equal on all processes of one machine. ``address``: the address at which others reach
    it. ``bundle``: the digest of its file. ``orders``: the training options of the command line. ``opens_store``: the
    others meet at this process.
    """

    node: str
    local_rank: int
    machine: str
    address: str
    bundle: str
    orders: Mapping[str, Any]
    opens_store: bool = False


def refuse_differences(present: Sequence[Presence]) -> None:
    """Raise Conflict when processes have different bundles or command lines, with two of them."""
    first = present[0]
    for number, one in enumerate(present):
        if one.bundle != first.bundle:
            raise Conflict(
                f"process 0 (on {first.node}) and process {number} (on {one.node}) have different bundles, of the "
                f"digests {first.bundle[:12]} and {one.bundle[:12]}",
                remedy="give all processes the same file, such as one on a file system that all nodes share",
            )
        differing = sorted(key for key in first.orders if one.orders.get(key) != first.orders[key])
        if differing:
            name = differing[0]
            raise Conflict(
                f"process 0 (on {first.node}) and process {number} (on {one.node}) were started differently: {name} is "
                f"{first.orders[name]!r} and {one.orders.get(name)!r}",
                remedy="start all with the same command line",
            )


def ranks_of_processes(bundle: JobBundle, present: Sequence[Presence], *, any_nodes: bool = False) -> list[int]:
    """Return the rank of each process, in the launcher's order.

    Local process k of a node takes the k-th of the node's devices that the plan uses. ``any_nodes``: nodes that the
    plan does not name replace nodes of the plan that are absent. They are taken in the order of their names; each
    replaces the first absent node, in the order of ranks, that needs as many processes as it has. Raises Conflict for
    two processes in one place, and UnsupportedRequest where nodes or counts differ from the plan's.
    """
    processes = _by_node(present)
    wanted = bundle.nodes()
    plays = _plan_names(processes, wanted)
    strangers = sorted((node for node in processes if node not in plays), key=natural)
    absent = [node for node in wanted if node not in plays.values()]
    if strangers and not any_nodes:
        raise _strangers(strangers, absent, processes, wanted)
    for node in strangers:
        fitting = [name for name in absent if len(wanted[name]) == len(processes[node])]
        if not fitting:
            raise _cannot_stand_in(node, absent, processes, wanted)
        plays[node] = fitting[0]
        absent.remove(fitting[0])
    if absent:
        raise UnsupportedRequest(
            f"the launcher has started no process on {_listed(absent)}, where the plan has ranks, but processes on "
            f"{_counted(processes)}",
            remedy=_remedy(wanted),
        )
    ranks = [0] * len(present)
    for node, name in plays.items():
        if len(processes[node]) != len(wanted[name]):
            raise _miscounted(node, len(processes[node]), len(wanted[name]), wanted)
        for process, rank in zip(processes[node], wanted[name], strict=True):
            ranks[process] = rank
    return ranks


def _by_node(present: Sequence[Presence]) -> dict[str, list[int]]:
    """Return the processes of each node in the order of their local ranks."""
    seen: dict[tuple[str, int], int] = {}
    groups: dict[str, list[int]] = defaultdict(list)
    for number, one in enumerate(present):
        place = (one.node, one.local_rank)
        if place in seen:
            raise Conflict(
                f"processes {seen[place]} and {number} both have local rank {one.local_rank} on {one.node}",
                remedy="have the launcher set LOCAL_RANK (srun: SLURM_LOCALID), or NODE_NAME where hosts share a name",
            )
        seen[place] = number
        groups[one.node].append(number)
    return {node: sorted(group, key=lambda number: present[number].local_rank) for node, group in groups.items()}


def _plan_names(nodes: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Return the plan's names of nodes: equal names, or names equal up to the first dot where that is unique."""
    matches = {node: node for node in nodes if node in set(wanted)}
    shorts: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, names in enumerate((nodes, wanted)):
        for name in names:
            if name not in matches:
                shorts[name.partition(".")[0]][side].append(name)
    return matches | {here[0]: there[0] for here, there in shorts.values() if len(here) == len(there) == 1}


def _strangers(
    strangers: Sequence[str],
    absent: Sequence[str],
    processes: Mapping[str, Sequence[int]],
    wanted: Mapping[str, Sequence[int]],
) -> UnsupportedRequest:
    return UnsupportedRequest(
        f"the plan does not name {_listed(strangers)}: processes were started on {_counted(processes)}, and the plan "
        f"has ranks on {_counted(wanted)}" + (f", of which {_listed(absent)} got none" if absent else ""),
        remedy=f"request the plan's nodes (sbatch --nodelist={','.join(list(wanted)[:_SHOWN])}"
        f"{',…' if len(wanted) > _SHOWN else ''}); or plan for the nodes that you have (penstock place --free "
        f"{','.join(list(processes)[:_SHOWN])}{',…' if len(processes) > _SHOWN else ''}); or add --any-nodes, so that "
        "these nodes replace the plan's; or set NODE_NAME on each host to the node's name in the plan",
    )


def _cannot_stand_in(
    node: str, absent: Sequence[str], processes: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]
) -> UnsupportedRequest:
    left = _counted({name: wanted[name] for name in absent}) if absent else "none"
    return UnsupportedRequest(
        f"{node} has {len(processes[node])} processes and can replace none of the plan's nodes that are left "
        f"({left}); processes were started on {_counted(processes)}",
        remedy=_remedy(wanted),
    )


def _miscounted(node: str, has: int, wants: int, wanted: Mapping[str, Sequence[int]]) -> UnsupportedRequest:
    return UnsupportedRequest(
        f"the launcher has started {has} process{'es' if has > 1 else ''} on {node}, where the plan has {wants} "
        f"rank{'s' if wants > 1 else ''}",
        remedy=_remedy(wanted),
    )


def _remedy(wanted: Mapping[str, Sequence[int]]) -> str:
    counts = {len(ranks) for ranks in wanted.values()}
    if len(counts) == 1:
        count = counts.pop()
        return (
            f"start {count} on each of {_listed(list(wanted))} (sbatch --nodes={len(wanted)} "
            f"--ntasks-per-node={count}, torchrun --nnodes={len(wanted)} --nproc-per-node={count})"
        )
    return f"start {_counted(wanted)} (srun --distribution=arbitrary with SLURM_HOSTFILE)"


def _counted(groups: Mapping[str, Sequence[int]]) -> str:
    return _listed([f"{node} ({len(group)})" for node, group in groups.items()])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
