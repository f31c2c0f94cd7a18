"""Plans by hand on nodes of any names and sizes: one stage per device, all forwards before all backwards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from penstock.examples.tiny import tiny_profile
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest

MICRO_BATCHES = 2
GIGABYTE = 10**9


def plan_on(
    used: Mapping[str, int],
    *,
    devices: Mapping[str, int] | None = None,
    kind: str = "V100",
    switches: Mapping[str, str] | None = None,
) -> PlanFile:
    """Plan a stage on each of the first ``used[node]`` devices of every node, in the order of ``used``.

    ``devices`` has the number of devices of a node with further ones, and ``switches`` the switch of a node.
    """
    return _plan_on(tuple(used.items()), tuple((devices or {}).items()), kind, tuple((switches or {}).items()))


@lru_cache
def _plan_on(
    used: tuple[tuple[str, int], ...],
    devices: tuple[tuple[str, int], ...],
    kind: str,
    switches: tuple[tuple[str, str], ...],
) -> PlanFile:
    device_ids = [f"{node}/{index}" for node, count in used for index in range(count)]
    profile = tiny_profile()
    layers, cost = len(device_ids), profile["measurements"][0]["layers"][0]
    profile["layers"] = [{"name": f"block{i}", "kind": "Block", "parameter_bytes": 1000} for i in range(layers)]
    tensor = {"bytes_per_sample": 1000, "gradient_bytes_per_sample": 1000}
    profile["boundaries"] = [[{"name": f"hidden{i}", **tensor}] for i in range(layers - 1)]
    profile["measurements"] = [{"device_kind": kind, "micro_batch_size": 1, "layers": [cost] * layers}]
    request = {"profile": profile, "topology": _topology(used, dict(devices), kind, dict(switches))}
    request["global_batch_size"] = MICRO_BATCHES
    forwards_and_backwards = " ".join(f"{letter}{i}" for letter in "FB" for i in range(MICRO_BATCHES))
    plan = {
        "request_hash": PlanRequest.parse(request).content_hash(),
        "planner": "by-hand",
        "global_batch_size": MICRO_BATCHES,
        "micro_batch_size": 1,
        "num_micro_batches": MICRO_BATCHES,
        "pipelines": [
            {
                "stages": [{"layers": [i, i], "devices": [device]} for i, device in enumerate(device_ids)],
                "micro_batches": [0, MICRO_BATCHES - 1],
            }
        ],
        "update_rule": "synchronous",
        "schedule": {
            "name": "gpipe",
            "rows": [{"devices": [device], "text": forwards_and_backwards} for device in device_ids],
            "warmup": [MICRO_BATCHES] * layers,
        },
    }
    return PlanFile.parse({"plan": plan, "request": request})


def _topology(
    used: tuple[tuple[str, int], ...], devices: dict[str, int], kind: str, switches: dict[str, str]
) -> dict[str, object]:
    nodes = [
        {
            "name": node,
            "devices": [
                {"id": f"{node}/{index}", "kind": kind, "memory_bytes": 16 * GIGABYTE}
                for index in range(devices.get(node, count))
            ],
            "fabric": {"bandwidth_bytes_per_s": GIGABYTE},
        }
        for node, count in used
    ]
    names = ["top", *dict.fromkeys(switches.values())]
    links = [(node, switches.get(node, "top")) for node, _ in used] + [(name, "top") for name in names[1:]]
    return {
        "name": "by-hand",
        "nodes": nodes,
        "switches": names,
        "links": [{"a": a, "b": b, "bandwidth_bytes_per_s": GIGABYTE} for a, b in links],
    }
