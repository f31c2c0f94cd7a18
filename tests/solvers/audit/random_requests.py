"""Random requests for the audit of claims: network, memory, recomputation, ties, pins and update rules are drawn.

``request_of`` returns the same request for a seed everywhere. One seed in four is *small*: at most four layers on three
devices and a few micro-batches, so that its plans can be listed (``plan_lists``).
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import get_args

import numpy as np
from drawn_tables import with_table
from problems import make_network, make_problem

from penstock.convert.trainers import TRAINERS
from penstock.solvers.model.problem import CodecSpeed, Pin, Problem
from penstock.solvers.model.trainer_limits import Span, Within
from penstock.solvers.model.update_rules import UpdateRule

ONE_IN = 4
"""One seed in this many is small."""
SMALL_NODES = ((1,), (2,), (1, 1), (3,), (2, 1), (1, 1, 1))
NODES = ((2,), (1, 1), (3,), (2, 2), (4,), (1, 1, 1, 1), (3, 1), (2, 2, 2), (4, 2), (4, 4), (1, 2, 3))
RULES: tuple[UpdateRule, ...] = get_args(UpdateRule)


def is_small(seed: int) -> bool:
    """Return whether plans of all kinds are listed for the seed's request."""
    return seed % ONE_IN == 0


def request_of(seed: int) -> Problem:
    """Return the request of a seed; one in three has a table of measured collectives."""
    problem = untabled_request_of(seed)
    return with_table(problem, seed, 2000, 2000) if random.Random(f"has a table {seed}").random() < 1 / 3 else problem


