"""A timeline made by hand: two stages on three devices, two micro-batches; the second stage has two replicas."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.convert import to_problem
from penstock.report.drawing.picture import Picture, picture_of_timeline
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.timeline import Breakdown, DeviceUse, Interval, Timeline, Track, Transfers


@pytest.fixture
def request_document() -> PlanRequest:
    layer = {"forward_ns": 10, "backward_ns": 20, "stash_bytes": 8}
    request = {
        "profile": {
            "name": "two",
            "layers": [{"name": "a", "parameter_bytes": 4}, {"name": "b", "parameter_bytes": 4}],
            "boundaries": [[{"name": "x", "bytes_per_sample": 1, "gradient_bytes_per_sample": 1}]],
            "measurements": [{"device_kind": "cpu", "micro_batch_size": 1, "layers": [layer, layer]}],
            "source": {"method": "analytic", "expected_error": 0.1},
        },
        "topology": {
            "name": "three",
            "uniform": {
                "nodes": 1,
                "devices_per_node": 3,
                "kind": "cpu",
                "memory_bytes": 1000,
                "fabric": {"bandwidth_bytes_per_s": 10**9},
            },
        },
        "global_batch_size": 2,
    }
    return PlanRequest.parse(request)


@pytest.fixture
def problem(request_document: PlanRequest) -> Problem:
    return to_problem(request_document)


@pytest.fixture
def timeline() -> Timeline:
    """F0 F1 on stage 0, F and B of one micro-batch each on the replicas of stage 1, then B0 B1; times in ns."""
    nothing = Breakdown(1, 1, 0, 0, 0, 0, 0, 0)

    def track(devices: tuple[int, ...], *blocks: tuple[int, int, int, int, int]) -> Track:
        rows = np.array(blocks, dtype=np.int64)
        return Track(devices, rows[:, :3].astype(np.int32), rows[:, 3], rows[:, 4])

    return Timeline(
        time_per_global_batch_ns=100,
        fill_ns=20,
        drain_ns=10,
        tracks=(
            track((1,), (0, 1, 0, 12, 22), (1, 1, 0, 22, 42)),
            track((0,), (0, 0, 0, 0, 10), (0, 0, 1, 10, 20), (1, 0, 0, 44, 64), (1, 0, 1, 64, 84)),
            track((2,), (0, 1, 1, 22, 32), (1, 1, 1, 32, 52)),
        ),
        transfers=Transfers(
            stage=np.array([0, 0, 1, 1]),
            direction=np.array([0, 0, 1, 1]),
            micro_batch=np.array([0, 1, 0, 1]),
            start_ns=np.array([10, 20, 42, 52]),
            end_ns=np.array([12, 22, 44, 54]),
        ),
        reductions=(Interval(1, 0, 52, 60),),
        updates=(Interval(0, -1, 84, 100), Interval(1, -1, 60, 70)),
        uses={device: DeviceUse(50, 10, 40, nothing) for device in range(3)},
        memory_curve=lambda device: (np.array([0, 10, 64]), np.array([100, 200 + device, 50])),
        activations_curve=lambda device: (np.array([0, 10, 64]), np.array([0, 90, 0])),
    )


@pytest.fixture
def picture(problem: Problem, timeline: Timeline) -> Picture:
    return picture_of_timeline(problem, timeline)


@pytest.fixture
def file(problem: Problem, request_document: PlanRequest) -> PlanFile:
    """A plan whose names want escaping: <b>."""
    memory = {
        f"{part}_bytes": 1
        for part in ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace", "context")
    }
    devices = [
        {
            "device": device.name,
            "busy_ns": 50,
            "communication_ns": 10,
            "idle_ns": 40,
            "peak_memory_bytes": 300,
            "memory_bytes": 1000,
            "memory": memory,
        }
        for device in problem.devices
    ]
    plan = {
        "request_hash": request_document.content_hash(),
        "planner": "by <b>hand</b>",
        "global_batch_size": 2,
        "micro_batch_size": 1,
        "num_micro_batches": 2,
        "pipelines": [
            {
                "stages": [
                    {"layers": [0, 0], "devices": ["node0/0"]},
                    {"layers": [1, 1], "devices": ["node0/1", "node0/2"], "dispatch": "round_robin"},
                ],
                "micro_batches": [0, 1],
            }
        ],
        "update_rule": "synchronous",
        "schedule": {
            "name": "gpipe",
            "rows": [
                {"devices": ["node0/0"], "text": "F0:2 B0:2"},
                {"devices": ["node0/1"], "text": "F0 B0"},
                {"devices": ["node0/2"], "text": "F1 B1"},
            ],
            "warmup": [2, 1],
        },
        "prediction": {
            "time_per_global_batch_ns": 100,
            "fill_ns": 20,
            "drain_ns": 10,
            "bubble": 0.5,
            "peak_memory_bytes": 300,
            "devices": devices,
            "basis": "analytic",
            "expected_error": 0.1,
        },
        "certificates": [
            {
                "scope": "all plans of this request",
                "model": "every plan of this request",
                "covers": {},
                "bound_ns": 80,
                "gap": 0.25,
                "method": "load",
            }
        ],
        "assumptions": ["</script><script>alert(1)</script>"],
    }
    return PlanFile.parse({"plan": plan, "request": request_document})


@pytest.fixture
def plan(file: PlanFile) -> Plan:
    return file.plan
