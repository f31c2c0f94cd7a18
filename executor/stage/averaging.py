"""Elastic averaging of the models of N pipelines (AvgPipe, section 3; ALGORITHMS 6.1 and A.6).

In every iteration pipeline i trains its own global batch. Δ_i is the change that its optimizer computes for its weights
x_i. With α = 1 / N, and the reference model x~ as it was at the start of the iteration::

    x_i <- (1 - α) x_i + α x~ + Δ_i
    x~  <- x~ + (1 / N) Σ Δ_i

The old weights are diluted before the update is added, which keeps x~ the mean of all x_i. All pipelines share one x~.
Each bucket of x~ lies on one rank of the bucket's group, which collects the updates (``push``) and sends the reference
out (``pull``). With a staleness of 1 a pull does not wait for the updates of the iteration before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Push(NamedTuple):
    """Updates that are being sent to the reference model, one tensor per data type."""

    tensors: list[Tensor]
    works: list[Any]


class ReferenceBucket:
    """Some parameters of one pipeline, and the bucket of x~ for them, which lies on rank ``owner``."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any, number: int) -> None:
        self.parameters = list(parameters)
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.owner = self.ranks[number % len(self.ranks)]
        self.is_owner = dist.get_rank() == self.owner
        self.reference: list[Tensor] | None = flattened([p.detach() for p in parameters]) if self.is_owner else None
        self.pulled: list[Tensor] | None = None
        self.pushes: deque[_Push] = deque()

    def pull(self, pending: int) -> None:
        """Fetch x~ into ``pulled``. The copy may lack the latest ``pending`` pushes."""
        self.settle(pending)
        self.pulled = self.handed_out()

    def handed_out(self) -> list[Tensor]:
        """Return a copy of x~ on every rank of the group; collective."""
        copies = [r.clone() for r in self.reference] if self.reference is not None else self._empty()
        for work in [dist.broadcast(one, self.owner, group=self.group, async_op=True) for one in copies]:
            work.wait()
        return copies

    def push(self, update: list[Tensor]) -> None:
        """Start to send Δ to the owner."""
        if dist.get_backend(self.group) == "gloo" and not update[0].is_cpu:
            # Gloo reduces tensors of a GPU only to all ranks at once.
            works = [dist.all_reduce(one, group=self.group, async_op=True) for one in update]
        else:
            works = [dist.reduce(one, self.owner, group=self.group, async_op=True) for one in update]
        self.pushes.append(_Push(update, works))

    def settle(self, pending: int = 0) -> None:
        """Wait for all pushes except the latest ``pending``, and add them to x~."""
        while len(self.pushes) > pending:
            push = self.pushes.popleft()
            for work in push.works:
                work.wait()
            for reference, total in zip(self.reference or (), push.tensors, strict=False):
                reference.add_(total, alpha=1.0 / len(self.ranks))

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Replace x~ by ``tensors``, one per parameter."""
        self.pushes.clear()
        if self.is_owner:
            self.reference = flattened(list(tensors))

    def _empty(self) -> list[Tensor]:
        return [torch.empty_like(one) for one in flattened([p.detach() for p in self.parameters])]


class Averaging:
    """The reference model of a stage's layers, as one of several pipelines uses it."""

    def __init__(self, buckets: Mapping[int, ReferenceBucket], *, pipelines: int, staleness: int) -> None:
        self.buckets = dict(buckets)
        self.alpha = 1.0 / pipelines
        self.staleness = staleness
        self._updates: dict[int, list[Tensor]] = {}

    def pull(self, number: int) -> None:
        """Fetch bucket ``number`` of x~."""
        self.buckets[number].pull(self.staleness)

    def push(self, number: int) -> None:
        """Start to send bucket ``number`` of Δ to x~."""
        self.buckets[number].push(self._updates.pop(number))

    def step(self, update: Callable[[], Any]) -> None:
        """Change the weights x in place by ``update``, then add α (x~ - x), and keep Δ = x_new - x for the next push.

        The result, ``x_new + α (x~ - x)``, equals ``(1 - α) x + α x~ + Δ``. The memory for it, besides x~, is the
        buffer of Δ, which holds -x until x has changed.
        """
        with torch.no_grad():
            for number, bucket in self.buckets.items():
                assert bucket.pulled is not None, "stepped before its AVG_PULL"
                self._updates[number] = flattened([p.detach() for p in bucket.parameters])
                for old, reference in zip(self._updates[number], bucket.pulled, strict=True):
                    reference.sub_(old).mul_(self.alpha)
                    old.neg_()
            update()
            for number, bucket in self.buckets.items():
                assert bucket.pulled is not None
                deltas, pulls = (unflattened(one, bucket.parameters) for one in (self._updates[number], bucket.pulled))
                for parameter, delta, pull in zip(bucket.parameters, deltas, pulls, strict=True):
                    delta.add_(parameter)
                    parameter.add_(pull)
                bucket.pulled = None

    def reference(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return x~ for every parameter, with all updates so far; collective over the stage's groups."""
        values: list[tuple[nn.Parameter, Tensor]] = []
        for bucket in self.buckets.values():
            bucket.settle()
            values += zip(bucket.parameters, unflattened(bucket.handed_out(), bucket.parameters), strict=True)
        return values

    def restore(self, reference: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace the reference model by these tensors, one for each parameter."""
        for bucket in self.buckets.values():
            bucket.restore([reference[parameter] for parameter in bucket.parameters])


def flattened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate the elements of all tensors, in order, into one new flat tensor per data type."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [torch.cat([tensor.reshape(-1) for tensor in tensors if tensor.dtype == dtype]) for dtype in dtypes]


def unflattened(flat: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return views into ``flat``, the result of ``flattened(like)``, with the shapes of ``like``."""
    by_dtype = {one.dtype: one for one in flat}
    at = dict.fromkeys(by_dtype, 0)
    views = []
    for tensor in like:
        start, end = at[tensor.dtype], at[tensor.dtype] + tensor.numel()
        views.append(by_dtype[tensor.dtype][start:end].view(tensor.shape))
        at[tensor.dtype] = end
    return views
