"""Changed requests: other links, memory, devices, micro-batches, recomputation or speed, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.costs.memory import activation_bytes, transient_bytes
from penstock.solvers.degrees.contract import contract
from penstock.solvers.degrees.planned import keeping, remaining
from penstock.solvers.improve.remedies import extended
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import Measured, MeasuredCollective, Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.recomputed import in_flight

MOST = 10_000
"""The largest factor; the least factor is its inverse."""
FACTOR = re.compile(r"\d{1,9}(\.\d{1,9}|/\d{1,9})?")


class Change(NamedTuple):
    """A changed problem. ``retimes``: the plan can still be judged there, in its order.

    ``allocation``: the changed allocation, where the change is of the plan (micro-batches, recomputation).
    """

    name: str
    sentence: str
    problem: Problem
    retimes: bool
    allocation: Allocation | None = None


def change(problem: Problem, plan: JudgedPlan, text: str) -> Change:
    """Return the change that ``text`` names: ``bandwidth=2``, ``memory=1/2``, ``devices=+8``, ``micro-batches=2``, ….

    Raises InvalidDocument for text that names no change, UnsupportedRequest for a change that does not apply.
    """
    name, equals, value = text.partition("=")
    if not equals or name not in CHANGES:
        raise InvalidDocument(
            f"{text!r} is not a known change",
            remedy=f"one of {', '.join(f'{key}={CHANGES[key].example}' for key in CHANGES)}",
        )
    return CHANGES[name].make(problem, plan, value.strip())


def default_changes(problem: Problem, plan: JudgedPlan) -> Iterator[Change]:
    """Yield the changes to try by default that apply to this request."""
    node = last_node_size(problem)
    texts = ["bandwidth=1/2", "bandwidth=2", "bandwidth=4", "memory=1/2", "memory=2"]
    texts += [f"devices=-{node}"] if node < (problem.real or problem).num_devices else []
    texts += [f"devices=+{node}", *(f"devices=-{kind}" for kind in _kinds_used(problem, plan))]
    texts += ["micro-batches=1/2", "micro-batches=2"]
    texts += ["recompute=never", "recompute=here", "recompute=everywhere", "speed=2"]
    for text in texts:
        with suppress(UnsupportedRequest):
            yield change(problem, plan, text)


def _of_gpus(problem: Problem, changed: Problem) -> Problem:
    """Return a changed problem of GPUs at the problem's degrees, where the GPUs' collectives may take another time."""
    return changed if problem.real is None or problem.choice is None else contract(changed, problem.choice)


def last_node_size(problem: Problem) -> int:
    """Return the number of GPUs in the last node."""
    gpus = (problem.real or problem).devices
    return sum(1 for gpu in gpus if gpu.node == gpus[-1].node)


# ---- links -----------------------------------------------------------------------------------------------------------


def with_network(
    problem: Problem, bandwidth: Fraction = Fraction(1), latency: Fraction = Fraction(1), link: str | None = None
) -> Problem:
    """Return the problem with bandwidth and latency of all links, or of the one named, scaled by these factors.

    With degrees, collectives among the GPUs of a replica take another time as well, if all links change; so do measured
    collectives, whose least measured time counts as their latency.
    """
    if problem.real is not None and link is None:
        return _of_gpus(problem, with_network(problem.real, bandwidth, latency))
    old = problem.network

    def wide(bytes_per_s: int) -> int:
        return max(1, int(bytes_per_s * bandwidth)) if bytes_per_s else 0

    def changed(each: Cable) -> Cable:
        return each._replace(
            bandwidth_bytes_per_s=wide(each.bandwidth_bytes_per_s), latency_ns=int(each.latency_ns * latency)
        )

    def inside(each: Inside | None) -> Inside | None:
        if each is None:
            return None
        return each._replace(
            bandwidth_bytes_per_s=wide(each.bandwidth_bytes_per_s), latency_ns=int(each.latency_ns * latency)
        )

    cables = tuple(changed(c) if link in (None, cable_name(c)) else c for c in old.cables)
    insides = tuple(
        inside(each) if link in (None, node) else each for node, each in zip(old.node_names, old.insides, strict=True)
    )
    matrix, late = old.matrix_bytes_per_s, old.matrix_latency_ns
    if matrix is not None:
        scaled = np.array([[wide(int(v)) for v in row] for row in matrix.tolist()], dtype=np.int64)
        late = None if late is None else np.array([[int(v * latency) for v in row] for row in late.tolist()], np.int64)
        matrix = scaled
    network = Network(old.device_names, old.node_names, old.node_of, insides, cables, matrix, late)
    measured = problem.collectives if link is not None else _scaled(problem.collectives, bandwidth, latency)
    return replace(problem, network=network, collectives=measured)


def _scaled(
    measured: Sequence[MeasuredCollective], bandwidth: Fraction, latency: Fraction
) -> tuple[MeasuredCollective, ...]:
    least: dict[tuple[object, ...], int] = {}
    for row in measured:
        least[row[:3]] = min(row.time_ns, least.get(row[:3], row.time_ns))
    return tuple(
        row._replace(time_ns=int(least[row[:3]] * latency + (row.time_ns - least[row[:3]]) / bandwidth))
        for row in measured
    )


def cable_name(cable: Cable) -> str:
    """Return the name of a link between two places."""
    return f"{cable.a} – {cable.b}"


def link_of(network: Network, resource: int) -> str | None:
    """Return the link to which a resource belongs: a cable, or a node's inside; None for pairs of a matrix."""
    name = "→".join(network.resources[resource].ends)
    links = _links_by_name(network)
    if name in links or network.matrix_bytes_per_s is not None:
        return links.get(name)
    return links[name[: name.index("→") + 1]]


