"""A plan of many devices, made by hand: four stages of one layer each on equal shares of all but the last nodes."""

from __future__ import annotations

from penstock.examples.tiny import tiny_plan_file, tiny_request
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest

STAGES, BATCHES, DEVICES_PER_NODE = 4, 4, 8


def large_plan_file(nodes: int = 128, idle_nodes: int = 4) -> PlanFile:
    """Return a plan, not judged yet, that leaves the last ``idle_nodes`` nodes idle."""
    request = tiny_request()
    request["topology"]["name"] = f"{nodes}x8xV100"
    request["topology"]["uniform"] |= {
        "nodes": nodes,
        "devices_per_node": DEVICES_PER_NODE,
        "fabric": {"bandwidth_bytes_per_s": 10**11},
    }
    share = (nodes - idle_nodes) // STAGES
    replicas = DEVICES_PER_NODE * share
    devices_of_stage = [
        [f"node{n}/{d}" for n in range(s * share, (s + 1) * share) for d in range(DEVICES_PER_NODE)]
        for s in range(STAGES)
    ]
    batch = BATCHES * replicas
    request["global_batch_size"] = batch
    document = tiny_plan_file()
    text = " ".join(f"{kind}{m}" for kind in "FB" for m in range(BATCHES))
    document["request"] = request
    document["plan"] |= {
        "request_hash": PlanRequest.parse(request).content_hash(),
        "global_batch_size": batch,
        "micro_batch_size": replicas,
        "num_micro_batches": BATCHES,
        "pipelines": [
            {
                "stages": [{"layers": [s, s], "devices": devices} for s, devices in enumerate(devices_of_stage)],
                "micro_batches": [0, BATCHES - 1],
            }
        ],
        "schedule": {"name": "gpipe", "rows": [{"devices": devices, "text": text} for devices in devices_of_stage]},
    }
    return PlanFile.parse(document)
