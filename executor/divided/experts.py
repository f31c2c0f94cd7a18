"""Experts that the ranks of a group share out: each runs its experts for all ranks' tokens (expert parallelism).

An all-to-all of token counts comes first. A second one sends tokens to the ranks that have their experts, and a third
one sends the results back. Backward sends the gradients along the same two paths.

.. [1] Lepikhin et al., GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding (2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from penstock.executor.divided.routing import has_numbers
from penstock.executor.stage.split_backward import WITHIN_EXCHANGE


class ExpertParallel(ParallelStyle):
    """A module of experts whose parameters have a row for each expert; a rank has the rows of its experts.

    The module is called with tokens (number, width) in the order of experts, and with the number of tokens of each
    expert (``routing.tokens_per_expert``). It returns a result for each token, in the same order. On a rank it is
    called with tokens of this rank's experts alone, while its parameters are this rank's rows as ordinary tensors.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        refuse_uneven(module, device_mesh.size())
        distribute_module(module, device_mesh, self._rows)
        compute = _OwnExperts(module)
        module.__dict__[WITHIN_EXCHANGE] = compute  # __dict__: a submodule would change parameters' names

        def forward(tokens: Tensor, counts: Sequence[int]) -> Tensor:
            exchange = _Exchange(counts, tokens, device_mesh)
            return exchange.returned(compute(exchange.dispatched(tokens), exchange.own_counts))

        module.forward = forward
        return module

    def _rows(self, _name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


class _OwnExperts(nn.Module):
    """The computation of a module of experts between the exchanges, with this rank's rows of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        compute: Any = module.forward

        def forward(tokens: Tensor, counts: Sequence[int]) -> Tensor:
            with _own_rows(module):
                results: Tensor = compute(tokens, counts)
            return results

        self.forward = forward


def refuse_uneven(module: nn.Module, ranks: int) -> None:
    """Raise ValueError where ranks cannot have equally many experts, or a parameter has no row for each expert."""
    rows = {parameter.shape[0] if parameter.dim() else 1 for parameter in module.parameters()}
    if len(rows) != 1:
        raise ValueError(f"parameters of experts need one row per expert, but they have {sorted(rows)} rows")
    (experts,) = rows
    if experts % ranks:
        raise ValueError(f"{experts} experts cannot be split evenly over {ranks} GPUs")


class _Exchange:
    """The exchange of one call's tokens; ``own_counts``: the number of tokens of each of this rank's experts."""

    def __init__(self, counts: Sequence[int], tokens: Tensor, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        ranks, per_rank = mesh.size(), len(counts) // mesh.size()
        self._rows_to = [sum(counts[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks)]
        arriving = _wait(
            functional.all_to_all_single(torch.tensor(counts, device=tokens.device), None, None, self._group)
        )
        mine = mesh.get_local_rank() * per_rank
        # A tensor without numbers holds no counts: ranks are then assumed to send alike.
        received = arriving.tolist() if has_numbers(tokens) else [*counts[mine : mine + per_rank]] * ranks
        self._rows_from = [sum(received[rank * per_rank : (rank + 1) * per_rank]) for rank in range(ranks)]
        self._received: list[int] = received
        self._places = [rank * per_rank + expert for expert in range(per_rank) for rank in range(ranks)]
        self.own_counts = [sum(received[expert::per_rank]) for expert in range(per_rank)]

    def dispatched(self, tokens: Tensor) -> Tensor:
        """Send tokens to their experts' ranks; return the tokens of this rank's experts, by expert, then by rank."""
        arrived = self._sent(tokens, self._rows_to, self._rows_from).split(self._received)
        return torch.cat([arrived[place] for place in self._places])

    def returned(self, results: Tensor) -> Tensor:
        """Send results back; return all experts' results for this rank's tokens, in the order of its tokens."""
        parts = dict(zip(self._places, results.split([self._received[place] for place in self._places]), strict=True))
        return self._sent(torch.cat([parts[place] for place in sorted(parts)]), self._rows_from, self._rows_to)

    def _sent(self, rows: Tensor, rows_to: list[int], rows_from: list[int]) -> Tensor:
        return _wait(functional.all_to_all_single_autograd(rows, rows_from, rows_to, self._group))


def _wait(tensor: Tensor) -> Tensor:
    waited: Tensor = functional.wait_tensor(tensor)
    return waited


@contextmanager
def _own_rows(module: nn.Module) -> Iterator[None]:
    """Make the parameters of a module and its submodules this rank's rows within this context."""
    saved = [(each, dict(each._parameters)) for each in module.modules()]
    for each, parameters in saved:
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                each._parameters[name] = parameter.to_local()
    try:
        yield
    finally:
        for each, parameters in saved:
            each._parameters.update(parameters)
