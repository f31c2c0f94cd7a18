"""Optimizer states shared out over the replicas of a stage (ZeRO, stage 1; Rajbhandari et al., 2020, section 5.1).

Each replica steps its share of the parameters, in whole parameters. It receives the sums of its share's gradients only,
and the stepped parameters are gathered in the buffers of the gradients. The job's optimizer has all parameters, as
without sharding, so its groups, options and schedule are complete. It sees gradients for its share alone, and therefore
creates states for its share alone. Each update is computed once, so replicas stay equal. Weights equal the weights of
the unsharded run for every optimizer that steps parameters one by one: bit by bit with two replicas, whose sums do not
depend on the order of their terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.executor.stage.reduction import Flat

P = TypeVar("P")

Shares = Mapping[tuple[int, int], Sequence[Sequence[nn.Parameter]]]
"""The parameters of a bucket that each rank of a group steps, in the order of ranks, by (bucket, group)."""


class ShardedStates:
    """The parameters of a stage that this rank steps: its share of the parameters in ``flats``, and all other ones."""

    def __init__(self, optimizer: Optimizer, flats: Sequence[Flat]) -> None:
        self._optimizer = optimizer
        self._flats = flats
        self._others = [parameter for flat in flats for parameter, _ in flat.others]
        self._ids = {id(parameter) for parameter in self._others}

    def steps(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank steps a parameter of the stage, and has its gradient's sum."""
        return id(parameter) not in self._ids

    def step(self, update: Callable[[], Any]) -> None:
        """Step this rank's share by ``update``, and exchange shares."""
        kept = [parameter.grad for parameter in self._others]
        for parameter in self._others:
            parameter.grad = None
            self._optimizer.state.pop(parameter, None)
        update()
        for parameter, gradient in zip(self._others, kept, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            gathered = [(flat, flat.gather()) for flat in self._flats]
            for flat, works in gathered:
                for work in works:
                    work.wait()
                flat.take()


def shares_of(parameters: Sequence[P], loads: list[int], sizes: Mapping[int, int]) -> list[list[P]]:
    """Assign each parameter to the replica with the fewest bytes so far, the first of equals.

    Parameters are assigned largest first, and in their order where sizes are equal.

    ``loads``: the bytes that each replica has already, increased in place. ``sizes``: bytes of parameters by id.
    """
    shares: list[list[P]] = [[] for _ in loads]
    for parameter in sorted(parameters, key=lambda one: -sizes[id(one)]):
        lightest = loads.index(min(loads))
        shares[lightest].append(parameter)
        loads[lightest] += sizes[id(parameter)]
    return shares
