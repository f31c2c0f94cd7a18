"""Optimizer states shared out over the replicas of a stage (ZeRO, stage 1; Rajbhandari et al., 2020, section 5.1).

Each replica has the summed gradients of all parameters, steps its own share, and gives the result to the others. The
job's optimizer knows all parameters, as without sharding, so its groups, options and schedule are whole; but it finds
gradients, and therefore makes states, for its own share alone. What is stepped is computed once, from the same numbers,
so weights equal those of the unsharded run bit by bit, for every optimizer that steps parameters one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Replicated(NamedTuple):
    """Parameters that the ranks of one process group hold: ``ranks`` of the run, ascending."""

    parameters: Sequence[nn.Parameter]
    group: Any
    ranks: tuple[int, ...]


class ShardedStates:
    """Which parameters of a stage this rank steps. Those of no ``replicated`` are stepped by everybody.

    ``owned``: its share.
    """

    def __init__(self, optimizer: Optimizer, replicated: Sequence[Replicated], rank: int) -> None:
        self._optimizer = optimizer
        self._gifts: list[tuple[int, Any, list[nn.Parameter]]] = []
        self._others: list[nn.Parameter] = []
        self.owned: list[nn.Parameter] = []
        loads: dict[tuple[int, ...], list[int]] = {}
        for parameters, group, ranks in replicated:
            shares = shares_of(parameters, loads.setdefault(ranks, [0] * len(ranks)))
            for owner, share in zip(ranks, shares, strict=True):
                (self.owned if owner == rank else self._others).extend(share)
                for dtype in dict.fromkeys(parameter.dtype for parameter in share):
                    self._gifts.append((owner, group, [p for p in share if p.dtype == dtype]))

    def step(self, update: Callable[[], Any]) -> None:
        """Step the own share by ``update``, and exchange shares."""
        kept = [parameter.grad for parameter in self._others]
        for parameter in self._others:
            parameter.grad = None
            self._optimizer.state.pop(parameter, None)
        update()
        for parameter, gradient in zip(self._others, kept, strict=True):
            parameter.grad = gradient
        self._exchange()

    def _exchange(self) -> None:
        with torch.no_grad():
            started = []
            for owner, group, share in self._gifts:
                flat = torch.cat([parameter.reshape(-1) for parameter in share])
                started.append((flat, share, dist.broadcast(flat, src=owner, group=group, async_op=True)))
            mine = {id(parameter) for parameter in self.owned}
            for flat, share, work in started:
                work.wait()
                if id(share[0]) not in mine:
                    _unpack(flat, share)


def shares_of(parameters: Sequence[nn.Parameter], loads: list[int]) -> list[list[nn.Parameter]]:
    """Each parameter to the replica that has fewest bytes so far, the first of equals; largest first, in given order.

    ``loads``: the bytes that each replica has already; they are raised.
    """
    shares: list[list[nn.Parameter]] = [[] for _ in loads]
    for parameter in sorted(parameters, key=lambda one: -one.numel() * one.element_size()):
        lightest = loads.index(min(loads))
        shares[lightest].append(parameter)
        loads[lightest] += parameter.numel() * parameter.element_size()
    return shares


def _unpack(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    at = 0
    for parameter in parameters:
        parameter.copy_(flat[at : at + parameter.numel()].view(parameter.shape))
        at += parameter.numel()
