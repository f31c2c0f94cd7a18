"""The sum of a stage's gradients over its replicas in buckets, which starts while the last backward still runs.

Gradients of a bucket are views of one flat buffer per data type and group, so no gradient is copied. Gradients of
experts that ranks share out are summed over a separate group. All ranks of a bucket's groups hold its layers. They
start the buckets of equal groups in the order of the list, whichever is ready first (Li et al., PyTorch Distributed,
section 3.2.3). A bucket is all-reduced. Where each replica steps a share of its parameters (``sharded_optimizer``), it
is reduce-scattered, or its shares are reduced one by one, each to the replica that steps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.executor.stage.sharded_parameters import Unit
from penstock.executor.stage.stage_module import StageModule
from penstock.executor.transport import sum_over

if TYPE_CHECKING:
    from penstock.executor.stage.held_stage import HeldStage


class Summed(NamedTuple):
    """Parameters whose gradients are summed over ``group`` (None: no other rank holds them).

    ``shares``: the parameters that each rank of the group steps, in the order of its ranks; None: every rank steps all.
    ``mine``: this rank's place in the group.
    """

    parameters: Sequence[nn.Parameter]
    group: Any = None
    shares: Sequence[Sequence[nn.Parameter]] | None = None
    mine: int = 0

    def flats(self) -> list[Flat]:
        """Create a buffer for the gradients of each data type."""
        shares = [self.parameters] if self.shares is None else self.shares
        dtypes = dict.fromkeys(parameter.dtype for parameter in self.parameters)
        return [
            Flat([[p for p in share if p.dtype == dtype] for share in shares], self.group, self.mine)
            for dtype in dtypes
        ]


class Flat:
    """Gradients of one data type in one buffer, share after share.

    Shares of about equal size are padded to the longest, so that one collective sums them all. Where padding would
    lengthen the buffer by more than ``MOST_PADDING`` (few large parameters, many ranks), each share keeps its length,
    and is summed and sent separately. ``local``, ``others``: parameters with their places, of this rank's share and of
    the other shares.
    """

    def __init__(self, shares: Sequence[Sequence[nn.Parameter]], group: Any, mine: int) -> None:
        first = next(parameter for share in shares for parameter in share)
        lengths = [sum(parameter.numel() for parameter in share) for share in shares]
        self.is_even = are_even(lengths)
        if self.is_even:
            lengths = [max(lengths)] * len(lengths)
        self.group = group
        self.buffer = torch.zeros(sum(lengths), dtype=first.dtype, device=first.device)
        self.blocks = self.buffer.split(lengths)
        self.block = self.blocks[mine]
        self.local: list[tuple[nn.Parameter, Tensor]] = []
        self.others: list[tuple[nn.Parameter, Tensor]] = []
        for number, (share, block) in enumerate(zip(shares, self.blocks, strict=True)):
            at = 0
            for parameter in share:
                view = block[at : at + parameter.numel()].view(parameter.shape)
                (self.local if number == mine else self.others).append((parameter, view))
                at += parameter.numel()

    @property
    def is_shared_out(self) -> bool:
        """True if each rank steps a share."""
        return len(self.blocks) > 1

    def sum(self) -> list[Any]:
        """Start to sum the gradients that this rank steps; return the works to ``wait()`` for."""
        if not self.is_shared_out:
            return [sum_over(self.buffer, self.group)]
        if self.is_even:
            return [dist.reduce_scatter_tensor(self.block, self.buffer, group=self.group, async_op=True)]
        return [
            dist.reduce(block, group=self.group, group_dst=rank, async_op=True)
            for rank, block in enumerate(self.blocks)
            if len(block)
        ]

    def gather(self) -> list[Any]:
        """Start to gather all parameters' values into the gradients' buffer; return the works to ``wait()`` for."""
        for parameter, view in self.local:
            view.copy_(parameter)
        if self.is_even:
            return [dist.all_gather_into_tensor(self.buffer, self.block, group=self.group, async_op=True)]
        return [
            dist.broadcast(block, group=self.group, group_src=rank, async_op=True)
            for rank, block in enumerate(self.blocks)
            if len(block)
        ]

    def take(self) -> None:
        """Copy the values that were gathered to other ranks' parameters."""
        for parameter, view in self.others:
            parameter.copy_(view)


MOST_PADDING = 1 / 8
"""The most padding of even shares, as a fraction of their elements."""


def are_even(sizes: Sequence[int]) -> bool:
    """Return whether one collective sums shares of these sizes, each padded to the longest."""
    return max(sizes) * len(sizes) <= (1 + MOST_PADDING) * sum(sizes)


