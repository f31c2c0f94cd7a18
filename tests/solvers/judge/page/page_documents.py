"""Sections 2.1 to 2.3 of docs/theory/judge.md in plain Python: the meaning of a request's documents.

Written from the page alone: reads JSON and calls no function of ``penstock``; only its records hold the results.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import (
    CodecSpeed,
    Device,
    Measured,
    MeasuredCollective,
    MemoryRules,
    NetworkRules,
)

Json = dict[str, Any]


def read_request(request: Json) -> SimpleNamespace:
    """Read the fields of a ``Problem`` that the page's simulator uses."""
    profile, topology = request["profile"], _written_out(request["topology"])
    layers, cuts = profile["layers"], profile["boundaries"]
    size = [layer["parameter_bytes"] for layer in layers]
    network = request["network"]
    fp32 = profile["parameter_dtype"] == "fp32"
    return SimpleNamespace(
        num_layers=len(layers),
        global_batch_size=request["global_batch_size"],
        parameter_bytes=_prefix(size),
        trainable_bytes=_prefix(p if layer["trainable"] else 0 for p, layer in zip(size, layers, strict=True)),
        update_ns=_prefix(layer["update_ns"] for layer in layers),
        update_workspace_bytes=[layer.get("update_workspace_bytes") or 0 for layer in layers],
        update_in_turn=bool(profile.get("update_in_turn")),
        forward_bytes=[sum(t["bytes_per_sample"] for t in cut) for cut in cuts],
        backward_bytes=[sum(t["gradient_bytes_per_sample"] for t in cut) for cut in cuts],
        shared_parameters=[(tie["name"], tie["layers"], tie["bytes"]) for tie in profile["shared_parameters"]],
        measured=_measured(profile),
        linear=profile["scaling"] == "linear",
        kind_source=_kinds(profile, topology),
        codec_speeds={
            each["device_kind"]: CodecSpeed(each["encode_bytes_per_s"], each["decode_bytes_per_s"])
            for each in profile["codec_speeds"] or ()
        },
        encodable=[_encodable(cut) if fp32 else (0, 0) for cut in cuts],
        devices=[
            Device(each["id"], n, each["kind"], each["memory_bytes"], each["context_bytes"], None)
            for n, node in enumerate(topology["nodes"])
            for each in node["devices"]
        ],
        network=_network(topology),
        memory=_memory(request["memory"], fp32, request["profile"]["framework"]),
        rules=NetworkRules(
            network["sharing"] == "shared",
            *(network[name] for name in ("channel", "transfer", "all_reduce", "bucket_bytes", "overlap_all_reduce")),
        ),
        pipeline_run=None,
        collectives=[MeasuredCollective(**each) for each in topology.get("collectives") or ()],
    )


def _prefix(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _measured(profile: Json) -> dict[str, tuple[Measured, ...]]:
    points: dict[str, tuple[Measured, ...]] = {}
    for each in profile["measurements"]:
        columns = [[layer[name] for layer in each["layers"]] for name in ("forward_ns", "backward_ns")]
        halves = [layer["backward_weight_ns"] for layer in each["layers"]]
        columns.append([b // 2 if w is None else w for b, w in zip(columns[1], halves, strict=True)])
        columns += [[layer[name] for layer in each["layers"]] for name in ("stash_bytes", "workspace_bytes")]
        point = Measured(each["micro_batch_size"], *columns)  # type: ignore[arg-type]
        points[each["device_kind"]] = (*points.get(each["device_kind"], ()), point)
    return points


def _kinds(profile: Json, topology: Json) -> dict[str, tuple[str, float]]:
    scaled = {kind["name"]: (kind["scale_from"], kind["speed"]) for kind in topology["kinds"]}
    return scaled | {each["device_kind"]: (each["device_kind"], 1) for each in profile["measurements"]}


def _encodable(cut: list[Json]) -> tuple[int, int]:
    sizes = [t["bytes_per_sample"] for t in cut if t["bytes_per_sample"] == t["gradient_bytes_per_sample"]]
    return sum(sizes), len(sizes)


def _memory(memory: Json, fp32: bool, framework: str | None) -> MemoryRules:
    mixed = memory["precision"] == "mixed" and not fp32
    return MemoryRules(
        gradient_factor=2 if memory["gradient"] == "fp32" and not fp32 else 1,
        states={"sgd": 0, "momentum": 1, "adam": 2}[memory["optimizer"]],
        state_width=2 if mixed else 1,
        master_factor=2 if mixed else 0,
        shard_states=memory["optimizer_sharding"] != "none",
        shard_factor=0 if mixed and framework != "megatron" else 1,
        headroom_bytes=memory["headroom_bytes"],
        count_buffers=memory["buffers"] == "exact",
    )


def _written_out(topology: Json) -> Json:
    """Write out a uniform topology as nodes and links."""
    if topology["uniform"] is None:
        return topology
    uniform = topology["uniform"]
    names = [f"node{n}" for n in range(uniform["nodes"])]
    device = {name: uniform[name] for name in ("kind", "memory_bytes", "context_bytes")}
    nodes = [
        {
            "name": name,
            "fabric": uniform["fabric"],
            "devices": [device | {"id": f"{name}/{d}"} for d in range(uniform["devices_per_node"])],
        }
        for name in names
    ]
    links = [uniform["nic"] | {"a": name, "b": "switch"} for name in names] if uniform["nic"] else []
    return topology | {"nodes": nodes, "links": links}


def _network(topology: Json) -> Network:
    """Read the fields of a network; a node without a fabric stays without one."""
    nodes = topology["nodes"]
    names = [each["id"] for node in nodes for each in node["devices"]]
    width = latency = None
    if (matrix := topology["matrix"]) is not None:
        place = [matrix["devices"].index(name) for name in names]
        none = [[0] * len(names) for _ in names]
        width, latency = (
            [[table[a][b] for b in place] for a in place]
            for table in (matrix["bandwidth_bytes_per_s"], matrix["latency_ns"] or none)
        )
    return Network(
        device_names=tuple(names),
        node_names=tuple(node["name"] for node in nodes),
        node_of=tuple(n for n, node in enumerate(nodes) for _ in node["devices"]),
        insides=tuple(node["fabric"] and _inside(node["fabric"]) for node in nodes),
        cables=tuple(
            Cable(
                x["a"], x["b"], x["bandwidth_bytes_per_s"], x["latency_ns"], x["duplex"] == "full", x.get("lanes") or 1
            )
            for x in topology["links"]
        ),
        matrix_bytes_per_s=width,  # type: ignore[arg-type]
        matrix_latency_ns=latency,  # type: ignore[arg-type]
    )


def _inside(fabric: Json) -> Inside:
    return Inside(fabric["form"], fabric["bandwidth_bytes_per_s"], fabric["latency_ns"], fabric["duplex"] == "full")
