"""One line about each part of a plan's page: what it would show, before it is opened."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.report.device_names import idle_devices, times
from penstock.schemas.amounts import percent
from penstock.schemas.plan import Plan
from penstock.schemas.topology import ClusterTopology


def some(devices: Sequence[str], separator: str = ", ") -> str:
    """Return at most three devices by name; of more the first and the last, and how many there are."""
    return separator.join(devices) if len(devices) <= 3 else f"{devices[0]} … {devices[-1]} ({len(devices):,})"


def alike_devices(devices: Sequence[str], num_gpus: int) -> str:
    """Return devices that do the same as ``some`` does, or the first and how many there are, if each is several."""
    return times(devices[0], num_gpus) if num_gpus > len(devices) else some(devices)


def stages_words(plan: Plan) -> str:
    """Return ``34 stages of 2 to 6 layers``."""
    layers = [stage.layers for pipeline in plan.pipelines for stage in pipeline.stages]
    counts = [last - first + 1 for first, last in layers]
    stages = "1 stage" if len(layers) == 1 else f"{len(layers):,} stages"
    return f"{stages} of {_between(min(counts), max(counts))} layer{'s' if max(counts) > 1 else ''}"


def cluster_words(plan: Plan, topology: ClusterTopology) -> str:
    """Return ``1,024 devices in 128 nodes, 16 of them idle``."""
    nodes = topology.expanded().nodes
    idle = len(idle_devices(plan, nodes))
    where = f"{topology.num_devices:,} device{'s' if topology.num_devices > 1 else ''} in {len(nodes):,} node"
    return f"{where}{'s' if len(nodes) > 1 else ''}, {f'{idle:,} of them idle' if idle else 'none of them idle'}"


def devices_words(plan: Plan) -> str:
    """Return ``computing 61.0 % to 93.2 % of the time``."""
    assert plan.prediction is not None
    total = plan.prediction.time_per_global_batch_ns
    shares = [use.busy_ns / total for use in plan.prediction.devices]
    return f"computing {_between(percent(min(shares)), percent(max(shares)))} of the time"


def _between(low: object, high: object) -> str:
    return f"{low}" if low == high else f"{low} to {high}"
