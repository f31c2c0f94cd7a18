"""Chains of layers on servers around one switch, as problems: inputs of the solvers' and simulator's benchmarks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import Device, Measured, MemoryRules, NetworkRules, Problem
from penstock.solvers.model.update_rules import UpdateRule

NO_BUCKETS = 2**60


def star(
    nodes: tuple[int, ...],
    inside_bytes_per_s: int,
    between_bytes_per_s: int,
    *,
    form: Literal["pairs", "ports", "bus"] = "pairs",
    full_duplex: bool = True,
) -> Network:
    """Build servers of these numbers of devices, each with one cable to a switch, or a lone server without a cable."""
    hosts = tuple(f"n{i}" for i in range(len(nodes)))
    cables = tuple(Cable(host, "switch", between_bytes_per_s, 0, full_duplex) for host in hosts)
    return Network(
        tuple(f"n{i}/{j}" for i, size in enumerate(nodes) for j in range(size)),
        hosts,
        tuple(i for i, size in enumerate(nodes) for _ in range(size)),
        (Inside(form, inside_bytes_per_s, 0, full_duplex),) * len(nodes),
        cables if len(nodes) > 1 else (),
    )


def chain(
    network: Network,
    forward_ns: np.ndarray,
    sent_bytes: np.ndarray,
    parameter_bytes: np.ndarray,
    *,
    batch: int,
    sizes: tuple[int, ...],
    rules: NetworkRules,
    backward_ns: np.ndarray | None = None,
    weight_ns: np.ndarray | None = None,
    stash_bytes: np.ndarray | None = None,
    memory_bytes: int = 2**50,
    memory: MemoryRules = MemoryRules(1, 2, False, 0, True),
    recompute: Literal["never", "auto", "always"] = "never",
    update_rules: frozenset[UpdateRule] = frozenset({"synchronous"}),
) -> Problem:
    """Build a problem of layers measured with one sample; backwards take twice the forwards by default."""
    none = np.zeros_like(forward_ns)
    prefix = np.concatenate(([0], np.cumsum(parameter_bytes)))
    measured = Measured(
        1,
        forward_ns,
        2 * forward_ns if backward_ns is None else backward_ns,
        forward_ns if weight_ns is None else weight_ns,
        none if stash_bytes is None else stash_bytes,
        none,
    )
    return Problem(
        layer_names=tuple(f"layer{i}" for i in range(len(forward_ns))),
        parameter_bytes=prefix,
        trainable_bytes=prefix,
        update_ns=np.zeros(len(forward_ns) + 1, dtype=np.int64),
        forward_bytes=sent_bytes,
        backward_bytes=sent_bytes,
        boundary_tensors=tuple((("x", int(size), int(size)),) for size in sent_bytes),
        cuttable=np.ones(len(forward_ns) - 1, dtype=bool),
        shared_parameters=(),
        measured={"gpu": (measured,)},
        linear=True,
        kind_source={"gpu": ("gpu", 1.0)},
        devices=tuple(
            Device(name, node, "gpu", memory_bytes, 0, None)
            for name, node in zip(network.device_names, network.node_of, strict=True)
        ),
        network=network,
        global_batch_size=batch,
        micro_batch_sizes=sizes,
        min_slice=1,
        memory=memory,
        rules=rules,
        recompute=recompute,
        expected_error=0.0,
        update_rules=update_rules,
    )


def line(stages: int, batches: int, seed: int, *, limited: bool, transfers: bool = True) -> tuple[Problem, Allocation]:
    """Build one layer per stage on half-duplex channels.

    F is 60 to 140, B = 2 F, transfers take 20 to 120 ns both ways. ``limited``: memory for S - s micro-batches in
    flight on stage s, otherwise for all (BOUNDS Part II, 3: the hard class).
    """
    draw = np.random.default_rng(seed + 1000 * stages + batches)
    forward = draw.integers(60, 141, stages)
    sent = draw.integers(20, 121, stages - 1) if transfers else np.zeros(stages - 1, dtype=np.int64)
    each = 1000
    problem = chain(
        star((1,) * stages, 10**9, 10**9),
        forward,
        sent,
        np.zeros(stages, dtype=np.int64),
        batch=batches,
        sizes=(1,),
        rules=NetworkRules(False, "half", "madpipe", "flat", NO_BUCKETS, True),
        stash_bytes=np.full(stages, each, dtype=np.int64),
        memory=MemoryRules(1, 2, False, 0, False),
    )
    room = [stages - s if limited else batches for s in range(stages)]
    devices = tuple(
        replace(device, memory_bytes=each * most) for device, most in zip(problem.devices, room, strict=True)
    )
    layers = tuple(Stage(s, s, (s,)) for s in range(stages))
    return replace(problem, devices=devices), single_pipeline(layers, batches)


def unequal(layers: int, seed: int, boundary_spread: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return forward times, bytes over the cuts and parameters of unequal layers, drawn log-normally."""
    draw = np.random.default_rng(seed)
    forward = np.exp(draw.normal(14.5, 0.4, layers)).astype(np.int64)
    parameters = np.exp(draw.normal(16.5, 0.6, layers)).astype(np.int64)
    sent = np.exp(draw.normal(13.5, boundary_spread, layers - 1)).astype(np.int64)
    return forward, sent, parameters
