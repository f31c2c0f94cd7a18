"""The tensors that cross cuts between shared layers, and the layout of their gradients, found on the meta device.

No message is sent: tensors on the meta device have no numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from penstock.executor.divided.division import Division, is_expert, refuse_without_experts
from penstock.executor.divided.tracer import DividedTracer, divided
from penstock.executor.profiling.tracing import Sent, Tracer
from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.run.job import alike
from penstock.schemas.program import Program


def divided_shapes(
    chain: Chain, shapes: Sequence[dict[str, TensorShape]], division: Division, size: int = 1
) -> tuple[dict[str, TensorShape], ...]:
    """Return the shapes of one rank's part of the tensors at each cut; ``shapes`` are the whole tensors' shapes.

    Layers are traced at ``size`` samples; the result does not depend on it. ``division`` receives the layout of
    gradients. Raises UnsupportedRequest with the layer that ranks cannot share, and the reason.
    """
    if not division.meshes.shares:
        return tuple(shapes)
    refuse_without_experts(chain, division.meshes)
    tracer = _tracer(chain, division)
    local_shapes = tracer.run(size).shapes
    division.gradients = {index: tracer.gradients(index) for index in range(len(chain.specs))}
    return tuple(
        {name: shape._replace(sample_shape=mine[name].sample_shape) for name, shape in cut.items()}
        for cut, mine in zip(shapes, local_shapes, strict=True)
    )


def sizes_of(program: Program) -> list[int]:
    """Return the numbers of samples on which a rank's operations run, in ascending order."""
    sizes = {high - low for entry in program.stages for low, high in entry.rows}
    sizes |= {rows for entry in program.stages if entry.dispatch == "round_robin" for rows, _ in program.row_classes}
    return sorted(sizes - {0})


def _tracer(chain: Chain, division: Division) -> DividedTracer:
    """Return the tracer of layers as ranks share them; the same object on each call for a division."""
    if division.tracer is None:
        kinds = [(alike(spec.build), alike(spec.parallel)) for spec in chain.specs]
        layers = {index: chain.build_layer(index, device="meta") for index in sorted(set(map(kinds.index, kinds)))}
        division.tracer = divided(Tracer(chain, layers, None), division.meshes)
    tracer: DividedTracer = division.tracer
    return tracer


class TracedParameter(NamedTuple):
    """This rank's part of a parameter of ``whole_bytes``; ``rows`` along its first dimension.

    ``key``: equal for tied parameters. ``is_part``: each rank has a part of the gradient's sum.
    """

    dtype: torch.dtype
    bytes: int
    whole_bytes: int
    trained: bool
    is_part: bool
    is_expert: bool
    key: str
    rows: int = 1

    def padded_bytes(self, ranks: int) -> int:
        """Return the bytes of a collective over ``ranks`` ranks that share out the rows, padded to the first's."""
        return ranks * self.bytes_of(0, ranks)

    def bytes_of(self, place: int, ranks: int) -> int:
        """Return the bytes of the rows of one of these ranks (``stage.sharded_parameters``)."""
        most = -(-self.rows // ranks)
        count = max(0, min(self.rows, (place + 1) * most) - place * most)
        return self.bytes // self.rows * count if self.rows else 0


class TracedLayer(NamedTuple):
    """This rank's part of a layer, and the collectives of its passes in their order."""

    parameters: dict[str, TracedParameter]
    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]


def traced_layers(
    chain: Chain, division: Division | None, sizes: Iterable[int], modules: tuple[str, ...] = ()
) -> dict[int, list[TracedLayer]]:
    """Trace all layers at each number of samples, as this rank shares them, with these modules recomputed."""
    names = {place: tie.name for tie in chain.ties for place in tie.places}
    tracer = None
    if division is not None and division.meshes.shares:
        tracer = _tracer(chain, division).recomputing(modules)
    by_size = {}
    for size in sizes:
        sent: list[tuple[tuple[Sent, ...], tuple[Sent, ...]]] = [((), ())] * len(chain.specs)
        if tracer is not None:
            sent = [(cost.sent_forward, cost.sent_backward) for cost in tracer.run(size).costs]
        layers = []
        for index, (forward, backward) in enumerate(sent):
            module = chain.build_layer(index, device="meta") if tracer is None else tracer.module(index)
            parts = {} if tracer is None else tracer.gradients(index)
            parameters = {}
            for name, parameter in module.named_parameters():
                part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                is_part = name in parts and parts[name].is_part
                key = names.get((index, name), f"{index}.{name}")
                parameters[name] = TracedParameter(
                    part.dtype,
                    part.nbytes,
                    parameter.numel() * parameter.itemsize,
                    parameter.requires_grad,
                    is_part,
                    is_expert(parameter),
                    key,
                    part.shape[0] if part.dim() else 1,
                )
            layers.append(TracedLayer(parameters, forward, backward))
        by_size[size] = layers
    return by_size
