"""Random requests with degrees, as documents, and random plans for them: every form of network, degrees in each mix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from drawn_tables import drawn_table
from random_plans import random_allocation, random_crossing_pipelines, random_orders, random_pipelines

from penstock.convert import to_plan, to_problem
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.degrees.contract import contract
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders

Json = dict[str, Any]
UNIT = 5040
"""Divisor of all bandwidths, so that the part of each of up to 10 lanes is a whole number."""
MODULES = ("attention", "mlp", "norm")
FORMS = ("uniform", "star", "racks", "own", "rails", "matrix")
"""Forms of clusters: nodes around a switch or in racks, separate cables or rails; ``circles`` comes in addition."""
DENSE = ({"tensor": 2}, {"tensor": 4}, {"tensor": 2, "context": 2}, {"context": 2}, {"context": 4})
EXPERT = (
    {"expert": 2},
    {"expert": 4},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert": 4},
    {"tensor": 2, "expert": 2, "expert_tensor": 2},
    {"context": 2, "expert": 2},
    {"tensor": 2, "context": 2, "expert": 2},
    {"tensor": 4, "expert_tensor": 2},
    {"context": 2, "expert": 4},
    {"expert": 8},
)
MIXES = (*DENSE, *EXPERT)
MAKES = (random_allocation, random_allocation, random_allocation, random_pipelines, random_crossing_pipelines)


class Drawn(NamedTuple):
    """A request, one of its choices, the problem at that choice, and a plan file for it."""

    request: PlanRequest
    choice: Choice
    cells: Problem
    file: PlanFile


def drawn_request(rng: random.Random, forms: Sequence[str] = FORMS, **network: str) -> tuple[PlanRequest, Problem]:
    """Draw a request that leaves degrees open, and its problem."""
    while True:
        degrees = rng.sample(MIXES, rng.randint(1, 2))
        scaled = rng.random() < 0.2
        request: Json = {
            "profile": drawn_profile(rng, degrees, scaled),
            "topology": drawn_topology(rng, rng.choice(forms), scaled),
            "global_batch_size": rng.randint(2, 9) * meshes_of(degrees),
            "degrees": "auto",
            "sharding": rng.choice([None, ["none", "optimizer"], "none", "optimizer", "parameters_kept"]),
            "memory": {
                "optimizer": rng.choice(["sgd", "momentum", "adam"]),
                "buffers": rng.choice(["exact", "exact", "none"]),
            },
            "network": {
                "sharing": rng.choice(["shared", "private"]),
                "channel": rng.choice(["half", "full", "none"]),
                "transfer": rng.choice(["nic", "nic", "spp", "dapple", "madpipe"]),
                "all_reduce": rng.choice(["flat", "hierarchical", "dapple"]),
                "bucket_bytes": rng.choice([10, 3000, 10**6]),
                "overlap_all_reduce": rng.random() < 0.5,
            }
            | network,
        }
        if rng.random() < 0.4:
            request["topology"]["collectives"] = drawn_table(rng, 20_000, 30_000)
        try:
            parsed = PlanRequest.parse({name: value for name, value in request.items() if value is not None})
            return parsed, to_problem(parsed)
        except InvalidDocument:  # a topology in parts
            continue


def meshes_of(degrees: Sequence[dict[str, int]]) -> int:
    """Return the divisor of the samples: the most meshes of any GPU group."""
    return max(Degrees(**each).meshes for each in degrees)


def drawn_shared_plan(rng: random.Random, forms: Sequence[str] = FORMS) -> Drawn:
    """Draw a request with sharded gradients, or parameters too, and any plan of its single stage."""
    while True:
        sharding = rng.choice(("gradients", "parameters"))
        request, _problem = drawn_request(rng, forms)
        gpus = sum(len(node.devices) for node in request.topology.expanded().nodes)  # type: ignore[union-attr]
        request = request.model_copy(
            update={"sharding": sharding, "global_batch_size": gpus * rng.randint(1, 4), "micro_batch_sizes": ()}
        )
        problem = to_problem(request)
        choice = rng.choice([each for each in problem.choices if each.degrees.cell > 1])
        try:
            cells = contract(problem, choice)
        except UnsupportedRequest:
            continue
        last = cells.num_layers - 1
        segments = rng.choice(((), ((0, last),), ((min(1, last), last),)))
        stage = Stage(0, last, (0,), recompute=segments)
        allocation = _with_modules(rng, cells, single_pipeline((stage,), rng.randint(1, cells.global_batch_size)))
        orders = random_orders(rng, allocation)
        overlap = cells.rules.overlap_all_reduce and rng.random() < 0.7
        timeline = simulate(cells, allocation, orders, overlap=overlap)
        plan = to_plan(cells, request, JudgedPlan.of("drawn", allocation, orders, timeline, overlap), ())
        return Drawn(request, choice, cells, PlanFile(plan=plan, request=request))


def drawn_plan(rng: random.Random, forms: Sequence[str] = FORMS, **network: str) -> Drawn:
    """Draw a request and any plan of it at degrees above 1: stages, replicas, pipelines and an order that can run."""
    while True:
        request, problem = drawn_request(rng, forms, **network)
        choice = rng.choice([each for each in problem.choices if each.degrees.cell > 1])
        try:
            cells = contract(problem, choice)
        except UnsupportedRequest:
            continue
        make = rng.choice(MAKES) if min(cells.num_devices, cells.global_batch_size) > 1 else random_allocation
        allocation = _with_modules(rng, cells, make(rng, cells))
        orders = random_orders(rng, allocation)
        if not _take_turns(allocation, orders):
            continue
        overlap = cells.rules.overlap_all_reduce and rng.random() < 0.7
        timeline = simulate(cells, allocation, orders, overlap=overlap)
        candidate = JudgedPlan.of("drawn", allocation, orders, timeline, overlap)
        plan = to_plan(cells, request, candidate, ())
        return Drawn(request, choice, cells, PlanFile(plan=plan, request=request))


def _with_modules(rng: random.Random, cells: Problem, allocation: Allocation) -> Allocation:
    """Return the allocation with some stages recomputing modules instead of layers."""
    sets = cells.module_sets

    def again(stage: Stage) -> Stage:
        return replace(stage.plain, modules=rng.choice(sets)) if sets and rng.random() < 0.5 else stage

    pipelines = (replace(each, stages=tuple(map(again, each.stages))) for each in allocation.pipelines)
    return Allocation(tuple(pipelines), allocation.num_micro_batches)


def _take_turns(allocation: Allocation, orders: Orders) -> bool:
    """Return whether replicas in turn have different rows; with fewer turns than replicas some rows are equal."""
    for stage in allocation.stages:
        if stage.dispatch == "round_robin":
            rows = [
                row.operations.tobytes() for row in orders.rows for device in row.devices if device in stage.devices
            ]
            if len(set(rows)) < len(rows):
                return False
    return True


def drawn_profile(rng: random.Random, degrees: list[dict[str, int]], scaled: bool = False) -> Json:
    """Draw up to five layers of up to three classes; ``scaled``: the cluster may have a kind that was not measured."""
    count, classes = rng.randint(2, 5), rng.randint(1, 3)
    layers = [
        {"name": f"l{n}", "parameter_bytes": rng.randrange(20_000), "trainable": rng.random() < 0.8}
        for n in range(count)
    ]
    ties = []
    if rng.random() < 0.3:
        tied = sorted(rng.sample(range(count), 2))
        ties = [{"name": "wte", "layers": tied, "bytes": rng.randint(1, 5_000)}]
    return {
        "name": "drawn",
        "layers": layers,
        "boundaries": [[_tensor(rng, k) for k in range(rng.randint(1, 2))] for _ in range(count - 1)],
        "shared_parameters": ties,
        "measurements": [{"device_kind": "cpu", "micro_batch_size": 1, "layers": [_cost(rng) for _ in layers]}],
        "classes": [rng.randrange(classes) for _ in range(count)],
        "variants": [_variant(rng, each, classes, hides=not scaled) for each in degrees],
        "source": {"method": "analytic", "expected_error": 0.1},
    }


def _tensor(rng: random.Random, number: int) -> Json:
    sizes = {
        "bytes_per_sample": rng.randint(1, 9_000),
        "gradient_bytes_per_sample": rng.choice([0, rng.randint(1, 9_000)]),
    }
    return {"name": f"t{number}", **sizes}


def _cost(rng: random.Random) -> Json:
    cost = {
        "forward_ns": rng.randint(1, 900),
        "backward_ns": rng.randint(400, 1900),
        "stash_bytes": rng.randint(0, 900),
    }
    if rng.random() < 0.5:
        cost["backward_weight_ns"] = rng.randint(0, 400)
    if rng.random() < 0.5:
        cost["workspace_bytes"] = rng.randint(0, 300)
    return cost


def _variant(rng: random.Random, degrees: dict[str, int], classes: int, hides: bool) -> Json:
    points = [
        {
            "device_kind": "cpu",
            "micro_batch_size": rows,
            "layers": [_divided(rng, degrees, hides) for _ in range(classes)],
        }
        for rows in rng.sample(range(1, 7), rng.randint(1, 3))
    ]
    return {
        "degrees": degrees,
        "boundary": rng.choice(["sharded", "whole"]),
        "layers": [_layer_on_gpu(rng) for _ in range(classes)],
        "measurements": points,
    }


def _layer_on_gpu(rng: random.Random) -> Json:
    size = rng.randrange(9_000)
    experts = {"expert_bytes": rng.choice([0, size, rng.randint(0, size)])} if rng.random() < 0.7 else {}
    return {"parameter_bytes": size, "update_ns": rng.randint(0, 90), **experts}


def _divided(rng: random.Random, degrees: dict[str, int], hides: bool) -> Json:
    """Draw a layer on one GPU of several; each of its modules may free a part of its stash."""
    cost = _cost(rng) | {"collectives": _collectives(rng, degrees, hides)}
    edges = sorted(rng.randint(0, cost["stash_bytes"]) for _ in MODULES)
    modules = [
        {
            "module": module,
            "forward_ns": rng.randint(0, 600),
            "freed_bytes": high - low,
            "collectives": [each | {"phase": "forward"} for each in _collectives(rng, degrees, hides)],
        }
        for module, low, high in zip(MODULES, (0, *edges), edges, strict=False)
    ]
    return cost | ({"modules": modules} if rng.random() < 0.9 else {})


def _groups(degrees: dict[str, int]) -> list[str]:
    """List the groups of several GPUs that collectives may run over."""
    names = [name for name in ("tensor", "context") if degrees.get(name, 1) > 1]
    return [*names, *(["expert"] if Degrees(**degrees).expert_group > 1 else [])]


def _collectives(rng: random.Random, degrees: dict[str, int], hides: bool) -> list[Json]:
    return [
        {
            "phase": rng.choice(["forward", "backward", "step"]),
            "operation": rng.choice(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]),
            "over": rng.choice(_groups(degrees)),
            "bytes_per_sample": rng.randrange(2_000),
            "count": rng.randint(1, 3),
            "hidden_ns": rng.choice([0, rng.randrange(2_000)]) if hides else 0,
        }
        for _ in range(rng.randrange(3))
    ]


# ---- clusters --------------------------------------------------------------------------------------------------------


def drawn_topology(rng: random.Random, form: str, scaled: bool = False) -> Json:
    """Draw a cluster of a form."""
    memory = {"memory_bytes": 2**30, "context_bytes": rng.randint(0, 9)}
    count, size = rng.randint(1, 5), rng.choice([1, 2, 2, 3, 4, 4, 5, 8])
    if form == "uniform":
        uniform = {"nodes": count, "devices_per_node": size, "kind": "cpu", **memory}
        return {"name": form, "uniform": uniform | {"nic": _line(rng), "fabric": rng.choice([None, _fabric(rng)])}}
    sizes = [size] * count if form != "star" else [rng.choice([size, size, 4]) for _ in range(count)]
    fabric, kinds = _fabric(rng), [rng.choice(["cpu", "fast"]) if scaled else "cpu" for _ in sizes]
    nodes = [
        {
            "name": f"n{n}",
            "fabric": fabric,
            "devices": [{"id": f"n{n}/{d}", "kind": kind, **memory} for d in range(width)],
        }
        for n, (width, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]
    topology = {"name": form, "nodes": nodes, "kinds": [{"name": "fast", "scale_from": "cpu", "speed": 2.5}]}
    names = [each["id"] for node in nodes for each in node["devices"]]
    if form == "matrix":
        width = [[0 if a == b else _rate(rng) for b in names] for a in names]
        latency = [[0 if a == b else rng.randint(0, 40) for b in names] for a in names]
        return topology | {"matrix": {"devices": names, "bandwidth_bytes_per_s": width, "latency_ns": latency}}
    switches, links = _LINKS[form](rng, sizes)
    return topology | {"switches": switches, "links": links}


def _rate(rng: random.Random) -> int:
    return UNIT * rng.randrange(10**4, 10**6)


def _line(rng: random.Random) -> Json:
    return {
        "bandwidth_bytes_per_s": _rate(rng),
        "duplex": rng.choice(["full", "half"]),
        "latency_ns": rng.randint(0, 40),
    }


def _fabric(rng: random.Random) -> Json:
    return {"form": rng.choice(["pairs", "ports", "bus"]), **_line(rng)}


def _star(rng: random.Random, sizes: list[int]) -> tuple[list[str], list[Json]]:
    line = _line(rng)
    return ["switch"], [{"a": f"n{n}", "b": "switch", **line} for n in range(len(sizes))]


def _racks(rng: random.Random, sizes: list[int]) -> tuple[list[str], list[Json]]:
    line, above = _line(rng), _line(rng)
    racks = [f"rack{r}" for r in range(-(-len(sizes) // 2))]
    links = [{"a": f"n{n}", "b": racks[n // 2], **line} for n in range(len(sizes))]
    return [*racks, "spine"], links + [{"a": rack, "b": "spine", **above} for rack in racks]


def _cable_per_gpu(rng: random.Random, sizes: list[int]) -> tuple[list[str], list[Json]]:
    line = _line(rng)
    return ["switch"], [{"a": f"n{n}/{d}", "b": "switch", **line} for n, size in enumerate(sizes) for d in range(size)]


def _rails(rng: random.Random, sizes: list[int]) -> tuple[list[str], list[Json]]:
    line, above = _line(rng), _line(rng)
    rails = [f"rail{d}" for d in range(max(sizes))]
    links = [{"a": f"n{n}/{d}", "b": rails[d], **line} for n, size in enumerate(sizes) for d in range(size)]
    return [*rails, "spine"], links + [{"a": rail, "b": "spine", **above} for rail in rails]


def _circles(rng: random.Random, sizes: list[int]) -> tuple[list[str], list[Json]]:
    """Connect every node to one or two of two leaf switches, both of which are connected to two spines."""
    line, above, leaves, spines = _line(rng), _line(rng), ["leaf0", "leaf1"], ["spine0", "spine1"]
    links = [{"a": leaf, "b": spine, **above} for leaf in leaves for spine in spines]
    for n in range(len(sizes)):
        links += [{"a": f"n{n}", "b": leaf, **line} for leaf in rng.sample(leaves, rng.randint(1, 2))]
    rng.shuffle(links)
    return [*leaves, *spines], links


_LINKS = {"star": _star, "racks": _racks, "own": _cable_per_gpu, "rails": _rails, "circles": _circles}
