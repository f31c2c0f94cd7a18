"""Published runs as plain layouts: judged as users' layouts are, on a kind of device that one measured run calibrates.

A run's kernels are those of `profile_of` for Megatron in bf16, all of them quicker by one factor: that is how a run in
FP8 is judged, which no request can ask for. Links are those of ``NODESxDEVICESxKIND``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import penstock
from penstock.examples.catalogue import cluster
from penstock.layouts.even import EvenLayout
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import MemoryModel, PlanRequest
from penstock.schemas.topology import ClusterTopology, DeviceKind
from penstock.schemas.transformers.degrees import Module
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.profiles import profile_of

_LEAST_STEP = 1e-6
"""Of the search for a factor, as a part of it."""


class Run(NamedTuple):
    """A layout of a model on all GPUs of a cluster, with a distributed optimizer; ``batch`` in samples."""

    shape: TransformerShape
    nodes: int
    node_size: int
    kind: str
    batch: int
    tensor: int
    pipeline: int
    virtual_stages: int = 1
    context: int = 1
    micro_batch_size: int = 1
    recompute: tuple[Module, ...] = ()

    @property
    def gpus(self) -> int:
        """All of the cluster's."""
        return self.nodes * self.node_size

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.shape.sequence_length

    @property
    def layout(self) -> str:
        """Its degrees, as the tables print them."""
        said = f"TP{self.tensor} PP{self.pipeline} VP{self.virtual_stages}"
        said += f" CP{self.context}" if self.context > 1 else ""
        return said + (f", {' and '.join(self.recompute)} recomputed" if self.recompute else "")

    def seconds(self, measured_tokens: float) -> float:
        """Of a step, from tokens a second and GPU."""
        return self.tokens / self.gpus / measured_tokens


def judged(run: Run, speed: float) -> EvenLayout:
    """The plan of a run on GPUs that compute ``speed`` times as fast as the table of devices says."""
    request = PlanRequest(
        profile=_profile(run.shape, run.kind, run.tensor, run.context, run.micro_batch_size),
        topology=_faster(cluster(f"{run.nodes}x{run.node_size}x{run.kind}"), run.kind, speed),
        global_batch_size=run.batch,
        memory=MemoryModel(gradient="parameter"),
    )
    context = {"context": run.context} if run.context > 1 else {}
    return penstock.even_layout(
        request,
        tensor=run.tensor,
        pipeline=run.pipeline,
        virtual_stages=run.virtual_stages,
        micro_batch_size=run.micro_batch_size,
        sharding="optimizer",
        recompute=run.recompute or "none",
        **context,
    )


def step_s(run: Run, speed: float) -> float:
    """Seconds of a step."""
    prediction = judged(run, speed).file.plan.prediction
    assert prediction is not None
    return prediction.time_per_global_batch_ns / 1e9


def calibrated(run: Run, measured_s: float) -> float:
    """The speed at which a run is predicted as it was measured, by secants: a time is nearly linear in 1 / speed."""
    near, time = 1.0, step_s(run, 1.0)
    other, other_time = near * measured_s / time, step_s(run, time / measured_s)
    while abs(other - near) > _LEAST_STEP * other and other_time != time:
        slope = (other_time - time) / (other - near)
        near, time = other, other_time
        other += (measured_s - other_time) / slope
        other_time = step_s(run, 1 / other)
    return 1 / other


@lru_cache(maxsize=8)
def _profile(shape: TransformerShape, kind: str, tensor: int, context: int, size: int) -> ModelProfile:
    contexts = {"context_degrees": (context,)} if context > 1 else {}
    return profile_of(shape, "megatron", (kind,), micro_batch_sizes=(size,), tensor_degrees=(tensor,), **contexts)


def _faster(topology: ClusterTopology, kind: str, speed: float) -> ClusterTopology:
    assert topology.uniform is not None
    name = f"calibrated {kind}"
    uniform = topology.uniform.model_copy(update={"kind": name})
    return topology.model_copy(
        update={"uniform": uniform, "kinds": (DeviceKind(name=name, scale_from=kind, speed=speed),)}
    )


def mark(wrong: bool) -> str:
    """Whether a wanted figure was reached, for a table."""
    return "MISSED" if wrong else "ok"


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of the orders of two lists of the same things, which have no equal values."""
    orders = []
    for values in (one, other):
        order = sorted(range(len(values)), key=values.__getitem__)
        orders.append({item: place for place, item in enumerate(order)})
    squares = sum((orders[0][item] - orders[1][item]) ** 2 for item in range(len(one)))
    return 1 - 6 * squares / (len(one) * (len(one) ** 2 - 1))
