"""Division of the transformer examples: tensor parallelism with parts of the sequence between, in torch's words.

.. [1] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022), section 4.2.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

SEQUENCE = Shard(1)
"""Tensors are (samples, positions, …)."""


def words() -> OfWords:
    """Divide an embedding by words; its result is a part of the sequence."""
    return OfWords()


def part_of_tokens() -> PrepareModuleInput:
    """Keep a small embedding on every GPU, where it looks up its part of the sequence."""
    return _part(SEQUENCE)


def part_of_positions() -> PrepareModuleInput:
    """Keep an embedding of positions on every GPU, where it looks up its part of them."""
    return _part(Shard(0))


def _part(of: Shard) -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(of,), use_local_output=True)


def norm(*, local: bool = False) -> SequenceParallel:
    """Divide a norm by the sequence; ``local`` where its result is added to something."""
    return SequenceParallel(use_local_output=local)


def gathered(inputs: int = 1) -> PrepareModuleInput:
    """Gather the inputs of a module from parts of the sequence."""
    return PrepareModuleInput(input_layouts=(SEQUENCE,) * inputs, desired_input_layouts=(Replicate(),) * inputs)


def columns() -> ColwiseParallel:
    """Divide the outputs of a linear layer over the GPUs."""
    return ColwiseParallel()


def rows() -> RowwiseParallel:
    """Divide the inputs of a linear layer over the GPUs; the sum is scattered along the sequence."""
    return RowwiseParallel(output_layouts=SEQUENCE)


def scores() -> ColwiseParallel:
    """Divide the scores of the last linear layer over the GPUs; the loss is computed from the parts."""
    return ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False)


def joined(sequence: int = 1) -> PrepareModuleOutput:
    """Gather the result of a module, a part of the sequence at this dimension."""
    return PrepareModuleOutput(output_layouts=(Shard(sequence),), desired_output_layouts=(Replicate(),))


class OfWords(ParallelStyle):
    """An embedding whose GPUs look up their own words; the sum is scattered along the sequence.

    torch's styles make the gradient of all words on every GPU, and keep a part of it; here each makes its own rows.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, partial(_rows, self.src_data_rank))
        divided: Any = module  # whose method torch's types do not let go of
        divided.forward = partial(_looked_up, module, device_mesh)
        return module


def _looked_up(module: Any, mesh: DeviceMesh, ids: Tensor) -> Tensor:
    local_weight = module.weight.to_local()
    here = ids - mesh.get_local_rank() * -(-module.weight.shape[0] // mesh.size())
    elsewhere = (here < 0) | (here >= local_weight.shape[0])
    vectors = nn.functional.embedding(here.masked_fill(elsewhere, 0), local_weight).masked_fill(
        elsewhere.unsqueeze(-1), 0
    )
    part: Tensor = DTensor.from_local(vectors, mesh, [Partial()]).redistribute(placements=[SEQUENCE]).to_local()
    return part


class OfHeads(ParallelStyle):
    """A style for parameters with a row for each head: a GPU has its heads' rows; the input's dimension 1 is heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh, partial(_rows, self.src_data_rank))
        module.register_forward_pre_hook(lambda _, inputs: DTensor.from_local(inputs[0], device_mesh, [Shard(1)]))
        module.register_forward_hook(lambda _module, _inputs, output: output.to_local())
        return module


def _rows(source: int | None, _name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Give out the parameters of a module in rows: the parameters of rank ``source``, or of each rank for None."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(part))