@lru_cache(maxsize=4)
def _links_by_name(network: Network) -> dict[str, str]:
    """Return the link of each direction of a cable, the first of its name, and the node of each way out of a device."""
    links = {f"{node}→": node for node in network.node_names}
    links |= {f"{d}→": network.node_names[n] for d, n in zip(network.device_names, network.node_of, strict=True)}
    for cable in network.cables:
        for name in (f"{cable.a}→{cable.b}", f"{cable.b}→{cable.a}"):
            links.setdefault(name, cable_name(cable))
    return links


def _bandwidth(problem: Problem, _plan: JudgedPlan, value: str) -> Change:
    factor = _factor("bandwidth", value)
    return Change(f"bandwidth={value}", f"links {_times(factor)} as wide", with_network(problem, factor), True)


def _latency(problem: Problem, _plan: JudgedPlan, value: str) -> Change:
    factor = _factor("latency", value, least=Fraction(0))
    changed = with_network(problem, latency=factor)
    return Change(f"latency={value}", "no latency" if factor == 0 else f"latency × {_words(factor)}", changed, True)


# ---- devices ---------------------------------------------------------------------------------------------------------


def with_memory(problem: Problem, factor: Fraction, devices: frozenset[int] | None = None) -> Problem:
    """Return the problem with the memory of all devices, or of these, scaled by ``factor``."""
    return replace(
        problem,
        devices=tuple(
            replace(device, memory_bytes=int(device.memory_bytes * factor))
            if devices is None or d in devices
            else device
            for d, device in enumerate(problem.devices)
        ),
    )


def with_speed(problem: Problem, factor: Fraction) -> Problem:
    """Return the problem with every device ``factor`` times as fast."""
    if problem.real is not None:
        return _of_gpus(problem, with_speed(problem.real, factor))
    sources = {kind: (source, speed * float(factor)) for kind, (source, speed) in problem.kind_source.items()}
    return replace(problem, kind_source=sources, _costs={})


