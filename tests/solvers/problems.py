"""Small problems for tests: one sample is one row, 1e9 bytes/s make one byte one nanosecond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import Device, Measured, MemoryRules, NetworkRules, Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.planners.catalogue import PLANNERS

GIGABYTE_PER_S = 1_000_000_000

OF_ANY_TRAINER = {name: row for name, row in PLANNERS.items() if row.proposals is None or not row.target}
"""The planners that ``auto`` runs without a target; tests/layouts covers the remaining one."""


def make_network(
    nodes: Sequence[int],
    *,
    inside_bytes_per_s: int = GIGABYTE_PER_S,
    between_bytes_per_s: int = GIGABYTE_PER_S,
    latency_ns: int = 0,
    form: Literal["pairs", "ports", "bus"] = "pairs",
    full_duplex: bool = True,
    lanes: int = 1,
) -> Network:
    """Build nodes of so many devices around one switch; node i is ``n<i>``, its devices ``n<i>/<j>``."""
    names = tuple(f"n{i}/{j}" for i, size in enumerate(nodes) for j in range(size))
    hosts = tuple(f"n{i}" for i in range(len(nodes)))
    inside = Inside(form, inside_bytes_per_s, latency_ns, full_duplex)
    return Network(
        device_names=names,
        node_names=hosts,
        node_of=tuple(i for i, size in enumerate(nodes) for _ in range(size)),
        insides=(inside,) * len(nodes),
        cables=tuple(Cable(host, "switch", between_bytes_per_s, latency_ns, full_duplex, lanes) for host in hosts),
    )


def make_problem(
    forward_ns: Sequence[int],
    backward_ns: Sequence[int] | None = None,
    boundary_bytes: int | Sequence[int] = 0,
    parameter_bytes: int | Sequence[int] = 0,
    *,
    weight_ns: Sequence[int] | None = None,
    backward_bytes: int | Sequence[int] | None = None,
    stash_bytes: int | Sequence[int] = 0,
    workspace_bytes: int | Sequence[int] = 0,
    update_ns: int | Sequence[int] = 0,
    update_workspace_bytes: int | Sequence[int] | None = None,
    update_in_turn: bool = False,
    trainable_bytes: int | Sequence[int] | None = None,
    nodes: Sequence[int] = (4,),
    network: Network | None = None,
    kinds: Sequence[str] | None = None,
    speed: dict[str, float] | None = None,
    memory_bytes: int | Sequence[int] = 2**40,
    context_bytes: int = 0,
    inside_bytes_per_s: int = GIGABYTE_PER_S,
    between_bytes_per_s: int = GIGABYTE_PER_S,
    latency_ns: int = 0,
    form: Literal["pairs", "ports", "bus"] = "pairs",
    full_duplex: bool = True,
    lanes: int = 1,
    global_batch_size: int = 4,
    micro_batch_sizes: Sequence[int] = (1,),
    min_slice: int = 1,
    shared: bool = False,
    channel: Literal["half", "full", "none"] = "half",
    transfer: Literal["nic", "spp", "dapple", "madpipe"] = "madpipe",
    all_reduce: Literal["flat", "hierarchical", "dapple"] = "flat",
    bucket_bytes: int = 25_000_000,
    overlap_all_reduce: bool = True,
    gradient_factor: int = 1,
    state_factor: int = 0,
    shard_states: bool = False,
    headroom_bytes: int = 0,
    count_buffers: bool = True,
    recompute: Literal["never", "auto", "always"] = "never",
    cuttable: Sequence[bool] | None = None,
    measured_rows: int = 1,
    linear: bool = True,
    shared_parameters: tuple[tuple[str, tuple[int, ...], int], ...] = (),
) -> Problem:
    """Build a problem of ``len(forward_ns)`` layers; backwards take twice as long as forwards by default.

    Layer times are for ``measured_rows`` samples; boundaries are bytes per sample. ``kinds`` names each device's
    kind (one kind "cpu" by default). ``speed`` says how many times faster than "cpu" a kind is.
    """
    count = len(forward_ns)
    backward = [2 * f for f in forward_ns] if backward_ns is None else list(backward_ns)
    network = network or make_network(
        nodes,
        inside_bytes_per_s=inside_bytes_per_s,
        between_bytes_per_s=between_bytes_per_s,
        latency_ns=latency_ns,
        form=form,
        full_duplex=full_duplex,
        lanes=lanes,
    )
    size = len(network.device_names)
    kinds = kinds or ["cpu"] * size
    memory = _many(memory_bytes, size)
    parameters = _many(parameter_bytes, count)
    forward_bytes = _many(boundary_bytes, count - 1)
    measured = Measured(
        rows=measured_rows,
        forward_ns=_array(forward_ns),
        backward_ns=_array(backward),
        weight_ns=_array([b // 2 for b in backward] if weight_ns is None else weight_ns),
        stash_bytes=_array(_many(stash_bytes, count)),
        workspace_bytes=_array(_many(workspace_bytes, count)),
    )
    backs = forward_bytes if backward_bytes is None else _many(backward_bytes, count - 1)
    return Problem(
        layer_names=tuple(f"layer{i}" for i in range(count)),
        parameter_bytes=_prefix(parameters),
        trainable_bytes=_prefix(parameters if trainable_bytes is None else _many(trainable_bytes, count)),
        update_ns=_prefix(_many(update_ns, count)),
        forward_bytes=_array(forward_bytes),
        backward_bytes=_array(backs),
        boundary_tensors=tuple((("x", f, b),) for f, b in zip(forward_bytes, backs, strict=True)),
        cuttable=np.asarray([True] * (count - 1) if cuttable is None else list(cuttable), dtype=bool),
        shared_parameters=shared_parameters,
        measured={"cpu": (measured,)},
        linear=linear,
        kind_source={kind: ("cpu", (speed or {}).get(kind, 1.0)) for kind in {"cpu", *kinds}},
        devices=tuple(
            Device(name, network.node_of[d], kinds[d], memory[d], context_bytes, None)
            for d, name in enumerate(network.device_names)
        ),
        network=network,
        global_batch_size=global_batch_size,
        micro_batch_sizes=tuple(micro_batch_sizes),
        min_slice=min_slice,
        memory=MemoryRules(gradient_factor, state_factor, shard_states, headroom_bytes, count_buffers),
        rules=NetworkRules(shared, channel, transfer, all_reduce, bucket_bytes, overlap_all_reduce),
        recompute=recompute,
        expected_error=0.0,
        update_workspace_bytes=None if update_workspace_bytes is None else _array(_many(update_workspace_bytes, count)),
        update_in_turn=update_in_turn,
    )


def chain(groups: Sequence[tuple[int, Sequence[int]]], num_micro_batches: int, **kw: object) -> Allocation:
    """Build stages of so many layers on these devices, in order: ``chain([(2, [0]), (1, [1, 2])], 4)``."""
    stages, first = [], 0
    for layers, devices in groups:
        stages.append(Stage(first, first + layers - 1, tuple(devices), **kw))  # type: ignore[arg-type]
        first += layers
    return single_pipeline(tuple(stages), num_micro_batches)


def straight(problem: Problem, num_micro_batches: int) -> Allocation:
    """Build one layer per stage, stage i on device i."""
    return chain([(1, [i]) for i in range(problem.num_layers)], num_micro_batches)


def warmup_orders(allocation: Allocation, warmup: Sequence[int], name: str = "test") -> Orders:
    """Build rows of K_i forwards, then one backward and one forward in turn (ALGORITHMS 2.6), one row per stage."""
    rows = []
    for s, stage in enumerate(allocation.stages):
        batches = list(allocation.micro_batches(s))
        ahead = min(warmup[s], len(batches))
        operations = [(FORWARD, s, m) for m in batches[:ahead]]
        for i, m in enumerate(batches):
            operations.append((BACKWARD, s, m))
            if i + ahead < len(batches):
                operations.append((FORWARD, s, batches[i + ahead]))
        rows.append(Row(stage.devices, as_operations(operations)))
    return Orders(name, tuple(rows), tuple(warmup))


def gpipe(allocation: Allocation) -> Orders:
    """Build orders of all forwards, then all backwards."""
    return warmup_orders(allocation, [allocation.num_micro_batches] * len(allocation.stages), "gpipe")


def early_backward(allocation: Allocation, policy: Literal["A", "B"] = "A") -> Orders:
    """Build orders of DAPPLE's policies: S - i (A) or 2 (S - i) - 1 (B) warm-up forwards."""
    count = len(allocation.stages)
    ahead = [count - s if policy == "A" else 2 * (count - s) - 1 for s in range(count)]
    return warmup_orders(allocation, ahead, f"dapple-{policy}")


def as_operations(operations: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Return the operations as an (n, 3) int32 array."""
    return np.asarray(operations, dtype=np.int32).reshape(-1, 3)


def _many(value: int | Sequence[int], count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value)


def _array(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def _prefix(values: Sequence[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(_array(values)))).astype(np.int64)


def with_just_enough_memory(problem: Problem, timeline: Timeline) -> Problem:
    """Return the same problem on devices with exactly as many bytes as the plan's peaks need."""
    devices = list(problem.devices)
    for device, use in timeline.uses.items():
        need = use.memory.total + problem.memory.headroom_bytes
        devices[device] = replace(devices[device], memory_bytes=need)
    return replace(problem, devices=tuple(devices))
