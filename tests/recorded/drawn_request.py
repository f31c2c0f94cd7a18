"""Small requests as plain documents, drawn from a number: every network, update rule and kind of memory in turn."""

from __future__ import annotations

import random
from typing import Any, get_args

from penstock.schemas.request import UpdateRule

Document = dict[str, Any]

NETWORKS = (("shared", "half"), ("private", "half"), ("private", "full"), ("private", "none"))
RULES: tuple[str, ...] = get_args(UpdateRule)
NODES = ((2,), (3,), (4,), (1, 1), (2, 2), (1, 1, 1, 1), (3, 2), (2, 2, 2), (4, 2), (1, 2, 3))
STATES = {"sgd": 2, "momentum": 3, "adam": 4}
"""Copies of a parameter that a device holds: the parameter, its gradient and the optimizer's states."""
KINDS = ("slow", "quick")
CONTEXT_BYTES = 1_000_000


def drawn(number: int) -> Document:
    """Return the request of a number; its profile and topology are inline."""
    rng = random.Random(7_000 + number)
    kinds = KINDS if number % 5 == 0 else KINDS[:1]
    layers = rng.randint(3, 8)
    optimizer = rng.choice(sorted(STATES))
    batch = rng.choice([6, 7, 8, 10, 12, 13, 16])
    profile = _profile(rng, f"drawn-{number}", kinds, layers)
    topology = _topology(rng, f"drawn-{number}", kinds)
    if number % 3 == 0:
        _limit_memory(rng, profile, topology, STATES[optimizer], 0.1 if number % 15 == 0 else 1.0)
    sharing, channel = NETWORKS[number % len(NETWORKS)]
    return {
        "profile": profile,
        "topology": topology,
        "global_batch_size": batch,
        "micro_batch_sizes": rng.choice([[], [1], [2], [1, 2], [3]]),
        "update_rules": _rules(number),
        "recompute": ("auto", "never", "always", "auto")[number % 4 if number % 3 else 0],
        "memory": {
            "optimizer": optimizer,
            "buffers": rng.choice(["exact", "exact", "none"]),
            "optimizer_sharding": rng.choice(["none", "none", "over_replicas"]),
        },
        "network": {
            "sharing": sharing,
            "channel": channel,
            "transfer": rng.choice(["nic", "spp", "dapple", "madpipe"]),
            "all_reduce": rng.choice(["flat", "hierarchical", "dapple"]),
            "bucket_bytes": rng.choice([2_000_000, 25_000_000]),
            "overlap_all_reduce": rng.random() < 0.8,
        },
        "pins": _pins(rng, layers, topology) if number % 6 == 2 else [],
        "codec": "auto" if number % 8 == 3 else None,
        "termination": {"max_plans": 30},
    }


def _rules(number: int) -> list[str]:
    """Return synchronous, one other rule alone, both, or all."""
    other = RULES[1 + number % 4]
    return {1: [other], 2: [other], 3: list(RULES), 4: ["synchronous", other]}.get(number % 7, ["synchronous"])


