"""All-reduce of a replicated stage's gradients in buckets, started while the last backward still runs.

Gradients of a bucket are views of one flat buffer per data type, so nothing is copied. Replicas hold the same layers
and start their buckets in the same order, whichever is ready first (Li et al., PyTorch Distributed, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.executor.stage_module import StageModule
from penstock.executor.transport import sum_over


class _Bucket:
    """Some layers' gradients: their flat buffers, and how far their reduction is."""

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, int]]) -> None:
        self.parameters = [parameter for parameter, _ in parameters]
        self.firings = sum(count for _, count in parameters)
        self.flat: list[Tensor] = []
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            members = [parameter for parameter in self.parameters if parameter.dtype == dtype]
            flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=members[0].device)
            at = 0
            for parameter in members:
                self.views.append((parameter, flat[at : at + parameter.numel()].view(parameter.shape)))
                at += parameter.numel()
            self.flat.append(flat)
        self.hooks: list[Any] = []
        self.missing = 0
        self.armed = False
        self.works: list[Any] | None = None


class Reduction:
    """The buckets of one replicated stage."""

    def __init__(self, stage: StageModule, ranges: Sequence[tuple[int, int]], group: Any) -> None:
        self.group = group
        self.buckets: list[_Bucket] = []
        taken: set[int] = set()
        by_range: dict[tuple[int, int], list[tuple[nn.Parameter, int]]] = {}
        for first, last in sorted(ranges):
            members = by_range[first, last] = []
            for i in range(first, last + 1):
                for parameter in stage.modules[i].parameters():
                    if parameter.requires_grad and id(parameter) not in taken:
                        taken.add(id(parameter))
                        members.append((parameter, _uses(stage, parameter)))
        for first, last in ranges:
            self.buckets.append(_Bucket(by_range[first, last]))
        self.next = 0

    def begin(self) -> None:
        """Start a step with zero gradients in the flat buffers."""
        self.next = 0
        for bucket in self.buckets:
            bucket.works, bucket.armed = None, False
            for flat in bucket.flat:
                flat.zero_()
            for parameter, view in bucket.views:
                parameter.grad = view

    def arm(self, number: int) -> None:
        """The backward that follows is the last one: start bucket ``number`` as soon as it has all its gradients."""
        bucket = self.buckets[number]
        bucket.armed = True
        bucket.missing = bucket.firings

        def fired(_: Tensor) -> None:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._start_ready()

        bucket.hooks = [parameter.register_post_accumulate_grad_hook(fired) for parameter in bucket.parameters]

    def start(self, number: int) -> None:
        """Start every bucket up to ``number`` that has not been started: no gradient will be added any more."""
        while self.next <= number:
            self._start(self.buckets[self.next])

    def wait(self, number: int) -> None:
        """Return when bucket ``number`` is summed over the replicas."""
        self.start(number)
        for work in self.buckets[number].works or ():
            work.wait()

    def _start_ready(self) -> None:
        while self.next < len(self.buckets):
            bucket = self.buckets[self.next]
            if not bucket.armed or bucket.missing:
                return
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        for hook in bucket.hooks:
            hook.remove()
        bucket.hooks = []
        bucket.works = [sum_over(flat, self.group) for flat in bucket.flat]
        self.next += 1


def _uses(stage: StageModule, parameter: nn.Parameter) -> int:
    """How often one backward of the stage adds to a parameter's gradient: once per segment that holds it."""
    return sum(any(parameter is other for m in s.modules for other in m.parameters()) for s in stage.segments)
