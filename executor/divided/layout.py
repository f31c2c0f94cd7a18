"""What crosses the cuts of a model whose layers ranks share, and how they have its gradients: found on the meta device.

Nothing is sent: collectives of tensors without numbers have none to send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from penstock.executor.divided.division import Division, is_expert, refuse_without_experts
from penstock.executor.divided.tracer import divided_runs
from penstock.executor.profiling.tracing import Sent, Tracer
from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.run.job import alike


def divided_shapes(
    chain: Chain, shapes: Sequence[dict[str, TensorShape]], division: Division
) -> tuple[dict[str, TensorShape], ...]:
    """What one rank has of what crosses each cut, where ``shapes`` are whole; tells ``division`` of the gradients.

    Raises UnsupportedRequest naming the layer that ranks cannot share so, and why.
    """
    if not division.meshes.shares:
        return tuple(shapes)
    refuse_without_experts(chain, division.meshes)
    kinds = [(alike(spec.build), alike(spec.parallel)) for spec in chain.specs]
    modules = {index: chain.build_layer(index, device="meta") for index in sorted(set(map(kinds.index, kinds)))}
    whole = Tracer(chain, modules, None)
    divided, runs = divided_runs(whole, {1: whole.run(1)}, division.meshes)
    own = runs[1].shapes
    division.gradients = {index: divided.gradients(index) for index in range(len(chain.specs))}
    return tuple(
        {name: shape._replace(sample_shape=mine[name].sample_shape) for name, shape in cut.items()}
        for cut, mine in zip(shapes, own, strict=True)
    )


class TracedParameter(NamedTuple):
    """What this rank has of a parameter, of ``whole_bytes``.

    ``key``: the same for parameters that are tied; ``is_part``: its gradient.
    """

    dtype: torch.dtype
    bytes: int
    whole_bytes: int
    trained: bool
    is_part: bool
    is_expert: bool
    key: str


class TracedLayer(NamedTuple):
    """What this rank has of a layer, and the collectives of its passes in their order."""

    parameters: dict[str, TracedParameter]
    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]


def traced_layers(chain: Chain, division: Division | None, sizes: Iterable[int]) -> dict[int, list[TracedLayer]]:
    """All layers at each number of samples, as this rank shares them."""
    modules = [chain.build_layer(index, device="meta") for index in range(len(chain.specs))]
    names = {place: tie.name for tie in chain.ties for place in tie.places}
    found = {}
    for size in sizes:
        if division is None or not division.meshes.shares:
            sent: list[tuple[tuple[Sent, ...], tuple[Sent, ...]]] = [((), ())] * len(modules)
            divided = None
        else:
            whole = Tracer(chain, modules, None)
            divided, runs = divided_runs(whole, {size: whole.run(size)}, division.meshes)
            sent = [(cost.sent_forward, cost.sent_backward) for cost in runs[size].costs]
        layers = []
        for index, (forward, backward) in enumerate(sent):
            module = modules[index] if divided is None else divided.module(index)
            parts = {} if divided is None else divided.gradients(index)
            parameters = {}
            for name, parameter in module.named_parameters():
                own = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                is_part = name in parts and parts[name].is_part
                key = names.get((index, name), f"{index}.{name}")
                parameters[name] = TracedParameter(
                    own.dtype,
                    own.nbytes,
                    parameter.numel() * parameter.itemsize,
                    parameter.requires_grad,
                    is_part,
                    is_expert(parameter),
                    key,
                )
            layers.append(TracedLayer(parameters, forward, backward))
        found[size] = layers
    return found
