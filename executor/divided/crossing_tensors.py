"""What crosses the cuts of a model whose layers ranks share, and how they have its gradients: found on the meta device.

Nothing is sent: collectives of tensors without numbers have none to send.
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
    """What one rank has of what crosses each cut, where ``shapes`` are whole; tells ``division`` of the gradients.

    Layers are traced at ``size`` samples, whatever it is. Raises UnsupportedRequest naming the layer that ranks cannot
    share so, and why.
    """
    if not division.meshes.shares:
        return tuple(shapes)
    refuse_without_experts(chain, division.meshes)
    tracer = _tracer(chain, division)
    own = tracer.run(size).shapes
    division.gradients = {index: tracer.gradients(index) for index in range(len(chain.specs))}
    return tuple(
        {name: shape._replace(sample_shape=mine[name].sample_shape) for name, shape in cut.items()}
        for cut, mine in zip(shapes, own, strict=True)
    )


def sizes_of(program: Program) -> list[int]:
    """The numbers of samples that a rank's operations run on, in ascending order."""
    sizes = {high - low for held in program.stages for low, high in held.rows}
    sizes |= {rows for held in program.stages if held.dispatch == "round_robin" for rows, _ in program.row_classes}
    return sorted(sizes - {0})


def _tracer(chain: Chain, division: Division) -> DividedTracer:
    """What runs the layers as ranks share them; the same one for a division."""
    if division.tracer is None:
        kinds = [(alike(spec.build), alike(spec.parallel)) for spec in chain.specs]
        layers = {index: chain.build_layer(index, device="meta") for index in sorted(set(map(kinds.index, kinds)))}
        division.tracer = divided(Tracer(chain, layers, None), division.meshes)
    found: DividedTracer = division.tracer
    return found


class TracedParameter(NamedTuple):
    """What this rank has of a parameter, of ``whole_bytes``; ``rows`` along its first dimension.

    ``key``: the same for parameters that are tied; ``is_part``: its gradient.
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
        """The bytes that move where this number of ranks share out its rows, all padded to those of the first."""
        return ranks * self.bytes_of(0, ranks)

    def bytes_of(self, place: int, ranks: int) -> int:
        """The bytes of the rows of one of these ranks (``stage.sharded_parameters``)."""
        most = -(-self.rows // ranks)
        own = max(0, min(self.rows, (place + 1) * most) - place * most)
        return self.bytes // self.rows * own if self.rows else 0


class TracedLayer(NamedTuple):
    """What this rank has of a layer, and the collectives of its passes in their order."""

    parameters: dict[str, TracedParameter]
    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]


def traced_layers(
    chain: Chain, division: Division | None, sizes: Iterable[int], modules: tuple[str, ...] = ()
) -> dict[int, list[TracedLayer]]:
    """All layers at each number of samples, as this rank shares them, where these modules are recomputed."""
    names = {place: tie.name for tie in chain.ties for place in tie.places}
    tracer = None
    if division is not None and division.meshes.shares:
        tracer = _tracer(chain, division).recomputing(modules)
    found = {}
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
                    own.shape[0] if own.dim() else 1,
                )
            layers.append(TracedLayer(parameters, forward, backward))
        found[size] = layers
    return found
