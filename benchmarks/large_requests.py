"""Requests of large clusters: uneven layers, and nodes in pods behind oversubscribed switches, from a seed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.schemas.profile import BoundaryTensor, Layer, LayerMeasurement, Measurement, ModelProfile, ProfileSource
from penstock.schemas.request import PlanRequest, Termination
from penstock.schemas.topology import ClusterTopology, Device, Fabric, Link, Node

GBIT = 10**9 // 8
NODE_DEVICES = 8


class Size(NamedTuple):
    """Pods of nodes of eight devices each, layers of the model, and samples of a micro-batch."""

    pods: int
    nodes: int
    layers: int
    micro_batches: int
    rows: int

    @property
    def devices(self) -> int:
        """The devices of the whole cluster."""
        return self.pods * self.nodes * NODE_DEVICES

    def __str__(self) -> str:
        return f"{self.devices:,} devices × {self.layers:,} layers"


SIZES = {
    "small": Size(2, 4, 50, 32, 16),
    "1k": Size(4, 32, 200, 256, 32),
    "10k": Size(25, 50, 1000, 512, 80),
}


def request(size: Size, *, planner: str = "auto", time_limit_s: float | None = None) -> PlanRequest:
    """Return one request of that size with fixed micro-batches."""
    limit = Termination() if time_limit_s is None else Termination(time_limit_ns=int(time_limit_s * 1e9))
    return PlanRequest(
        profile=profile(size.layers),
        topology=tree(size.pods, size.nodes),
        global_batch_size=size.micro_batches * size.rows,
        micro_batch_sizes=(size.rows,),
        planner=planner,
        termination=limit,
    )


def profile(layers: int, seed: int = 0) -> ModelProfile:
    """Return blocks of a transformer of 8,192 channels in bf16, each drawn around a mean.

    Recomputation is worth its time.
    """
    draw = np.random.default_rng(seed)
    forward = np.exp(draw.normal(np.log(12e6), 0.25, layers)).astype(int).tolist()
    parameters = np.exp(draw.normal(np.log(900e6), 0.25, layers)).astype(int).tolist()
    stash = np.exp(draw.normal(np.log(100e6), 0.25, layers)).astype(int).tolist()
    sent = np.exp(draw.normal(np.log(32e6), 0.05, layers - 1)).astype(int).tolist()
    return ModelProfile(
        name=f"uneven-{layers}",
        layers=tuple(
            Layer(name=f"block{i}", kind="TransformerBlock", parameter_bytes=size, update_ns=size // 200)
            for i, size in enumerate(parameters)
        ),
        boundaries=tuple(
            (BoundaryTensor(name="x", bytes_per_sample=size, gradient_bytes_per_sample=size),) for size in sent
        ),
        parameter_dtype="bf16",
        measurements=(
            Measurement(
                device_kind="H100",
                micro_batch_size=1,
                layers=tuple(
                    LayerMeasurement(forward_ns=time, backward_ns=2 * time, stash_bytes=kept, workspace_bytes=kept // 4)
                    for time, kept in zip(forward, stash, strict=True)
                ),
            ),
        ),
        source=ProfileSource(method="analytic", description="drawn from a seed", expected_error=0.3),
    )


def tree(pods: int, nodes: int) -> ClusterTopology:
    """Build nodes of eight H100, a switch for each pod, and a spine.

    A switch has a fourth of its nodes' bandwidth upwards.
    """
    fabric = Fabric(form="ports", bandwidth_bytes_per_s=450 * 10**9, latency_ns=2_000)
    names = [[f"pod{p:02d}-node{n:02d}" for n in range(nodes)] for p in range(pods)]
    nic = 8 * 400 * GBIT
    return ClusterTopology(
        name=f"{pods}x{nodes}x{NODE_DEVICES}",
        nodes=tuple(
            Node(
                name=name,
                fabric=fabric,
                devices=tuple(
                    Device(id=f"{name}/{d}", kind="H100", memory_bytes=80 * 2**30, context_bytes=600 * 10**6)
                    for d in range(NODE_DEVICES)
                ),
            )
            for pod in names
            for name in pod
        ),
        switches=(*(f"leaf{p:02d}" for p in range(pods)), "spine"),
        links=(
            *(
                Link(a=name, b=f"leaf{p:02d}", bandwidth_bytes_per_s=nic, latency_ns=5_000)
                for p, pod in enumerate(names)
                for name in pod
            ),
            *(
                Link(a=f"leaf{p:02d}", b="spine", bandwidth_bytes_per_s=nodes * nic // 4, latency_ns=10_000)
                for p in range(pods)
            ),
        ),
    )
