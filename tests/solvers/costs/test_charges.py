"""Charges for all that ranks run: every word of programs, and every byte of every link, counted from programs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from lowered import starved
from problems import make_problem
from random_plans import (
    random_allocation,
    random_crossing_pipelines,
    random_orders,
    random_pattern,
    random_pipelines,
    random_problem,
    with_ties,
)

from penstock.convert.requests import network_of
from penstock.report.traffic import traffic
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import CODEC_HEADER_BYTES, KINDS, WORDS, Program, RankStage
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.costs.charges import CHARGES, NORM_BYTES, untimed
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Schedule
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.advance_forward import advance_forward

KIND = ("one pipeline", "pipelines", "crossing pipelines", "codecs", "periodic", "elastic averaging")
Plan = tuple[Problem, Allocation, Schedule, UpdateRule]


def _drawn(rng: random.Random, kind: str) -> Plan:
    """Draw a plan of a kind, mostly with ties; some plans cannot be lowered."""
    problem = random_problem(rng)
    if rng.random() < 0.7:
        problem = with_ties(rng, problem)
    if kind == "periodic":
        allocation, pattern, rule, _run = random_pattern(rng, problem)
        return problem, allocation, pattern, rule
    if kind == "elastic averaging":
        devices = rng.sample(range(problem.num_devices), min(problem.num_devices, problem.num_layers))
        last = problem.num_layers - 1
        stages = [Stage(s, s if s + 1 < len(devices) else last, (d,)) for s, d in enumerate(devices)]
        allocation = parallel_pipelines(tuple(stages), rng.randint(1, 3), rng.randint(1, problem.global_batch_size))
        return problem, allocation, advance_forward(problem, allocation, delta=0), "elastic_averaging"
    if kind in ("one pipeline", "codecs"):
        allocation = random_allocation(rng, problem)
        if kind == "codecs":
            problem, allocation = _with_codecs(rng, problem, allocation)
    elif min(problem.num_devices, problem.global_batch_size) < 2:
        return _drawn(rng, kind)
    else:
        allocation = (random_pipelines if kind == "pipelines" else random_crossing_pipelines)(rng, problem)
    return problem, allocation, random_orders(rng, allocation), "synchronous"


def _with_codecs(rng: random.Random, problem: Problem, allocation: Allocation) -> tuple[Problem, Allocation]:
    """Encode some of the edges."""
    coded = [False, *(rng.random() < 0.6 for _ in allocation.stages[1:]), False]
    stages = [replace(stage, coded=(coded[s], coded[s + 1])) for s, stage in enumerate(allocation.stages)]
    encodable = tuple((rng.randint(0, int(size)), 1) for size in problem.forward_bytes)
    return replace(problem, codec=True, encodable=encodable), single_pipeline(
        tuple(stages), allocation.num_micro_batches
    )


def _lowered(rng: random.Random, kind: str, **options: Any) -> tuple[Plan, list[Program]]:
    """Return the first random plan that ranks can run, and its programs."""
    while True:
        plan = problem, allocation, schedule, rule = _drawn(rng, kind)
        if starved(problem, allocation):
            continue
        try:
            return plan, lower(problem, allocation, schedule, update_rule=rule, **options)
        except (InvalidPlan, UnsupportedRequest):
            continue


# ---- work of programs, counted from the programs alone ---------------------------------------------------------------


def _bucket_bytes(problem: Problem, program: Program, first: int, last: int) -> int:
    """Return the gradient bytes of layers [first, last], without the gradients of the program's ties."""
    sizes = [
        b - a for a, b in zip(problem.trainable_bytes.tolist(), problem.trainable_bytes.tolist()[1:], strict=False)
    ]
    apart = {tie.name for tie in program.shared}
    for name, layers, size in problem.shared_parameters:
        if name in apart:
            sizes[layers[0]] -= min(size, sizes[layers[0]])
    return sum(sizes[first : last + 1])


