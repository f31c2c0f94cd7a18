"""Published runs as plain layouts: judged as users' layouts are, on a kind of device that one measured run calibrates.

A run's kernels are those of `profile_of` for Megatron in bf16, all of them quicker by one factor: that is how a run in
FP8 is judged, which no request can ask for. Links are those of ``NODESxDEVICESxKIND``.

What Megatron overlaps is said in the request, or added where plans do not know it:

* Gradients of 16 bits (``grad_reduce_in_fp32=False`` in all of these runs) are summed while backwards run
  (``overlap_grad_reduce``): ``memory.gradient: parameter``. What a plan exchanges is that reduce-scatter and the gather
  of parameters, which Megatron overlaps with the first forwards (``overlap_param_gather``), not the last backwards.
* Messages between stages do not wait for these collectives: ``network.sharing: private``. In a plan's shared network,
  which is what requests have where they say nothing, a message waits for a piece of a layer's gradients.
* Interleaved 1F1B hides messages in its steady state only (``overlap_p2p_comm``; ``overlap_p2p_comm_warmup_flush`` is
  off by default). While it fills and drains, a rank waits for the message of every step, and the collectives of the
  replicas, which run at the same time, take half of its card (`waited_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import penstock
from penstock.examples.catalogue import cluster
from penstock.importers.cluster import hardware
from penstock.schemas.profile import DividedCost, DividedMeasurement, ModelProfile
from penstock.schemas.request import MemoryModel, NetworkModel, PlanRequest
from penstock.schemas.topology import ClusterTopology, DeviceKind
from penstock.schemas.transformers.degrees import Module
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of
from penstock.solvers.model.degrees import Over

_LEAST_STEP = 1e-6
"""Of the search for a factor, as a part of it."""
_ALL_NS = 10**12
_SHARED = 2
"""What share one card while a pipeline fills and drains: its messages, and the collective of the replicas."""


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
    expert: int = 1
    hidden: frozenset[Over] = frozenset()
    """Groups whose collectives computation hides, all of them."""

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
        said += f" EP{self.expert}" if self.expert > 1 else ""
        said += ", all-to-all hidden" if "expert" in self.hidden else ""
        return said + (f", {' and '.join(self.recompute)} recomputed" if self.recompute else "")

    def seconds(self, measured_tokens: float) -> float:
        """Of a step, from tokens a second and GPU."""
        return self.tokens / self.gpus / measured_tokens


class Judged(NamedTuple):
    """Seconds of a step, and what the GPU that lacks most memory lacks, with all tensors in 16 bits."""

    seconds: float
    missing_bytes: int


SEPARATE = NetworkModel(sharing="private", channel="full")


def judged(run: Run, speed: float, network: NetworkModel = SEPARATE) -> Judged:
    """A run on GPUs that compute ``speed`` times as fast as the table of devices says."""
    request = PlanRequest(
        profile=_profile(run._replace(nodes=1, batch=1)),
        topology=_faster(cluster(f"{run.nodes}x{run.node_size}x{run.kind}"), run.kind, speed),
        global_batch_size=run.batch,
        memory=MemoryModel(gradient="parameter"),
        network=network,
    )
    found = penstock.even_layout(
        request,
        tensor=run.tensor,
        context=run.context,
        expert=run.expert,
        pipeline=run.pipeline,
        virtual_stages=run.virtual_stages,
        micro_batch_size=run.micro_batch_size,
        sharding="optimizer",
        recompute=run.recompute or "none",
    )
    prediction = found.file.plan.prediction
    assert prediction is not None
    return Judged(prediction.time_per_global_batch_ns / 1e9 + waited_s(run), found.missing_bytes)


def waited_s(run: Run) -> float:
    """Seconds in which ranks of an interleaved pipeline wait for messages that a plan overlaps with computation.

    Ranks fill and drain in step, so that the slowest message counts: one between nodes, where there are several.
    """
    if run.virtual_stages == 1:
        return 0.0
    node = hardware.usual(run.kind)
    if run.nodes == 1:
        bytes_per_s, latency_ns = node.fabric_bytes_per_s.value, node.fabric_latency_ns.value
    else:
        cards = node.node_nic_bytes_per_s(run.node_size)
        assert cards is not None
        bytes_per_s, latency_ns = cards // run.node_size, node.nic_latency_ns.value
    tokens = run.micro_batch_size * run.shape.sequence_length / (run.tensor * run.context)
    message_s = _SHARED * 2 * tokens * run.shape.hidden / bytes_per_s + latency_ns / 1e9
    return 2 * (run.pipeline - 1 + (run.virtual_stages - 1) * run.pipeline) * message_s


def calibrated(run: Run, measured_s: float, network: NetworkModel = SEPARATE) -> float:
    """The speed at which a run is predicted as it was measured, by secants: a time is nearly linear in 1 / speed."""
    near, time = 1.0, judged(run, 1.0, network).seconds
    other, other_time = near * measured_s / time, judged(run, time / measured_s, network).seconds
    while abs(other - near) > _LEAST_STEP * other and other_time != time:
        slope = (other_time - time) / (other - near)
        near, time = other, other_time
        other += (measured_s - other_time) / slope
        other_time = judged(run, 1 / other, network).seconds
    return 1 / other


@lru_cache(maxsize=8)
def _profile(run: Run) -> ModelProfile:
    """With costs at the run's degrees alone."""
    degrees = DegreeOptions((run.tensor,), (run.context,), (run.expert,))
    found = profile_of(run.shape, "megatron", (run.kind,), micro_batch_sizes=(run.micro_batch_size,), degrees=degrees)
    return _hiding(found, run.hidden) if run.hidden else found


def _hiding(profile: ModelProfile, hidden: frozenset[Over]) -> ModelProfile:
    """The profile with passes that hide all collectives over some groups."""

    def cost(known: DividedCost) -> DividedCost:
        collectives = tuple(
            each.model_copy(update={"hidden_ns": _ALL_NS}) if each.over in hidden and each.phase != "step" else each
            for each in known.collectives
        )
        return known.model_copy(update={"collectives": collectives})

    def measurement(known: DividedMeasurement) -> DividedMeasurement:
        return known.model_copy(update={"layers": tuple(map(cost, known.layers))})

    variants = (
        each.model_copy(update={"measurements": tuple(map(measurement, each.measurements))})
        for each in profile.variants or ()
    )
    return profile.model_copy(update={"variants": tuple(variants)})


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
