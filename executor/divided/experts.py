"""Experts that the ranks of a group share out: each runs its own for the tokens of all of them (expert parallelism).

Tokens go to the ranks that have their experts by an all-to-all, after one of their numbers, and come back by another.
Backward takes the gradients the same ways.

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
    """A module of experts whose parameters have a row for each: a rank has those of its experts.

    The module is called with tokens (number, width) in the order of experts, and with how many there are of each
    (``routing.tokens_per_expert``). It gives a result for each token, in the same order, and is called with tokens of
    this rank's experts alone, while its parameters are this rank's rows as ordinary tensors.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        refuse_uneven(module, device_mesh.size())
        distribute_module(module, device_mesh, self._rows)
        compute = _OwnExperts(module)
        module.__dict__[WITHIN_EXCHANGE] = compute  # not as a part of the module, whose path it would add

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
    """What a module of experts computes between the exchanges, with this rank's rows of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        compute: Any = module.forward

        def forward(tokens: Tensor, counts: Sequence[int]) -> Tensor:
            with _own_rows(module):
                made: Tensor = compute(tokens, counts)
            return made

        self.forward = forward


def refuse_uneven(module: nn.Module, ranks: int) -> None:
    """Raise ValueError where ranks cannot have equally many experts, or parameters have no row for each."""
    rows = {parameter.shape[0] if parameter.dim() else 1 for parameter in module.parameters()}
    if len(rows) != 1:
        raise ValueError(f"parameters of experts have a row for each expert, and these have {sorted(rows)} rows")
    (experts,) = rows
    if experts % ranks:
        raise ValueError(f"{ranks} GPUs cannot have equally many of {experts} experts")


class _Exchange:
    """One call's tokens on their way; ``own_counts``: how many there are of each of this rank's experts."""

    def __init__(self, counts: Sequence[int], tokens: Tensor, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        ranks, own = mesh.size(), len(counts) // mesh.size()
        self._given = [sum(counts[rank * own : (rank + 1) * own]) for rank in range(ranks)]
        arriving = _wait(
            functional.all_to_all_single(torch.tensor(counts, device=tokens.device), None, None, self._group)
        )
        mine = mesh.get_local_rank() * own
        # a tensor without numbers says nothing: then ranks are taken to send alike
        received = arriving.tolist() if has_numbers(tokens) else [*counts[mine : mine + own]] * ranks
        self._taken = [sum(received[rank * own : (rank + 1) * own]) for rank in range(ranks)]
        self._received: list[int] = received
        self._places = [rank * own + expert for expert in range(own) for rank in range(ranks)]
        self.own_counts = [sum(received[expert::own]) for expert in range(own)]

    def dispatched(self, tokens: Tensor) -> Tensor:
        """The tokens of all ranks for this rank's experts, in the order of experts, then of ranks."""
        arrived = self._sent(tokens, self._given, self._taken).split(self._received)
        return torch.cat([arrived[place] for place in self._places])

    def returned(self, made: Tensor) -> Tensor:
        """What all ranks' experts have made of this rank's tokens, in the order in which it gave them."""
        parts = dict(zip(self._places, made.split([self._received[place] for place in self._places]), strict=True))
        return self._sent(torch.cat([parts[place] for place in sorted(parts)]), self._taken, self._given)

    def _sent(self, rows: Tensor, given: list[int], taken: list[int]) -> Tensor:
        return _wait(functional.all_to_all_single_autograd(rows, taken, given, self._group))


def _wait(tensor: Tensor) -> Tensor:
    waited: Tensor = functional.wait_tensor(tensor)
    return waited


@contextmanager
def _own_rows(module: nn.Module) -> Iterator[None]:
    """Inside it the parameters of a module, and of those in it, are this rank's rows."""
    held = [(each, dict(each._parameters)) for each in module.modules()]
    for each, parameters in held:
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                each._parameters[name] = parameter.to_local()
    try:
        yield
    finally:
        for each, parameters in held:
            each._parameters.update(parameters)