def _summed(problem: Problem, programs: list[Program]) -> dict[int, int]:
    """Return the trained bytes of each tie, by its number."""
    trained = [
        b > a for a, b in zip(problem.trainable_bytes.tolist(), problem.trainable_bytes.tolist()[1:], strict=False)
    ]
    sizes = {name: size * trained[layers[0]] for name, layers, size in problem.shared_parameters}
    return {k: sizes[tie.name] for k, tie in enumerate(programs[0].shared)}


def _reduced(problem: Problem, programs: list[Program]) -> dict[tuple[int, int, int], int]:
    """Return the bytes that REDUCE reduces in one round, by group and layers."""
    sizes = {}
    for program in programs:
        for one in program.instructions():
            if one.kind == "REDUCE":
                first, last, group = program.stage(one.stage).buckets[one.micro_batch]
                sizes[group, first, last] = _bucket_bytes(problem, program, first, last)
    return sizes


def _message_bytes(problem: Problem, stage: RankStage, way: str, rows: int, coded: bool) -> int:
    cut = stage.last if way == "F" else stage.first - 1
    size = rows * int((problem.forward_bytes if way == "F" else problem.backward_bytes)[cut])
    if not coded or size == 0:
        return size
    numbers, tensors = problem.encodable[cut]
    return size - min(size, numbers * rows) // 2 + CODEC_HEADER_BYTES * tensors


def _messages(problem: Problem, programs: list[Program]) -> Counter[tuple[int, int, str, int, int]]:
    """Return the bytes by sending and receiving rank, direction, sending stage and micro-batch."""
    load: Counter[tuple[int, int, str, int, int]] = Counter()
    for program in programs:
        for one in program.instructions():
            if one.kind in ("SEND_F", "SEND_B"):
                channel = program.channels[one.channel]
                low, high = channel.rows[program.row_class(one.micro_batch)]
                stage, way = program.stage(one.stage), one.kind[-1]
                size = _message_bytes(problem, stage, way, high - low, channel.codec is not None)
                load[program.rank, channel.peer, way, one.stage, one.micro_batch] += size
    return +load


@pytest.mark.parametrize(
    ("devices", "copies"),
    [
        pytest.param([(0,), (1,)], 1, id="a-stage-each"),
        pytest.param([(0, 2), (1,)], 2, id="a-replica-more"),
        pytest.param([(0, 1, 2)], 0, id="in-one-stage"),
    ],
)
def test_the_steps_of_copies_of_tied_parameters_are_assumed(devices: list[tuple[int, ...]], copies: int) -> None:
    """A tie of 7 bytes between both layers: every device that holds it steps it, and one of the steps is timed."""
    problem = make_problem([1, 1], parameter_bytes=10, nodes=(3,), shared_parameters=(("tied", (0, 1), 7),))
    last = problem.num_layers - 1
    stages = [Stage(s, s if len(devices) > 1 else last, group) for s, group in enumerate(devices)]
    charges = untimed(problem, single_pipeline(tuple(stages), 2), "synchronous")
    assert [each.bytes for each in charges if "the copies of 'tied'" in each.sentence] == [7 * copies] * (copies > 0)


# ---- every word ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
def test_every_word_has_its_charge(word: str) -> None:
    assert CHARGES[word].how in ("timed", "assumed", "free")
    assert CHARGES[word].what


def test_no_charge_is_of_an_unknown_word() -> None:
    assert set(CHARGES) == set(WORDS)


