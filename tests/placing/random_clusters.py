"""Small random clusters and jobs for tests of placements: switches over switches, nodes of unequal devices."""

from __future__ import annotations

import random
from typing import Any

from penstock.schemas.api.placement import PlacementRequest
from penstock.schemas.topology import ClusterTopology, Device, Fabric, Link, Node

KINDS = ("V100", "A100")
PRICES = {"V100": 1.0, "A100": 2.5}


def tree(rng: random.Random, nodes: int) -> ClusterTopology:
    """Draw nodes of one or two devices below leaves below a top switch.

    There are few different bandwidths, so that sets are alike.
    """
    leaves = max(1, nodes // rng.choice([2, 3]))
    links = [
        Link(a="top", b=f"leaf{leaf}", bandwidth_bytes_per_s=rng.choice([2, 4]) * 10**8, latency_ns=0)
        for leaf in range(leaves)
    ]
    hosts = []
    for number in range(nodes):
        name, kind = f"n{number}", rng.choice(KINDS)
        ids = [f"{name}/{d}" for d in range(rng.choice([1, 2]))]
        devices = tuple(Device(id=i, kind=kind, memory_bytes=600_000_000, price=PRICES[kind]) for i in ids)
        hosts.append(Node(name=name, devices=devices, fabric=Fabric(bandwidth_bytes_per_s=10**9)))
        leaf = f"leaf{rng.randrange(leaves)}"
        links.append(Link(a=leaf, b=name, bandwidth_bytes_per_s=5 * 10**8, latency_ns=1000, duplex="full"))
    switches = ("top", *(f"leaf{leaf}" for leaf in range(leaves)))
    return ClusterTopology(name="random", nodes=tuple(hosts), switches=switches, links=tuple(links))


def profile(rng: random.Random, layers: int = 3) -> dict[str, Any]:
    """Draw a chain whose layers take milliseconds and send megabytes."""
    kinds = dict(zip(KINDS, (2, 1), strict=True))
    costs = [rng.randint(2, 9) * 1_000_000 for _ in range(layers)]
    return {
        "schema_version": 1,
        "name": "chain",
        "layers": [{"name": f"l{i}", "kind": "block", "parameter_bytes": 40_000_000} for i in range(layers)],
        "boundaries": [
            [{"name": f"b{i}", "bytes_per_sample": size, "gradient_bytes_per_sample": size}]
            for i, size in enumerate(rng.choice([200_000, 900_000]) for _ in range(layers - 1))
        ],
        "measurements": [
            {
                "device_kind": kind,
                "micro_batch_size": 1,
                "layers": [
                    {"forward_ns": cost * factor, "backward_ns": 2 * cost * factor, "stash_bytes": 30_000_000}
                    for cost in costs
                ],
            }
            for kind, factor in kinds.items()
        ],
        "source": {"method": "imported", "description": "made up", "expected_error": 0.1},
    }


def request(seed: int, *, nodes: int = 4, planner: str = "exact", **more: Any) -> PlacementRequest:
    """Draw a request of one job on a random cluster, of which everything is free.

    ``more`` has fields of the job (``allowed``: its ``nodes``) and of the request.
    """
    rng = random.Random(seed)
    allowed = more.pop("allowed", {})
    fields = {name: more.pop(name) for name in ("objective", "free", "busy", "time_limit_ns") if name in more}
    job = {
        "name": "job",
        "profile": profile(rng),
        "global_batch_size": 4,
        "micro_batch_sizes": [1, 2],
        "memory": {"optimizer": "sgd"},
        "planner": planner,
        "nodes": allowed,
        **more,
    }
    return PlacementRequest.parse({"topology": tree(rng, nodes), "jobs": [job], **fields})