def _profile(rng: random.Random, name: str, kinds: tuple[str, ...], layers: int) -> Document:
    """Draw a chain whose layers take 0.1 ms to 3 ms forward."""
    forward = [rng.randint(100_000, 3_000_000) for _ in range(layers)]
    ratio = [rng.choice([1.5, 2.0, 2.0, 2.5, 3.0]) for _ in range(layers)]
    weight = [rng.choice([None, 0.3, 0.5, 0.7]) for _ in range(layers)]
    stash = [rng.randint(0, 4_000_000) for _ in range(layers)]
    work = [rng.choice([0, 0, rng.randint(0, 2_000_000)]) for _ in range(layers)]
    scaling = rng.choice(["linear", "measured"])
    measurements = []
    for kind, speed in zip(kinds, (1.0, 1.6), strict=False):
        for size in (1,) if scaling == "linear" else (1, 4):
            times = (size if size == 1 else size * 0.8) / speed
            costs = [
                {
                    "forward_ns": int(f * times),
                    "backward_ns": int(f * r * times),
                    "backward_weight_ns": None if w is None else int(f * r * times * w),
                    "stash_bytes": s * size,
                    "workspace_bytes": k * size,
                }
                for f, r, w, s, k in zip(forward, ratio, weight, stash, work, strict=True)
            ]
            measurements.append({"device_kind": kind, "micro_batch_size": size, "layers": costs})
    uncut = rng.random() < 0.3
    tied = rng.random() < 0.25
    return {
        "name": name,
        "layers": [
            {
                "name": f"layer{i}",
                "parameter_bytes": rng.randint(500_000, 20_000_000),
                "update_ns": rng.choice([0, rng.randint(0, 60_000)]),
                "cuttable": not (uncut and rng.random() < 0.3),
            }
            for i in range(layers)
        ],
        "boundaries": [_boundary(rng) for _ in range(layers - 1)],
        "shared_parameters": [{"name": "tied", "layers": [0, layers - 1], "bytes": 400_000}] if tied else [],
        "measurements": measurements,
        "codec_speeds": [
            {"device_kind": kind, "encode_bytes_per_s": 10**10, "decode_bytes_per_s": 2 * 10**10} for kind in kinds
        ],
        "scaling": scaling,
        "source": {"method": "imported", "expected_error": 0.0},
    }


def _boundary(rng: random.Random) -> list[Document]:
    size = rng.randint(0, 500_000) * 4
    return [{"name": "x", "bytes_per_sample": size, "gradient_bytes_per_sample": rng.choice([size, size, 0])}]


def _topology(rng: random.Random, name: str, kinds: tuple[str, ...]) -> Document:
    """Draw two to six devices; nodes of two kinds take turns."""
    shape = rng.choice(NODES)
    form, duplex = rng.choice(["pairs", "ports", "bus"]), rng.choice(["full", "half"])
    latency = rng.choice([0, 0, 5_000])
    wire = {"latency_ns": latency, "duplex": duplex}
    inside = {"form": form, "bandwidth_bytes_per_s": rng.choice([5, 10, 60]) * 10**9, **wire}
    between = {"bandwidth_bytes_per_s": rng.choice([1, 2, 10]) * 10**9, **wire}
    nodes = []
    for i, size in enumerate(shape):
        device = {"kind": kinds[i % len(kinds)], "memory_bytes": 2**40, "context_bytes": CONTEXT_BYTES}
        devices = [{"id": f"n{i}/{j}", **device} for j in range(size)]
        nodes.append({"name": f"n{i}", "devices": devices, "fabric": inside})
    links = [{"a": f"n{i}", "b": "switch", **between} for i in range(len(shape))]
    return {"name": name, "nodes": nodes, "switches": ["switch"], "links": links}


def _limit_memory(rng: random.Random, profile: Document, topology: Document, copies: int, share: float) -> None:
    """Give each device about its share of the model, unequal in half of the cases; much less, and nothing fits."""
    devices = [device for node in topology["nodes"] for device in node["devices"]]
    weights = [layer["parameter_bytes"] * copies for layer in profile["layers"]]
    first = profile["measurements"][0]["layers"]
    kept = sum(layer["stash_bytes"] + layer["workspace_bytes"] for layer in first)
    part = sum(weights) // min(len(devices), len(weights))
    base = CONTEXT_BYTES + int(share * (max(max(weights) * 1.3, part * 1.9) + kept * rng.choice([1, 2, 4])))
    unequal = rng.random() < 0.5
    for device in devices:
        device["memory_bytes"] = int(base * (rng.choice([1, 1.25, 2]) if unequal else 1.3))


def _pins(rng: random.Random, layers: int, topology: Document) -> list[Document]:
    """Draw pins: the first layers or the last ones on one or more of the devices."""
    names = [device["id"] for node in topology["nodes"] for device in node["devices"]]
    chosen = sorted(rng.sample(names, rng.randint(1, len(names) - 1)))
    span = rng.choice([[0, 0], [0, 1], [layers - 1, layers - 1]])
    return [{"layers": span, "devices": chosen}]
