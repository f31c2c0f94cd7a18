"""A request of four layers on two nodes with two devices each, as documents."""

from __future__ import annotations

from penstock.schemas.request import PlanRequest

CUT = [{"name": "x", "bytes_per_sample": 4, "gradient_bytes_per_sample": 2}]


def a_request(**changes: object) -> PlanRequest:
    layer = {"forward_ns": 10, "backward_ns": 21, "stash_bytes": 8}
    profile = {
        "name": "m",
        "layers": [{"name": f"l{i}", "parameter_bytes": 100 * i, "trainable": i != 2} for i in range(4)],
        "boundaries": [CUT] * 3,
        "measurements": [{"device_kind": "V100", "micro_batch_size": 2, "layers": [layer] * 4}],
        "source": {"method": "imported", "expected_error": 0.1},
    }
    nodes = [
        {
            "name": n,
            "devices": [{"id": f"{n}/{d}", "kind": "V100", "memory_bytes": 1000} for d in range(2)],
            "fabric": {"bandwidth_bytes_per_s": 100},
        }
        for n in ("a", "b")
    ]
    links = [{"a": "a", "b": "b", "bandwidth_bytes_per_s": 10}]
    topology = {"name": "c", "nodes": nodes, "links": links} | changes.pop("topology", {})
    profile |= changes.pop("profile", {})
    return PlanRequest.parse({"profile": profile, "topology": topology, "global_batch_size": 8} | changes)
