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


DIVIDED = {"forward_ns": 6, "backward_ns": 12, "stash_bytes": 4, "workspace_bytes": 1}
GATHER = {"phase": "forward", "operation": "all_gather", "over": "tensor", "bytes_per_sample": 3}


def with_degrees(profile: dict[str, object] | None = None, **changes: object) -> PlanRequest:
    """Return the request with variants of the model for two GPUs each, among which degrees are chosen."""
    layers = [{"parameter_bytes": 50 * i, "update_ns": i} for i in range(4)]
    costs = [DIVIDED, DIVIDED, DIVIDED | {"collectives": [GATHER]}, DIVIDED]
    measured = {"device_kind": "V100", "micro_batch_size": 2, "layers": costs}
    variant = {"degrees": {"tensor": 2}, "boundary": "sharded", "layers": layers, "measurements": [measured]}
    model = {"classes": [0, 1, 2, 3], "variants": [variant]} | (profile or {})
    topology = {"nodes": [_node(name) for name in ("a", "b")]}
    return a_request(profile=model, **({"topology": topology, "degrees": "auto", "micro_batch_sizes": [2]} | changes))


def _node(name: str) -> dict[str, object]:
    devices = [{"id": f"{name}/{d}", "kind": "V100", "memory_bytes": 3000} for d in range(2)]
    return {"name": name, "devices": devices, "fabric": {"bandwidth_bytes_per_s": 10**9}}