ALWAYS = {"F", "STEP", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}
EXPECTED = {
    "one pipeline": ALWAYS
    | {"B", "I", "W", "R", "REDUCE", "WAIT_REDUCE", "REDUCE_SHARED", "NORM", "WAIT_NORM", "LOCAL_F"},
    "pipelines": ALWAYS | {"I", "W", "REDUCE", "REDUCE_SHARED", "NORM"},
    "crossing pipelines": ALWAYS | {"I", "W", "REDUCE", "REDUCE_SHARED", "NORM"},
    "codecs": ALWAYS | {"REDUCE", "REDUCE_SHARED"},
    "periodic": ALWAYS | {"REDUCE", "WAIT_REDUCE", "REDUCE_SHARED", "VERSION"},
    "elastic averaging": ALWAYS | {"AVG_PULL", "AVG_PUSH"},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", KIND)
def test_what_ranks_run_is_timed_or_assumed_with_its_bytes(kind: str) -> None:
    words: set[str] = set()
    shared_out = 0
    for number in range(36):
        rng = random.Random(f"{kind} {number}")
        norm = kind not in ("periodic", "elastic averaging") and rng.random() < 0.5
        (problem, allocation, schedule, rule), programs = _lowered(rng, kind, norm=norm)
        left_out = list(untimed(problem, allocation, rule))
        assert all(each.bytes is None or f"{each.bytes} bytes" in each.sentence for each in left_out)
        charges = {word: each for each in left_out for word in each.words if "the copies of" not in each.sentence}
        ran = {one.kind for program in programs for one in program.instructions()}
        words |= ran
        several = len(programs) > 1 and (rule != "elastic_averaging" or len(allocation.pipelines) > 1)
        assert not several or {word for word in ran if CHARGES[word].how == "assumed"} <= set(charges)
        if norm and several:
            assert charges["NORM"].bytes == NORM_BYTES
        if "AVG_PUSH" in ran and several:
            spans = {(h.first, h.last) for program in programs for h in program.stages if h.pipeline == 0}
            assert charges["AVG_PUSH"].bytes == 2 * sum(_bucket_bytes(problem, programs[0], *span) for span in spans)
        exchanged = sum(_reduced(problem, programs).values()) if programs[0].shard_states else 0
        shared_out += exchanged > 0
        assert (charges["STEP"].bytes if "STEP" in charges else 0) == exchanged
        if rule == "synchronous" and kind != "codecs":
            _assert_timed(problem, simulate(problem, allocation, schedule), programs)
    assert words >= EXPECTED[kind]
    assert kind in ("elastic averaging", "pipelines") or shared_out > 1


def _assert_timed(problem: Problem, timeline: Timeline, programs: list[Program]) -> None:
    """Check that the timeline has all computation, messages and sums of ranks in a flushed step."""
    ran = {(one.kind, one.stage, one.micro_batch) for program in programs for one in program.instructions()}
    rows = [tuple(row) for track in timeline.tracks for row in track.operations.tolist()]
    assert {each for each in ran if each[0] in KINDS} == {(KINDS[kind], s, m) for kind, s, m in rows}
    sent = timeline.transfers
    columns = (sent.direction.tolist(), sent.stage.tolist(), sent.micro_batch.tolist())
    messages = {(way, stage, m) for _source, _target, way, stage, m in _messages(problem, programs)}
    assert messages == {("FB"[way], stage, m) for way, stage, m in zip(*columns, strict=True)}
    pieces = {size: max(1, size // problem.rules.bucket_bytes) for size in _reduced(problem, programs).values() if size}
    counts = [
        min(16, pieces[size]) if problem.rules.shared else 1 for size in _reduced(problem, programs).values() if size
    ]
    assert len(timeline.reductions) == sum(counts)
    summed = [k for k, size in _summed(problem, programs).items() if size]
    assert len(timeline.ties) == len(summed)
    assert {s for kind, s, _m in ran if kind == "STEP"} <= {each.stage for each in timeline.updates}


# ---- every byte of every link ----------------------------------------------------------------------------------------


def _topology(rng: random.Random, problem: Problem) -> dict[str, Any]:
    """Draw a document of the problem's nodes, in a random tree of switches."""
    hosts = problem.network.node_names
    switches = [f"switch{i}" for i in range(rng.randint(1, 3))]
    ends = [(name, rng.choice(switches)) for name in hosts]
    ends += [(name, switches[rng.randrange(i)]) for i, name in enumerate(switches) if i]
    cable = {"bandwidth_bytes_per_s": 10**9}
    return {
        "name": "drawn",
        "nodes": [
            {
                "name": name,
                "devices": [
                    {"id": d.name, "kind": d.kind, "memory_bytes": 2**30} for d in problem.devices if d.node == number
                ],
                "fabric": {
                    "form": rng.choice(["pairs", "ports", "bus"]),
                    "duplex": rng.choice(["full", "half"]),
                    "bandwidth_bytes_per_s": 10**10,
                },
            }
            for number, name in enumerate(hosts)
        ],
        "switches": switches,
        "links": [{"a": a, "b": b, "duplex": rng.choice(["full", "half"]), **cable} for a, b in ends],
    }


def _way(document: dict[str, Any], source: str, target: str) -> list[str]:
    """List the channels, ports, buses and cables between two devices, with directions where they are full duplex."""
    node_of = {device["id"]: node for node in document["nodes"] for device in node["devices"]}
    if node_of[source] is node_of[target]:
        fabric, name = node_of[source]["fabric"], node_of[source]["name"]
        full = fabric["duplex"] == "full"
        if fabric["form"] == "bus":
            return [f"{name}→bus"]
        if fabric["form"] == "ports":
            return [f"{source}→out", f"{target}→in"] if full else [f"{source}→port", f"{target}→port"]
        return [f"{source}→{target}" if full else "→".join(sorted((source, target)))]
    ways = {node_of[source]["name"]: []}
    waiting = list(ways)
    while waiting:
        place = waiting.pop()
        for link in document["links"]:
            if place in (link["a"], link["b"]):
                other = link["b"] if place == link["a"] else link["a"]
                if other not in ways:
                    ends = (place, other) if link["duplex"] == "full" else sorted((place, other))
                    ways[other] = [*ways[place], "→".join(ends)]
                    waiting.append(other)
    return ways[node_of[target]["name"]]


def _links_of_programs(problem: Problem, programs: list[Program], document: dict[str, Any]) -> Counter[str]:
    """Return the bytes on each link, from messages and from the rings of groups.

    The ranks of a ring follow each other by node and device.
    """
    load_of_links: Counter[str] = Counter()
    for (source, target, *_what), size in _messages(problem, programs).items():
        for link in _way(document, programs[source].device, programs[target].device):
            load_of_links[link] += size
    places = {device["id"]: (n, d) for n, x in enumerate(document["nodes"]) for d, device in enumerate(x["devices"])}
    load: Counter[int] = Counter()
    rounds: Counter[tuple[int, int, int]] = Counter()
    for program in programs:
        counts: Counter[tuple[int, int, int]] = Counter()
        for one in program.instructions():
            if one.kind == "REDUCE":
                counts[
                    program.stage(one.stage).buckets[one.micro_batch][2],
                    *program.stage(one.stage).buckets[one.micro_batch][:2],
                ] += 1
        rounds |= counts
    for (group, first, last), times in rounds.items():
        load[group] += times * _bucket_bytes(problem, programs[0], first, last)
    for k, size in _summed(problem, programs).items():
        load[programs[0].shared[k].group] += size
    for group, size in load.items():
        devices = sorted((programs[rank].device for rank in programs[0].groups[group]), key=places.__getitem__)
        for i, device in enumerate(devices if len(devices) > 1 else ()):
            for link in _way(document, device, devices[(i + 1) % len(devices)]):
                load_of_links[link] += 2 * (len(devices) - 1) * size // len(devices)
    return +load_of_links


def _links_of_judge(problem: Problem, allocation: Allocation, rule: UpdateRule) -> Counter[str]:
    load: Counter[str] = Counter()
    for flow in traffic(problem, allocation, 1, rule):
        route = problem.network.route(flow.source, flow.target)
        assert route is not None
        for r in route.resources:
            load[problem.network.resources[r].name] += flow.bytes
    return load


@pytest.mark.parametrize("kind", KIND)
@pytest.mark.parametrize("seed", range(50))
def test_bytes_of_every_link_are_those_that_programs_move(seed: int, kind: str) -> None:
    rng = random.Random(f"links {kind} {seed}")
    while True:
        (problem, allocation, _schedule, rule), programs = _lowered(rng, kind)
        if len(programs) > 1:
            break
    document = _topology(rng, problem)
    problem = replace(problem, network=network_of(ClusterTopology.model_validate(document)))
    assert _links_of_programs(problem, programs, document) == _links_of_judge(problem, allocation, rule)
