"""Published runs as plain layouts, simulated like users' layouts, on a kind of device that one measured run calibrates.

A run's kernels come from `profile_of` for Megatron in bf16, all of them quicker by one factor. So a run in FP8 is
simulated, which no request can describe. Links come from ``NODESxDEVICESxKIND``.

Overlaps of Megatron are set in the request, or added where plans cannot express them:

* Gradients of 16 bits (``grad_reduce_in_fp32=False`` in all of these runs) are summed while backwards run
  (``overlap_grad_reduce``): ``memory.gradient: parameter``. What a plan exchanges is that reduce-scatter and the gather
  of parameters, which Megatron overlaps with the first forwards (``overlap_param_gather``), not the last backwards.
* Messages between stages do not wait for these collectives: ``network.sharing: private``. In a plan's shared network,
  which is the default of requests, a message waits for a piece of a layer's gradients.
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
"""The least step of the search for a factor, as a part of it."""
_ALL_NS = 10**12
_SHARED = 2
"""The number of users of one card while a pipeline fills and drains.

They are its messages, and the collective of the replicas.
"""


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
    """The groups whose collectives computation hides completely."""

    @property
    def gpus(self) -> int:
        """The GPUs of the cluster."""
        return self.nodes * self.node_size

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return self.batch * self.shape.sequence_length

    @property
    def layout(self) -> str:
        """The degrees, as the tables print them."""
        text = f"TP{self.tensor} PP{self.pipeline} VP{self.virtual_stages}"
        text += f" CP{self.context}" if self.context > 1 else ""
        text += f" EP{self.expert}" if self.expert > 1 else ""
        text += ", all-to-all hidden" if "expert" in self.hidden else ""
        return text + (f", {' and '.join(self.recompute)} recomputed" if self.recompute else "")

    def seconds(self, measured_tokens: float) -> float:
        """Return the seconds of a step, from tokens a second and GPU."""
        return self.tokens / self.gpus / measured_tokens


class Judged(NamedTuple):
    """The seconds of a step, and the bytes that the fullest GPU lacks, with all tensors in 16 bits."""

    seconds: float
    missing_bytes: int


SEPARATE = NetworkModel(sharing="private", channel="full")


def judged(run: Run, speed: float, network: NetworkModel = SEPARATE) -> Judged:
    """Simulate a run on GPUs that compute ``speed`` times as fast as in the table of devices."""
    request = PlanRequest(
        profile=_profile(run._replace(nodes=1, batch=1)),
        topology=_faster(cluster(f"{run.nodes}x{run.node_size}x{run.kind}"), run.kind, speed),
        global_batch_size=run.batch,
        memory=MemoryModel(gradient="parameter"),
        network=network,
    )
    answer = penstock.even_layout(
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
    prediction = answer.file.plan.prediction
    assert prediction is not None
    return Judged(prediction.time_per_global_batch_ns / 1e9 + waited_s(run), answer.missing_bytes)


def waited_s(run: Run) -> float:
    """Return the seconds in which ranks of an interleaved pipeline wait for messages.

    A plan overlaps these messages with computation. Ranks fill and drain in step, so that the slowest message counts:
    one between nodes, where there are several.
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
    """Return the speed at which the predicted time of a run equals the measured time.

    The method is secants: a time is nearly linear in 1 / speed.
    """
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
    """Return a profile with costs at the run's degrees alone."""
    degrees = DegreeOptions((run.tensor,), (run.context,), (run.expert,))
    profile = profile_of(run.shape, "megatron", (run.kind,), micro_batch_sizes=(run.micro_batch_size,), degrees=degrees)
    return _hiding(profile, run.hidden) if run.hidden else profile


def _hiding(profile: ModelProfile, hidden: frozenset[Over]) -> ModelProfile:
    """Return the profile with passes that hide all collectives over some groups."""

    def cost(divided: DividedCost) -> DividedCost:
        collectives = tuple(
            each.model_copy(update={"hidden_ns": _ALL_NS}) if each.over in hidden and each.phase != "step" else each
            for each in divided.collectives
        )
        return divided.model_copy(update={"collectives": collectives})

    def measurement(divided: DividedMeasurement) -> DividedMeasurement:
        return divided.model_copy(update={"layers": tuple(map(cost, divided.layers))})

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
    """Return the mark of a target for a table."""
    return "MISSED" if wrong else "ok"


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of the orders of two lists of the same things, which have no equal values."""
    orders = []
    for values in (one, other):
        order = sorted(range(len(values)), key=values.__getitem__)
        orders.append({item: place for place, item in enumerate(order)})
    squares = sum((orders[0][item] - orders[1][item]) ** 2 for item in range(len(one)))
    return 1 - 6 * squares / (len(one) * (len(one) ** 2 - 1))
