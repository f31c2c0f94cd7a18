"""A tiny request with everything inline: OpenAPI's example, the solvers' warm-up, a newcomer's first POST."""

from __future__ import annotations

from typing import Any

from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest


def tiny_profile() -> dict[str, Any]:
    """Return four layers with simple costs: 2 ms forward and 4 ms backward each, at one sample."""
    cost = {"forward_ns": 2_000_000, "backward_ns": 4_000_000, "stash_bytes": 4_000_000}
    return {
        "schema_version": 1,
        "name": "tiny",
        "layers": [{"name": f"block{i}", "kind": "Block", "parameter_bytes": 40_000_000} for i in range(4)],
        "boundaries": [
            [{"name": f"hidden{i}", "bytes_per_sample": 500_000, "gradient_bytes_per_sample": 500_000}]
            for i in range(3)
        ],
        "measurements": [{"device_kind": "V100", "micro_batch_size": 1, "layers": [cost] * 4}],
        "source": {"method": "imported", "description": "made up, to be small", "expected_error": 0.2},
    }


def tiny_topology() -> dict[str, Any]:
    """Return two nodes with one device each, connected by 25 Gbit/s."""
    return {
        "schema_version": 1,
        "name": "two-nodes",
        "uniform": {
            "nodes": 2,
            "devices_per_node": 1,
            "kind": "V100",
            "memory_bytes": 16_000_000_000,
            "nic": {"bandwidth_bytes_per_s": 3_125_000_000, "latency_ns": 30_000},
        },
    }


def tiny_import() -> dict[str, Any]:
    """Return two Slurm switches with two nodes each, and the facts about them that Slurm lacks."""
    text = "SwitchName=a Nodes=n[0-1]\nSwitchName=b Nodes=n[2-3]\nSwitchName=top Switches=a,b\n"
    options = {"name": "tiny-slurm", "devices": ["V100"], "devices_per_node": 4, "memory_bytes": 16 * 2**30}
    return {"schema_version": 1, "sources": [{"text": text, "format": "slurm-conf"}], "options": options}


def tiny_fits() -> dict[str, Any]:
    """Return the question whether a transformer of a few layers fits on two nodes, by any legal pipeline."""
    widths = {"hidden": 1024, "heads": 16, "kv_heads": 16, "head_width": 64, "ffn": 4096}
    shape = {"name": "tiny", "layers": 4, "gated": False, "vocabulary": 50_257, "sequence_length": 1024, **widths}
    return {"schema_version": 1, "shape": shape, "topology": tiny_topology(), "pipeline": "all"}


def tiny_request() -> dict[str, Any]:
    """Return a request that is answered at once, and can be POSTed to ``/v1/plans`` as it is."""
    return {
        "schema_version": 1,
        "profile": tiny_profile(),
        "topology": tiny_topology(),
        "global_batch_size": 16,
        "planner": "auto",
        "schedule": "auto",
    }


def tiny_sweep() -> dict[str, Any]:
    """Return the tiny request with two batch sizes and two planners."""
    over = {"global_batch_sizes": [8, 16], "planners": ["gpipe", "dapple"]}
    return {"schema_version": 1, "request": tiny_request(), "over": over}


def tiny_plan_file() -> dict[str, Any]:
    """Return a hand-made plan of the tiny request, not judged yet: two stages, four micro-batches, early backward."""
    request = tiny_request()
    stages = [{"layers": [0, 1], "devices": ["node0/0"]}, {"layers": [2, 3], "devices": ["node1/0"]}]
    return {
        "schema_version": 1,
        "plan": {
            "schema_version": 1,
            "request_hash": PlanRequest.parse(request).content_hash(),
            "planner": "by-hand",
            "global_batch_size": 16,
            "micro_batch_size": 4,
            "num_micro_batches": 4,
            "pipelines": [{"stages": stages, "micro_batches": [0, 3]}],
            "update_rule": "synchronous",
            "schedule": {
                "name": "early-backward",
                "rows": [
                    {"devices": ["node0/0"], "text": "F0 F1 B0 F2 B1 F3 B2 B3"},
                    {"devices": ["node1/0"], "text": "F0 B0 F1 B1 F2 B2 F3 B3"},
                ],
                "warmup": [2, 1],
            },
            "prediction": None,
        },
        "request": request,
    }


def tiny_compare() -> dict[str, Any]:
    """Return a comparison of two planners."""
    return {"schema_version": 1, "request": tiny_request(), "planners": ["dapple", "even"]}


def tiny_explain() -> dict[str, Any]:
    """Return a plan with one change to explain."""
    return {"schema_version": 1, "plan": tiny_plan_file(), "what_if": ["bandwidth=2"]}


def tiny_layout() -> dict[str, Any]:
    """Return DeepSpeed's two equal parts of the tiny model."""
    parts = '{"parts": [0, 2, 4], "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}'
    return {"schema_version": 1, "format": "deepspeed", "layout": parts, "request": tiny_request(), "compare": False}


def tiny_placement() -> dict[str, Any]:
    """Return a placement of the tiny model, which may have one or both nodes of the tiny topology."""
    job = {"name": "tiny", "profile": tiny_profile(), "global_batch_size": 16, "micro_batch_sizes": [4]}
    return {"schema_version": 1, "topology": tiny_topology(), "jobs": [job], "free": ["node[0-1]"]}


def tiny_throughput() -> dict[str, Any]:
    """Return the tiny plan, a run of which took 400 ms per global batch."""
    return {"schema_version": 1, "plan_file": tiny_plan_file(), "step_ns": 400_000_000}


def tiny_calibration() -> dict[str, Any]:
    """Return the tiny profile, and a trace in which each operation took a tenth longer and nothing else took time."""
    file = tiny_plan_file()
    forward_ns = 2 * 4 * 2_200_000
    ranks, end_ns = [], 0
    for rank, row in enumerate(file["plan"]["schedule"]["rows"]):
        at_ns, events = rank * forward_ns, []
        for operation in row["text"].split():
            took_ns = forward_ns if operation[0] == "F" else 2 * forward_ns
            events.append({"instruction": f"{rank}{operation}", "start_ns": at_ns, "end_ns": at_ns + took_ns})
            at_ns += took_ns
        end_ns = max(end_ns, at_ns)
        ranks.append({"rank": rank, "device": row["devices"][0], "step": 0, "events": events})
    trace = {
        "schema_version": 1,
        "plan_hash": Plan.parse(file["plan"]).content_hash(),
        "predicted_time_per_global_batch_ns": end_ns,
        "measured_times_per_global_batch_ns": [end_ns],
        "ranks": ranks,
        "plan_file": file,
    }
    return {"schema_version": 1, "profile": tiny_profile(), "traces": [trace], "links": False}