def untabled_request_of(seed: int) -> Problem:
    """Return the request of a seed without a table."""
    rng = random.Random(f"request {seed}")
    small = is_small(seed)
    problem = _plain(rng, small, lanes=1 + seed // ONE_IN % 3)
    if rng.random() < 0.5:
        problem = _with_little_memory(rng, problem)
    problem = replace(problem, update_rules=_rules(rng))
    if rng.random() < 0.3:
        problem = replace(problem, pins=_pins(rng, problem))
    draw = rng.random()
    if draw < 0.1 and problem.num_layers > 1:
        return _encodable(rng, problem)
    if draw < 0.2 and "synchronous" in problem.update_rules and problem.num_layers > 1:
        return replace(problem, within=_limits(rng, problem.num_layers))
    return _in_spps_model(rng, problem) if draw > 0.95 else problem


def _plain(rng: random.Random, small: bool, lanes: int) -> Problem:
    """Draw a request without pins, codecs and targets, with more memory than plans can need."""
    layers = rng.randint(1, 4) if small else rng.randint(2, 8)
    nodes = rng.choice(SMALL_NODES if small else NODES)
    scale = rng.choice([1, 3, 20])
    samples = rng.randint(2, 5) if small else rng.choice([3, 4, 6, 7, 8, 12])
    mixed = rng.random() < 0.3
    forward = [rng.randint(1, 60) for _ in range(layers)]
    backward = [rng.randint(1, 120) for _ in range(layers)]
    return make_problem(
        forward,
        backward,
        [rng.randint(0, 20) * scale for _ in range(layers - 1)],
        [rng.randint(0, 40) * scale for _ in range(layers)],
        weight_ns=[rng.randint(0, each) for each in backward],
        backward_bytes=[rng.choice([0, rng.randint(0, 20) * scale]) for _ in range(layers - 1)],
        stash_bytes=[rng.randint(0, 60) for _ in range(layers)],
        workspace_bytes=rng.choice([0, 0, 20]),
        update_ns=[rng.choice([0, rng.randint(0, 9)]) for _ in range(layers)],
        network=_network(rng, nodes, lanes),
        kinds=[rng.choice(["cpu", "quick"]) for _ in range(sum(nodes))] if mixed else None,
        speed={"quick": 1.7} if mixed else None,
        context_bytes=rng.choice([0, 10]),
        global_batch_size=samples,
        micro_batch_sizes=_sizes(rng, samples),
        min_slice=rng.choice([1, 1, 1, 2]) if samples > 3 else 1,
        shared=rng.random() < 0.4,
        channel=rng.choice(["half", "full", "none"]),
        transfer=rng.choice(["nic", "spp", "dapple", "madpipe"]),
        all_reduce=rng.choice(["flat", "hierarchical", "dapple"]),
        bucket_bytes=rng.choice([1, 60, 10**6]),
        overlap_all_reduce=rng.random() < 0.7,
        gradient_factor=rng.choice([1, 1, 2]),
        state_factor=rng.choice([0, 1, 2]),
        shard_states=rng.random() < 0.3,
        headroom_bytes=rng.choice([0, 0, 5]),
        count_buffers=rng.random() < 0.7,
        recompute=rng.choice(["never", "auto", "auto", "always"]),
        cuttable=[rng.random() < 0.85 for _ in range(layers - 1)],
        measured_rows=rng.choice([1, 1, 2]),
        linear=rng.random() < 0.5,
        shared_parameters=_ties(rng, layers, scale),
    )


def _network(rng: random.Random, nodes: tuple[int, ...], lanes: int) -> object:
    return make_network(
        nodes,
        inside_bytes_per_s=rng.choice([10**9, 4 * 10**9]),
        between_bytes_per_s=rng.choice([10**9, 3 * 10**8, 5 * 10**7]),
        latency_ns=rng.choice([0, 0, 3]),
        form=rng.choice(["pairs", "ports", "bus"]),
        full_duplex=rng.random() < 0.5,
        lanes=lanes,
    )


def _sizes(rng: random.Random, samples: int) -> tuple[int, ...]:
    return tuple(sorted({min(samples, size) for size in rng.choice([(), (), (1,), (2,), (1, 2), (3,), (samples,)])}))


def _ties(rng: random.Random, layers: int, scale: int) -> tuple[tuple[str, tuple[int, ...], int], ...]:
    if layers < 2 or rng.random() < 0.75:
        return ()
    return (("tied", tuple(sorted(rng.sample(range(layers), 2))), rng.randint(1, 40) * scale),)


def _with_little_memory(rng: random.Random, problem: Problem) -> Problem:
    """Set memory to about what a share of the model takes, often with different sizes per device."""
    rules = problem.memory
    factor = 1 + rules.gradient_factor + rules.state_factor
    weights = int(problem.parameter_bytes[-1]) * factor
    rows = max(problem.micro_batch_sizes, default=1)
    kept = int(problem.costs(problem.devices[0].kind, rows).stash_bytes[-1])
    parts = min(problem.num_devices, problem.num_layers)
    base = rules.headroom_bytes + 20 + (weights + 2 * kept) // parts
    unequal = rng.random() < 0.6
    scale = rng.choice([1.0, 1.3, 1.8, 2.5])
    devices = [
        replace(each, memory_bytes=int(base * scale * (rng.choice([0.6, 1.0, 1.7]) if unequal else 1.0)))
        for each in problem.devices
    ]
    return replace(problem, devices=tuple(devices))


def _rules(rng: random.Random) -> frozenset[UpdateRule]:
    """Draw the update rules: mostly synchronous, sometimes another rule alone or beside it, or all of them."""
    draw = rng.random()
    if draw < 0.55:
        return frozenset({"synchronous"})
    if draw < 0.75:
        return frozenset({rng.choice(RULES[1:])})
    if draw < 0.9:
        return frozenset({"synchronous", rng.choice(RULES[1:])})
    return frozenset(RULES)


def _pins(rng: random.Random, problem: Problem) -> tuple[Pin, ...]:
    """Draw one or two ranges of layers, each for some devices."""
    pins = []
    for _ in range(rng.choice([1, 1, 2])):
        first = rng.randrange(problem.num_layers)
        last = rng.randint(first, problem.num_layers - 1)
        size = rng.randint(1, problem.num_devices)
        pins.append(Pin(first, last, frozenset(rng.sample(range(problem.num_devices), size))))
    return tuple(pins)


def _encodable(rng: random.Random, problem: Problem) -> Problem:
    """Allow half of each cut's tensors to be encoded; conversion is about as fast as the links."""
    speed = rng.choice([5 * 10**8, 5 * 10**9])
    return replace(
        problem,
        codec=True,
        codec_speeds={kind: CodecSpeed(speed, speed) for kind in problem.kind_source},
        encodable=tuple((int(size), 1) if size else (0, 0) for size in problem.forward_bytes),
    )


def _in_spps_model(rng: random.Random, problem: Problem) -> Problem:
    """Restrict a request to the model of SPP's theorems.

    It has private half-duplex channels without latencies, one device kind, and even micro-batches.
    """
    samples = problem.global_batch_size
    rules = replace(
        problem.rules, shared=False, channel="half", transfer="spp", all_reduce="flat", overlap_all_reduce=False
    )
    network = replace(
        problem.network,
        insides=tuple(inside and inside._replace(latency_ns=0) for inside in problem.network.insides),
        cables=tuple(cable._replace(latency_ns=0) for cable in problem.network.cables),
    )
    return replace(
        problem,
        rules=rules,
        network=network,
        linear=True,
        devices=tuple(replace(device, kind="cpu") for device in problem.devices),
        kind_source={"cpu": problem.kind_source["cpu"]},
        micro_batch_sizes=(rng.choice([size for size in range(1, samples + 1) if samples % size == 0]),),
        min_slice=1,
        update_ns=np.zeros_like(problem.update_ns),
        update_rules=frozenset({"synchronous"}),
        _costs={},
    )


def _limits(rng: random.Random, layers: int) -> Within:
    """Draw a trainer's limits, for a chain whose first and last layers are embedding and head."""
    name = rng.choice(sorted(TRAINERS))
    trainer = TRAINERS[name]
    span = Span(1, layers - 2) if trainer.needs_roles and layers > 2 else Span(0, layers - 1)
    cuts = (True,) * (layers - 1)
    return Within(name, tuple(trainer.orders), trainer.rounds, trainer.recompute, trainer.at_once, span, cuts)
