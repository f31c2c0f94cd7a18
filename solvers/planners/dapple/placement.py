"""DAPPLE's three placement policies (section IV-C; ALGORITHMS 2.4) and the occupancies they can reach.

A *fresh* server has no used device; a *used* server has used and free devices. Policy ``fresh`` fills fresh servers
first, ``append`` fills used servers first, ``scatter`` takes one device at a time from all used servers (from all fresh
servers when no server is used). R-7: a policy whose servers do not suffice goes on with the others.

Devices of a server are taken in index order, so an occupancy is a count per server. Servers of one class are
interchangeable, so their counts are kept in falling order: of several used servers the most used comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Policy = Literal["fresh", "append", "scatter"]
POLICIES: tuple[Policy, ...] = ("fresh", "append", "scatter")
Counts = tuple[int, ...]


def take(policy: Policy, sizes: Counts, used: Counts, need: int) -> Counts | None:
    """Return the number of devices that a policy takes from each server; None where the policy cannot."""
    fresh = [n for n, count in enumerate(used) if count == 0]
    partly = [n for n, count in enumerate(used) if 0 < count < sizes[n]]
    if policy == "scatter":
        return _one_by_one([partly or fresh, [*partly, *fresh]], sizes, used, need)
    return _fill(fresh + partly if policy == "fresh" else partly + fresh, sizes, used, need)


def _fill(order: list[int], sizes: Counts, used: Counts, need: int) -> Counts | None:
    counts = [0] * len(sizes)
    for n in order:
        counts[n] = min(sizes[n] - used[n], need)
        need -= counts[n]
    return None if need else tuple(counts)


def _one_by_one(pools: list[list[int]], sizes: Counts, used: Counts, need: int) -> Counts | None:
    counts = [0] * len(sizes)
    for pool in pools:
        while need:
            open_servers = [n for n in pool if used[n] + counts[n] < sizes[n]]
            if not open_servers:
                break
            for n in open_servers[:need]:
                counts[n] += 1
            need -= min(need, len(open_servers))
    return None if need else tuple(counts)


@dataclass(frozen=True, eq=False)
class Geometry:
    """Every occupancy that the policies reach, and the stages that lead from one to the next.

    A transition places a stage of ``replicas[t]`` devices: ``take[t]`` from each server of occupancy ``source[t]``,
    whose servers then move to their places in occupancy ``target[t]`` (place p was server ``order[t, p]``).
    Transitions of state s are ``first[s]`` … ``first[s + 1] - 1``; state 0 is empty. No two transitions of a state
    are equal up to interchangeable servers, so a transition is also the memo key *occupancy and last stage's set*.
    """

    states: np.ndarray
    used: np.ndarray
    first: np.ndarray
    source: np.ndarray
    target: np.ndarray
    replicas: np.ndarray
    take: np.ndarray
    order: np.ndarray


@lru_cache(maxsize=32)
def geometry(
    sizes: Counts, classes: Counts, replicas: Counts, policies: tuple[Policy, ...], limit: int
) -> Geometry | None:
    """Return all reachable occupancies for stages with these replica counts.

    None if more than ``limit`` transitions would be needed.
    """
    total = sum(sizes)
    index: dict[Counts, int] = {(0,) * len(sizes): 0}
    states = list(index)
    rows: list[tuple[int, int, int, Counts, Counts]] = []
    first = [0]
    for state in states:
        seen: set[tuple[tuple[int, int, int], ...]] = set()
        for need in replicas:
            if need > total - sum(state):
                break
            for counts in {take(p, sizes, state, need): None for p in policies}:
                if counts is None:
                    continue
                mark = tuple(sorted(zip(classes, state, counts, strict=True)))
                if mark in seen:
                    continue
                seen.add(mark)
                order = _order(classes, state, counts)
                after = tuple(state[n] + counts[n] for n in order)
                if after not in index:
                    index[after] = len(states)
                    states.append(after)
                rows.append((index[state], index[after], need, counts, order))
                if len(rows) > limit:
                    return None
        first.append(len(rows))
    return Geometry(
        states=np.asarray(states, dtype=np.int32),
        used=np.asarray([sum(s) for s in states], dtype=np.int64),
        first=np.asarray(first, dtype=np.int64),
        source=np.asarray([r[0] for r in rows], dtype=np.int64),
        target=np.asarray([r[1] for r in rows], dtype=np.int64),
        replicas=np.asarray([r[2] for r in rows], dtype=np.int64),
        take=np.asarray([r[3] for r in rows], dtype=np.int32).reshape(len(rows), len(sizes)),
        order=np.asarray([r[4] for r in rows], dtype=np.int32).reshape(len(rows), len(sizes)),
    )


def _order(classes: Counts, state: Counts, counts: Counts) -> Counts:
    """Return the server of each place of the next occupancy: within a class the most used servers come first."""
    ranked: dict[int, list[int]] = {}
    for n, kind in enumerate(classes):
        ranked.setdefault(kind, []).append(n)
    for group in ranked.values():
        group.sort(key=lambda n: (-state[n] - counts[n], -counts[n], n))
    turn = {kind: iter(group) for kind, group in ranked.items()}
    return tuple(next(turn[kind]) for kind in classes)
