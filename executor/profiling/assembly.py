"""The assembly of a profile: properties of layers are read from their modules, costs are arguments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from penstock.executor.profiling.layer_costs import UpdateWorkspace
from penstock.executor.run.chain import Chain, TensorShape
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.profile import (
    BoundaryTensor,
    Layer,
    Measurement,
    ModelProfile,
    ProfileSource,
    SharedParameter,
)

Shapes = Sequence[dict[str, TensorShape]]


def assemble(
    chain: Chain,
    modules: Sequence[nn.Module],
    shapes: Shapes,
    update_ns: Sequence[int],
    measurements: Sequence[Measurement],
    *,
    source: ProfileSource,
    dtype: str = "fp32",
    assumptions: Sequence[str] = (),
    update_workspace: UpdateWorkspace | None = None,
    copied_bytes: Sequence[int] | None = None,
) -> ModelProfile:
    """Build the profile of ``chain`` from its layers, ``modules``, on any device, and the shapes at its cuts.

    A tied parameter counts in the first of its layers alone. ``update_workspace``: None where steps need no workspace,
    as fused steps. ``copied_bytes``: bytes of the kept copies of each layer's parameters; None where no copies are
    kept.
    """
    stepping, in_turn = update_workspace or ([0] * len(modules), False)
    inputs = sorted({name for names in chain.inputs for name in names})
    shared = chain.shared_parameters(dict(enumerate(modules)))
    ties = [SharedParameter(name=name, layers=layers, bytes=size) for name, layers, size in shared]
    own_bytes = [parameter_bytes(module) for module in modules]
    for tie in ties:
        for layer in tie.layers[1:]:
            own_bytes[layer] -= tie.bytes
    assumption = f"model inputs, delivered by the batch and crossing no cut: {', '.join(inputs) or 'none'}"
    return ModelProfile(
        name=chain.job.name,
        layers=tuple(
            Layer(
                name=spec.name,
                kind=type(module).__name__,
                parameter_bytes=size,
                trainable=any(parameter.requires_grad for parameter in module.parameters()),
                update_ns=update,
                update_workspace_bytes=workspace or None,
                copied_bytes=copied or None,
            )
            for spec, module, size, update, workspace, copied in zip(
                chain.specs, modules, own_bytes, update_ns, stepping, copied_bytes or [0] * len(modules), strict=True
            )
        ),
        boundaries=tuple(_boundary(chain, cut, tensors) for cut, tensors in enumerate(shapes)),
        shared_parameters=tuple(ties),
        parameter_dtype=dtype,  # type: ignore[arg-type]
        measurements=tuple(measurements),
        scaling="measured",
        update_in_turn=True if in_turn and any(stepping) else None,
        assumptions=(assumption, *assumptions),
        source=source,
    )


def parameter_bytes(module: nn.Module) -> int:
    """Sum the bytes of a module's parameters, each once."""
    return sum(parameter.numel() * parameter.itemsize for parameter in module.parameters())


def checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes in order, each once. InvalidDocument without sizes, or for a size below 1 sample."""
    if not sizes or min(sizes) < 1:
        raise InvalidDocument(
            f"the micro-batch sizes {list(sizes)} have to be one or more numbers of at least 1 sample"
        )
    return tuple(sorted(set(sizes)))


def _boundary(chain: Chain, cut: int, tensors: dict[str, TensorShape]) -> tuple[BoundaryTensor, ...]:
    return tuple(
        BoundaryTensor(
            name=chain.tensor_name(cut, k),
            bytes_per_sample=shape.bytes_per_sample,
            gradient_bytes_per_sample=shape.bytes_per_sample if shape.needs_grad else 0,
        )
        for k, shape in enumerate(tensors.values())
    )
