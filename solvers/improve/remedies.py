"""Remedies for an infeasible request: changes are tried in order, and the first that works is named.

ALGORITHMS B.2: recompute → more devices, for more stages or for more replicas of a stage → smaller micro-batches →
optimizer states shared by the replicas, a leaner optimizer. Every remedy named was tried: the changed problem has a
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.network import Cable, Network
from penstock.solvers.model.problem import Problem

MAX_NODE_COPIES = 8
MAX_DEVICES = 512
"""The most devices, or model-parallel groups, of a cluster that a remedy proposes."""


class Remedy(NamedTuple):
    """A changed problem, and the setting that changes it."""

    sentence: str
    problem: Problem


def find_remedy(problem: Problem, feasible: Callable[[Problem], bool]) -> str | None:
    """Return the first remedy whose problem has a plan, as a sentence; None when no remedy helps."""
    return next((r.sentence for r in remedies(problem) if feasible(r.problem)), None)


def remedies(problem: Problem) -> Iterator[Remedy]:
    """Yield changed problems, the cheapest change first, each alone; at last all but the larger cluster together."""
    if problem.recompute == "never":
        yield Remedy("allow recomputation: recompute auto (--recompute auto)", replace(problem, recompute="auto"))
    yield from _more_devices(problem)
    for size in _smaller_sizes(problem):
        changed = replace(problem, micro_batch_sizes=(size,), min_slice=min(size, problem.min_slice))
        slices = f" with min_slice {size}" if size < problem.min_slice else ""
        yield Remedy(f"smaller micro-batches: micro_batch_sizes [{size * problem.samples_per_row}]{slices}", changed)
    leaner = list(_leaner_memory(problem))
    yield from leaner
    sizes = list(_smaller_sizes(problem))[-1:]
    most = replace(problem, recompute="auto" if problem.recompute == "never" else problem.recompute)
    words = ["recompute auto"] if problem.recompute == "never" else []
    if sizes:
        most = replace(most, micro_batch_sizes=tuple(sizes), min_slice=min(sizes[0], problem.min_slice))
        named = [size * problem.samples_per_row for size in sizes]
        words.append(f"micro_batch_sizes {named} with min_slice {most.min_slice}")
    if leaner:
        memory = replace(problem.memory, headroom_bytes=0, shard_states=True, states=0)
        most = replace(most, memory=memory)
        words += [remedy.sentence.split(": ", 1)[1] for remedy in leaner]
    if len(words) > 1:
        yield Remedy(f"all of these together: {'; '.join(words)}", most)


def _leaner_memory(problem: Problem) -> Iterator[Remedy]:
    """Yield remedies with optimizer states shared by the replicas, an optimizer without states, and no headroom."""
    rules = problem.memory
    if rules.state_factor and not rules.shard_states:
        changed = replace(problem, memory=replace(rules, shard_states=True))
        yield Remedy("share the optimizer states: memory.optimizer_sharding over_replicas", changed)
    if rules.states:
        changed = replace(problem, memory=replace(rules, states=0))
        yield Remedy("an optimizer without states: memory.optimizer sgd", changed)
    if rules.headroom_bytes:
        changed = replace(problem, memory=replace(rules, headroom_bytes=0))
        yield Remedy("no headroom: memory.headroom_bytes 0", changed)


def _smaller_sizes(problem: Problem) -> Iterator[int]:
    """Yield half of the smallest size, and so on to 1; without sizes all from ``min_slice`` up have been tried."""
    size = min(problem.micro_batch_sizes, default=problem.min_slice)
    while size > 1:
        size //= 2
        yield size


def _more_devices(problem: Problem) -> Iterator[Remedy]:
    """Yield remedies with 1, 3, 7 … further copies of the cluster's last node, while layers can use them."""
    gpus, choice = problem.real or problem, problem.choice
    if gpus.network.matrix_bytes_per_s is not None:
        return
    last = gpus.network.node_names[-1]
    hung_on = any(cable.a == last or cable.b == last for cable in gpus.network.cables)
    size, each = len(gpus.nodes()[-1]), len(problem.cells[-1]) if problem.cells else 1
    copies = 1
    while hung_on and copies <= MAX_NODE_COPIES and gpus.num_devices + copies * size <= MAX_DEVICES * each:
        if (gpus.num_devices + (copies // 2) * size) // each >= problem.num_layers:
            return
        kind = gpus.devices[-1].kind
        number = copies * size
        nodes, devices = "s" if copies > 1 else "", "s" if number > 1 else ""
        wider = extended(gpus, copies)
        with suppress(UnsupportedRequest):  # more GPU groups than samples, where all of them are replicas of one stage
            yield Remedy(
                f"more devices: {copies} more node{nodes} like {last!r} ({number} device{devices} of kind {kind!r})",
                wider if problem.real is None or choice is None else contract(wider, choice),
            )
        copies = 2 * copies + 1


def extended(problem: Problem, copies: int) -> Problem:
    """Return the problem with ``copies`` further nodes like the last one, wired like it."""
    network = problem.network
    last = network.node_names[-1]
    model = [d for d in problem.devices if d.node == len(network.node_names) - 1]
    names, nodes, insides = list(network.device_names), list(network.node_names), list(network.insides)
    node_of, cables, devices = list(network.node_of), list(network.cables), list(problem.devices)
    for copy in range(1, copies + 1):
        renamed = {d.name: f"{d.name}+{copy}" for d in model} | {last: f"{last}+{copy}"}
        for device in model:
            names.append(renamed[device.name])
            node_of.append(len(nodes))
            devices.append(replace(device, name=renamed[device.name], node=len(nodes)))
        nodes.append(renamed[last])
        insides.append(network.insides[-1])
        cables += [
            Cable(renamed.get(c.a, c.a), renamed.get(c.b, c.b), *c[2:])
            for c in network.cables
            if c.a in renamed or c.b in renamed
        ]
    wider = Network(tuple(names), tuple(nodes), tuple(node_of), tuple(insides), tuple(cables))
    assert len(np.unique(wider.device_names)) == len(devices)
    return replace(problem, network=wider, devices=tuple(devices))
