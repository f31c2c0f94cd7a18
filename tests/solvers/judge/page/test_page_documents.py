"""The page's reading of documents, run on the page's simulator, gives the simulator's result for the request."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from drawn_tables import drawn_table
from page_agreement import assert_same
from page_documents import read_request
from page_simulator import simulate_page
from random_plans import encoded, random_allocation, random_orders

from penstock.convert import to_problem
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.request import PlanRequest
from penstock.solvers.judge.simulate import simulate

WIDTHS = (10**9, 5 * 10**8, 3 * 10**9)


def random_request(rng: random.Random) -> PlanRequest:
    """Draw any profile of up to five layers on any topology of up to six devices."""
    while True:
        request: dict[str, Any] = {
            "profile": _profile(rng),
            "topology": _topology(rng),
            "global_batch_size": rng.randint(1, 12),
            "micro_batch_sizes": [1],
            "codec": "auto",
            "planner": "gpipe",
            "memory": {
                "optimizer": rng.choice(["sgd", "momentum", "adam"]),
                "precision": rng.choice(["mixed", "full"]),
                "gradient": rng.choice(["parameter", "fp32"]),
                "optimizer_sharding": rng.choice(["none", "over_replicas"]),
                "buffers": rng.choice(["exact", "exact", "none"]),
            },
            "network": {
                "sharing": rng.choice(["shared", "private"]),
                "channel": rng.choice(["half", "full", "none"]),
                "transfer": rng.choice(["nic", "spp", "dapple", "madpipe"]),
                "all_reduce": rng.choice(["flat", "hierarchical", "dapple"]),
                "bucket_bytes": rng.choice([10, 60, 1000]),
                "overlap_all_reduce": rng.random() < 0.5,
            },
        }
        if rng.random() < 0.4:
            request["topology"]["collectives"] = drawn_table(rng, 200, 300)
        try:
            parsed = PlanRequest.parse(request)
            to_problem(parsed)
        except InvalidDocument:  # a topology in parts
            continue
        return parsed


def _profile(rng: random.Random) -> dict[str, Any]:
    count = rng.randint(1, 5)
    layers = [
        {
            "name": f"l{n}",
            "parameter_bytes": rng.randint(1, 40),
            "trainable": rng.random() < 0.8,
            "update_ns": rng.randint(0, 5),
        }
        for n in range(count)
    ]
    other_rng = random.Random(repr(layers))  # what is drawn after it stays as it is
    if other_rng.random() < 0.5:
        layers = [
            layer | {"update_workspace_bytes": other_rng.choice([0, other_rng.randint(1, 200)])} for layer in layers
        ]
    tensors = []
    for _ in range(count - 1):
        sizes = [(size, rng.choice([size, 0])) for size in (rng.randint(1, 9) for _ in range(rng.randint(1, 2)))]
        tensors.append(
            [{"name": f"t{k}", "bytes_per_sample": a, "gradient_bytes_per_sample": b} for k, (a, b) in enumerate(sizes)]
        )
    measurements = [
        {"device_kind": "cpu", "micro_batch_size": rows, "layers": [_measured_layer(rng) for _ in layers]}
        for rows in rng.sample(range(1, 7), rng.randint(1, 3))
    ]
    ties = []
    if count > 1 and rng.random() < 0.4:
        tied = sorted(rng.sample(range(count), 2))
        ties = [{"name": "wte", "layers": tied, "bytes": rng.randint(1, layers[tied[0]]["parameter_bytes"])}]
    return {
        "name": "random",
        "layers": layers,
        "boundaries": tensors,
        "measurements": measurements,
        "shared_parameters": ties,
        "update_in_turn": other_rng.choice([None, False, True]),
        "parameter_dtype": rng.choice(["fp32", "fp32", "bf16"]),
        "scaling": rng.choice(["linear", "measured"]),
        "codec_speeds": [{"device_kind": "cpu", "encode_bytes_per_s": 10**9, "decode_bytes_per_s": 7 * 10**8}],
        "source": {"method": "analytic", "expected_error": 0.1},
    }


def _measured_layer(rng: random.Random) -> dict[str, int]:
    layer = {"forward_ns": rng.randint(1, 15), "backward_ns": rng.randint(8, 30), "stash_bytes": rng.randint(0, 50)}
    if rng.random() < 0.5:
        layer["backward_weight_ns"] = rng.randint(0, 8)
    if rng.random() < 0.5:
        layer["workspace_bytes"] = rng.randint(0, 20)
    return layer


def _fabric(rng: random.Random) -> dict[str, Any]:
    return {"form": rng.choice(["pairs", "ports", "bus"]), **_line(rng)}


def _line(rng: random.Random) -> dict[str, Any]:
    line = {"bandwidth_bytes_per_s": rng.choice(WIDTHS), "duplex": rng.choice(["full", "half"])}
    return line | ({"latency_ns": rng.randint(0, 4)} if rng.random() < 0.5 else {})


def _topology(rng: random.Random) -> dict[str, Any]:
    kinds = [{"name": "fast", "scale_from": "cpu", "speed": rng.choice([2.5, 0.3])}]
    memory = {"memory_bytes": 2**30, "context_bytes": rng.randint(0, 9)}
    form = rng.choice(["uniform", "links", "links", "matrix"])
    if form == "uniform":
        uniform = {"nodes": rng.randint(1, 3), "devices_per_node": rng.randint(1, 2), "kind": "cpu", **memory}
        uniform |= {"nic": _line(rng) if rng.random() < 0.8 else None, "fabric": rng.choice([None, _fabric(rng)])}
        return {"name": "u", "uniform": uniform}
    nodes = [
        {
            "name": f"n{n}",
            "fabric": _fabric(rng) if rng.random() < 0.6 else None,
            "devices": [
                {"id": f"n{n}/{d}", "kind": rng.choice(["cpu", "cpu", "fast"]), **memory}
                for d in range(rng.randint(1, 2))
            ],
        }
        for n in range(rng.randint(1, 3))
    ]
    names = [each["id"] for node in nodes for each in node["devices"]]
    if form == "matrix":
        rng.shuffle(names)
        width = [[0 if a == b else rng.choice(WIDTHS) for b in names] for a in names]
        latency = [[0 if a == b else rng.randint(0, 4) for b in names] for a in names] if rng.random() < 0.5 else None
        matrix = {"devices": names, "bandwidth_bytes_per_s": width, "latency_ns": latency}
        return {"name": "m", "nodes": nodes, "matrix": matrix, "kinds": kinds}
    ends = [node["name"] for node in nodes] * rng.randint(1, 2)
    ends += [name for name in names if rng.random() < 0.2]
    links = [{"a": end, "b": rng.choice(["leaf", "spine"]), **_line(rng)} for end in ends]
    links.append({"a": "spine", "b": "leaf", **_line(rng)})
    rng.shuffle(links)
    return {"name": "l", "nodes": nodes, "switches": ["spine", "leaf"], "links": links, "kinds": kinds}


@pytest.mark.parametrize("seed", range(120))
def test_documents_mean_what_the_page_says(seed: int) -> None:
    rng = random.Random(seed)
    request = random_request(rng)
    problem = to_problem(request)
    allocation = random_allocation(rng, problem)
    orders = random_orders(rng, allocation)
    if {device.kind for device in problem.devices} == {"cpu"}:
        allocation = encoded(rng, allocation)
    run = simulate_page(read_request(request.model_dump(mode="json")), allocation, orders)  # type: ignore[arg-type]
    assert_same(simulate(problem, allocation, orders), run)


def test_documents_of_every_kind_are_met() -> None:
    """A third of the seeds has documents of every kind."""
    met: Counter[str] = Counter()
    for seed in range(0, 120, 3):
        request = random_request(random.Random(seed)).model_dump(mode="json")
        topology, profile = request["topology"], request["profile"]
        nodes = topology["nodes"]
        features = {
            "uniform": topology["uniform"],
            "matrix": topology["matrix"],
            "links": topology["links"],
            "no fabric": any(node["fabric"] is None and len(node["devices"]) > 1 for node in nodes),
            "scaled kind": any(each["kind"] == "fast" for node in nodes for each in node["devices"]),
            "16 bits": profile["parameter_dtype"] == "bf16",
            "ties": profile["shared_parameters"],
            "measured collectives": topology["collectives"],
        }
        met.update(name for name, there in features.items() if there)
    assert len(met) == 8
    assert min(met.values()) > 6
