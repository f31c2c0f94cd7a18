"""The layouts that a plan is compared with: plain data parallelism, FSDP over all GPUs, Megatron's usual choice."""

from __future__ import annotations

from typing import NamedTuple

from penstock.layouts.plain import written_layout
from penstock.planning.solve import solve_here
from penstock.schemas.errors import PenstockError
from penstock.schemas.request import PlanRequest, Termination
from penstock.schemas.topology import ClusterTopology

MOST_DEVICES = 512
"""The largest cluster that baselines are simulated on: within three seconds there, measured on two cores."""


class Baseline(NamedTuple):
    """A layout that nobody had to search for, and its time; ``missing_bytes``: what the GPU that lacks most lacks."""

    name: str
    time_ns: int
    missing_bytes: int


def baselines(request: PlanRequest) -> tuple[Baseline, ...]:
    """Simulate the baselines of a request whose documents are inline, except layouts that the model cannot have.

    A model whose transformer layers are not known has one: planner ``dp``, data parallelism over all devices.
    """
    topology = request.topology
    if not isinstance(topology, ClusterTopology) or topology.num_devices > MOST_DEVICES:
        return ()
    if request.update_rules != ("synchronous",):
        return ()
    rows = (
        _possible(request, "plain data parallel (DDP)", "tensor=1"),
        _possible(request, "FSDP over all GPUs", "tensor=1,sharding=parameters"),
        _least_split(request, topology),
    )
    return tuple(row for row in rows if row is not None) or _data_parallel(request)


def _least_split(request: PlanRequest, topology: ClusterTopology) -> Baseline | None:
    """Return the layout with the fewest GPUs a model that fits, with ZeRO-1.

    Tensor degrees come first, up to the GPUs of a node, then stages: takeaways 1 and 2 of section 3 of Narayanan et
    al., SC '21.
    """
    largest = max(len(node.devices) for node in topology.expanded().nodes)
    degrees = [(2**power, 1) for power in range(largest.bit_length())]
    degrees += [(degrees[-1][0], 2**power) for power in range(1, MOST_DEVICES.bit_length())]
    for tensor, pipeline in degrees:
        words = f"tensor={tensor},pipeline={pipeline},sharding=optimizer"
        layout = _possible(request, f"Megatron's rule: TP {tensor} · PP {pipeline} · ZeRO-1", words)
        if layout is not None and not layout.missing_bytes:
            return layout
    return None


def _possible(request: PlanRequest, name: str, words: str) -> Baseline | None:
    try:
        layout = written_layout(request, words).layout
    except PenstockError:
        return None
    assert layout.file.plan.prediction is not None
    return Baseline(name, layout.file.plan.prediction.time_per_global_batch_ns, layout.missing_bytes)


def _data_parallel(request: PlanRequest) -> tuple[Baseline, ...]:
    changes: dict[str, object] = {"planner": "dp", "schedule": "auto", "options": {}, "pins": (), "target": None}
    limits = Termination(max_plans=8)
    try:
        answer = solve_here(request.model_copy(update=changes | {"termination": limits}), None, None, 1)
    except PenstockError:
        return ()
    if answer.plan is None or answer.plan.prediction is None:
        return ()
    return (Baseline("plain data parallel (DDP)", answer.plan.prediction.time_per_global_batch_ns, 0),)