class Bucket:
    """Some layers' gradients: their flat buffers, and the state of their sums.

    ``leaves``: the tensors to which autograd adds the gradients, where these are not the parameters themselves.
    ``units``: parameters whose rows ranks share out, with separate buffers.
    """

    def __init__(
        self, summed: Sequence[Summed], leaves: Sequence[nn.Parameter] | None = None, units: Sequence[Unit] = ()
    ) -> None:
        self.parameters = [parameter for each in summed for parameter in each.parameters]
        self.leaves = [*(self.parameters if leaves is None else leaves), *(leaf for u in units for leaf in u.leaves)]
        self.groups = (*(each.group for each in summed), *(unit.group for unit in units))
        self.flats = [flat for each in summed for flat in each.flats()]
        self.units = list(units)
        places = {id(parameter): view for flat in self.flats for parameter, view in (*flat.local, *flat.others)}
        self.views = [places[id(parameter)] for parameter in self.parameters]
        self.hooks: list[Any] = []
        self.missing = 0
        self.armed = False
        self.works: list[Any] | None = None
        self.before: Bucket | None = None
        self.after: Bucket | None = None

    def start(self) -> None:
        """Start the sums. No gradient may be added afterwards."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        self.works = [work for flat in self.flats if flat.group is not None for work in flat.sum()]
        self.works += [work for unit in self.units for work in unit.sum()]


class Reduction:
    """The buckets of one stage that are reduced, by number; buckets of equal groups start in the order of numbers."""

    def __init__(self, buckets: Mapping[int, Bucket]) -> None:
        self.buckets = dict(sorted(buckets.items()))
        last: dict[tuple[int, ...], Bucket] = {}
        for bucket in self.buckets.values():
            together = tuple(map(id, bucket.groups))
            before = last.get(together)
            if before is not None:
                bucket.before, before.after = before, bucket
            last[together] = bucket

    def begin(self) -> None:
        """Mark every bucket as not started. The caller clears the flat buffers."""
        for bucket in self.buckets.values():
            bucket.works, bucket.armed = None, False

    def arm(self, number: int, firings: int, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        """Start bucket ``number`` as soon as the backward that follows, the last one, has added all its gradients.

        ``firings``: how often that backward adds to the bucket's gradients. ``parameters``: the parameters it adds to.
        """
        bucket = self.buckets[number]
        bucket.armed = True
        bucket.missing = firings

        def fired(_: Tensor) -> None:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._start_ready(bucket)

        bucket.hooks = [parameter.register_post_accumulate_grad_hook(fired) for parameter in parameters()]
        if firings == 0:
            self._start_ready(bucket)

    def start(self, number: int) -> None:
        """Start bucket ``number`` if it has not been started. No gradient may be added afterwards."""
        self._start(self.buckets[number])

    def wait(self, number: int) -> None:
        """Wait until the part of bucket ``number`` that this rank steps is summed."""
        bucket = self.buckets[number]
        self._start(bucket)
        for work in bucket.works or ():
            work.wait()
        bucket.works = []  # gloo writes a reduce-scatter's sum at each wait

    def wait_all(self) -> None:
        """Wait until every bucket is summed."""
        for number in self.buckets:
            self.wait(number)

    def _start_ready(self, bucket: Bucket) -> None:
        ready: Bucket | None = bucket
        if bucket.before is not None and bucket.before.works is None:
            return
        while ready is not None and ready.armed and not ready.missing:
            self._start(ready)
            ready = ready.after

    def _start(self, bucket: Bucket) -> None:
        if bucket.works is not None:
            return
        if bucket.before is not None:
            self._start(bucket.before)
        bucket.start()


def uses(stage: StageModule, parameter: nn.Parameter) -> int:
    """Count how often one backward of the stage adds to a parameter's gradient: once per segment that holds it."""
    return sum(any(parameter is other for m in s.modules for other in m.parameters()) for s in stage.segments)


def sum_tie(stage: HeldStage, number: int) -> None:
    """Sum the gradient of tie ``number`` over all ranks that hold it, so that all of them step it equally."""
    parameter = stage.ties[number]
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    dist.all_reduce(parameter.grad, group=stage.tie_groups[number])


def sum_parts(stage: HeldStage) -> None:
    """Sum the gradients of which each rank has a part, over the ranks that share layers."""
    gradients = [piece.local_parameter.grad for piece in stage.parts.pieces.values() if piece.is_part]
    parts = [gradient for gradient in gradients if gradient is not None]
    for dtype in dict.fromkeys(gradient.dtype for gradient in parts):
        same = [gradient for gradient in parts if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1) for gradient in same])
        dist.all_reduce(flat, group=stage.part_group)
        for gradient, total in zip(same, flat.split([gradient.numel() for gradient in same]), strict=True):
            gradient.copy_(total.view_as(gradient))
