"""The layouts that a plan is compared with: plain data parallelism, FSDP over all GPUs, Megatron's usual choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from penstock.layouts.plain import written_layout
from penstock.planning.solve import solve_here
from penstock.schemas.errors import PenstockError, UnsupportedRequest
from penstock.schemas.request import PlanRequest, Termination
from penstock.schemas.topology import ClusterTopology

MOST_DEVICES = 512
"""The largest cluster that baselines are simulated on: within three seconds there, measured on two cores."""
LARGEST_TENSOR = 8


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
    try:
        return tuple(_of_transformer(request))
    except UnsupportedRequest:
        pass
    except PenstockError:
        return ()
    try:
        return tuple(_data_parallel(request))
    except PenstockError:
        return ()


def _of_transformer(request: PlanRequest) -> Iterator[Baseline]:
    """Yield the baselines. Raises UnsupportedRequest for a model whose transformer layers are not known."""
    yield _written(request, "plain data parallel (DDP)", "tensor=1")
    further = _possible(request, "FSDP over all GPUs", "tensor=1,sharding=parameters"), _least_split(request)
    yield from (each for each in further if each is not None)


def _least_split(request: PlanRequest) -> Baseline | None:
    """Return the layout with the fewest GPUs a model that fits: tensor degrees first, then stages, with ZeRO-1.

    This is the order in which Megatron-LM's guide advises to split a model (Narayanan et al., SC '21, section 5.4).
    """
    degrees = [(2**power, 1) for power in range(LARGEST_TENSOR.bit_length())]
    degrees += [(LARGEST_TENSOR, 2**power) for power in range(1, 6)]
    for tensor, pipeline in degrees:
        words = f"tensor={tensor},pipeline={pipeline},sharding=optimizer"
        layout = _possible(request, f"Megatron's rule: TP {tensor} · PP {pipeline} · ZeRO-1", words)
        if layout is not None and not layout.missing_bytes:
            return layout
    return None


def _possible(request: PlanRequest, name: str, words: str) -> Baseline | None:
    try:
        return _written(request, name, words)
    except PenstockError:
        return None


def _written(request: PlanRequest, name: str, words: str) -> Baseline:
    layout = written_layout(request, words).layout
    assert layout.file.plan.prediction is not None
    return Baseline(name, layout.file.plan.prediction.time_per_global_batch_ns, layout.missing_bytes)


def _data_parallel(request: PlanRequest) -> Iterator[Baseline]:
    changes: dict[str, object] = {"planner": "dp", "schedule": "auto", "options": {}, "pins": (), "target": None}
    limits = Termination(max_plans=8)
    answer = solve_here(request.model_copy(update=changes | {"termination": limits}), None, None, 1)
    if answer.plan is not None and answer.plan.prediction is not None:
        yield Baseline("plain data parallel (DDP)", answer.plan.prediction.time_per_global_batch_ns, 0)