def with_layers(problem: Problem, first: int, last: int, factor: Fraction) -> Problem:
    """Return the problem with the computing time of layers ``first`` to ``last`` scaled by ``factor``."""
    scale = np.ones(problem.num_layers, dtype=bool)
    scale[:first] = scale[last + 1 :] = False

    def changed(values: np.ndarray) -> np.ndarray:
        return np.where(scale, values * factor.numerator // factor.denominator, values)

    names = ("forward_ns", "backward_ns", "weight_ns")

    def scaled(point: Measured) -> Measured:
        times: dict[str, Any] = {name: changed(getattr(point, name)) for name in names}
        return replace(point, **times)

    measured = {kind: tuple(map(scaled, points)) for kind, points in problem.measured.items()}
    return replace(problem, measured=measured, _costs={})


def with_devices(problem: Problem, count: int) -> Problem | None:
    """Return the problem with ``count`` more devices: copies of the last node, or devices in it; None if impossible."""
    network, last = problem.network, problem.devices[-1].node
    size = sum(1 for device in problem.devices if device.node == last)
    if network.matrix_bytes_per_s is not None:
        return None
    hung_on = any(network.node_names[last] in (cable.a, cable.b) for cable in network.cables)
    if hung_on and count % size == 0:
        return extended(problem, count // size)
    wired = any(problem.devices[-1].name in (cable.a, cable.b) for cable in network.cables)
    if network.insides[last] is None or wired:
        return None
    model = problem.devices[-1]
    more = tuple(replace(model, name=f"{model.name}+{i}") for i in range(1, count + 1))
    wider = Network(
        network.device_names + tuple(device.name for device in more),
        network.node_names,
        network.node_of + (last,) * count,
        network.insides,
        network.cables,
    )
    return replace(problem, network=wider, devices=problem.devices + more)


def _kinds_used(problem: Problem, plan: JudgedPlan) -> list[str]:
    """Return the kinds of the plan's devices where they are of several kinds."""
    used = {gpu.kind for stage in plan.allocation.stages for d in stage.devices for gpu in problem.gpus(d)}
    return sorted(used) if len(used) > 1 else []


def _without_kind(problem: Problem, kind: str) -> Change:
    gpus = problem.real or problem
    if all(device.kind == kind for device in gpus.devices):
        raise UnsupportedRequest(f"devices=-{kind} would remove all {gpus.num_devices} devices")
    rest = remaining(gpus, kind)
    sentence = f"the cluster without its {gpus.num_devices - rest.num_devices} devices of kind {kind}"
    return Change(f"devices=-{kind}", sentence, _of_gpus(problem, rest), retimes=False)


def _devices(problem: Problem, plan: JudgedPlan, value: str) -> Change:
    kinds = {device.kind for device in (problem.real or problem).devices}
    if value[:1] == "-" and value[1:] in kinds:
        return _without_kind(problem, value[1:])
    try:
        count = int(value)
    except ValueError:
        raise InvalidDocument(
            f"devices={value!r} is neither a number nor -KIND; the kinds are {', '.join(sorted(kinds))}",
            remedy=f"devices=+8, devices=-8 or devices=-{min(kinds)}",
        ) from None
    if count == 0 or abs(count) > MOST:
        raise InvalidDocument(
            f"devices={value} has to add or remove between 1 and {MOST} devices", remedy="devices=+8 or devices=-8"
        )
    gpus = problem.real or problem
    if count < 0:
        existing = gpus.num_devices
        if -count >= existing:
            raise UnsupportedRequest(f"there are {existing} devices; {-count} cannot be removed")
        used = {d for stage in plan.allocation.stages for d in stage.devices}
        changed = _of_gpus(problem, keeping(gpus, range(existing + count)))
        sentence = f"{-count} device{'s' if count < -1 else ''} less"
        return Change(f"devices={count}", sentence, changed, max(used) < changed.num_devices)
    wider = with_devices(gpus, count)
    if wider is None:
        raise UnsupportedRequest(
            f"this topology does not say how {count} more devices would be connected",
            remedy="write the larger topology and plan for it",
        )
    return Change(f"devices=+{count}", f"{count} more device{'s' if count > 1 else ''}", _of_gpus(problem, wider), True)


def _memory(problem: Problem, _plan: JudgedPlan, value: str) -> Change:
    factor = _factor("memory", value)
    return Change(f"memory={value}", f"{_times(factor)} the memory", with_memory(problem, factor), True)


def _speed(problem: Problem, _plan: JudgedPlan, value: str) -> Change:
    factor = _factor("speed", value)
    return Change(f"speed={value}", f"devices {_times(factor)} as fast", with_speed(problem, factor), True)


# ---- the plan --------------------------------------------------------------------------------------------------------


def _micro_batches(problem: Problem, plan: JudgedPlan, value: str) -> Change:
    factor = _factor("micro-batches", value)
    number = plan.allocation.num_micro_batches * factor
    if number.denominator > 1 or not 1 <= number <= problem.global_batch_size:
        raise UnsupportedRequest(
            f"{_words(factor)} times {plan.allocation.num_micro_batches} micro-batches cannot be formed from "
            f"{problem.batch_samples} samples",
            remedy="a factor that leaves a whole number of micro-batches with at least a sample each",
        )
    size = -(-problem.global_batch_size // int(number))
    changed = replace(problem, micro_batch_sizes=(size,), min_slice=min(size, problem.min_slice))
    allocation = _in_micro_batches(plan.allocation, int(number)) if len(plan.allocation.pipelines) == 1 else None
    return Change(f"micro-batches={value}", f"{number} micro-batches", changed, False, allocation)


def _in_micro_batches(allocation: Allocation, number: int) -> Allocation:
    (pipeline,) = allocation.pipelines
    return Allocation((replace(pipeline, micro_batches=(0, number - 1)),), number)


def _recompute(problem: Problem, plan: JudgedPlan, value: str) -> Change:
    if value not in ("never", "here", "everywhere"):
        raise InvalidDocument(f"recompute={value!r} is not known", remedy="recompute=never, here or everywhere")
    fullest, before = fullest_device(problem, plan), plan.allocation
    order, every = plan.schedule, [before.num_micro_batches] * len(before.stages)
    flying = in_flight(before, order) if isinstance(order, Orders) else every
    rows = most_rows(problem, before)

    def changed(number: int, stage: Stage) -> Stage:
        if value == "here" and fullest not in stage.devices:
            return stage
        if value == "never":
            return stage.plain
        return _leanest(problem, stage, flying[number], rows)

    stages = iter([changed(number, stage) for number, stage in enumerate(before.stages)])
    pipelines = tuple(replace(each, stages=tuple(islice(stages, len(each.stages)))) for each in before.pipelines)
    allocation = replace(before, pipelines=pipelines)
    rule: Literal["never", "auto", "always"] = {"never": "never", "here": "auto", "everywhere": "always"}[value]  # type: ignore[assignment]
    sentence = f"recompute {value}"
    if value == "here":
        sentence = f"recompute on {problem.devices[fullest].name}, the fullest device"
    return Change(f"recompute={value}", sentence, replace(problem, recompute=rule), True, allocation)


def _leanest(problem: Problem, stage: Stage, flying: int, rows: int) -> Stage:
    """Return the stage recomputed as a whole, or layer by layer, each from its input: the way with less memory.

    Both take the same time. As a whole it keeps one input of each of ``flying`` micro-batches of ``rows`` samples, and
    its backward has the activations of all its layers in memory at once. Layer by layer it keeps all layers' inputs,
    and has the activations of one layer at a time.
    """
    layers = range(stage.first, stage.last + 1)
    ways = (
        stage.whole,
        replace(stage, recompute=tuple((layer, layer) for layer in layers), modules=()),
    )
    return min(
        ways, key=lambda way: flying * activation_bytes(problem, way, rows) + transient_bytes(problem, way, rows)
    )


def fullest_device(problem: Problem, plan: JudgedPlan) -> int:
    """Return the device with the smallest free share of its memory."""
    uses = plan.timeline.uses
    return max(uses, key=lambda d: (Fraction(uses[d].memory.total, max(1, problem.devices[d].memory_bytes)), -d))


# ---- words -----------------------------------------------------------------------------------------------------------


class _Named(NamedTuple):
    make: Callable[[Problem, JudgedPlan, str], Change]
    example: str


CHANGES = {
    "bandwidth": _Named(_bandwidth, "2"),
    "latency": _Named(_latency, "0"),
    "memory": _Named(_memory, "1/2"),
    "devices": _Named(_devices, "+8"),
    "micro-batches": _Named(_micro_batches, "2"),
    "recompute": _Named(_recompute, "never|here|everywhere"),
    "speed": _Named(_speed, "2"),
}


def _factor(name: str, value: str, least: Fraction = Fraction(1, MOST)) -> Fraction:
    try:
        factor = Fraction(value if FACTOR.fullmatch(value) else "")
    except (ValueError, ZeroDivisionError):
        raise InvalidDocument(
            f"{name}={value!r} is not a factor", remedy=f"{name}=2, {name}=0.5 or {name}=1/2"
        ) from None
    if not least <= factor <= MOST:
        raise InvalidDocument(f"{name}={value} is not between {_words(least)} and {MOST}")
    return factor


def _words(factor: Fraction) -> str:
    return str(factor) if factor.denominator <= 16 else f"{float(factor):g}"


def _times(factor: Fraction) -> str:
    words = {Fraction(1, 4): "a quarter", Fraction(1, 2): "half", Fraction(2): "twice"}
    return words.get(factor, f"{_words(factor)} times")
