"""All-reduce of a stage's gradients in buckets, started while the last backward still runs.

Gradients of a bucket are views of one flat buffer per data type, so nothing is copied. All ranks of a bucket's group
hold its layers, and start buckets of the same group in the order of the list, whichever is ready first (Li et al.,
PyTorch Distributed, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.executor.stage.stage_module import StageModule
from penstock.executor.transport import sum_over


class Bucket:
    """Some layers' gradients: their flat buffers, and how far their reduction over ``group`` is."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any) -> None:
        self.parameters = list(parameters)
        self.group = group
        self.flat: list[Tensor] = []
        self.views: list[Tensor] = []
        at: dict[torch.dtype, int] = {}
        sizes: dict[torch.dtype, int] = {}
        for parameter in parameters:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        flats = {}
        for parameter in parameters:
            dtype = parameter.dtype
            if dtype not in flats:
                flats[dtype] = torch.zeros(sizes[dtype], dtype=dtype, device=parameter.device)
                self.flat.append(flats[dtype])
            start = at.get(dtype, 0)
            at[dtype] = start + parameter.numel()
            self.views.append(flats[dtype][start : at[dtype]].view(parameter.shape))
        self.hooks: list[Any] = []
        self.missing = 0
        self.armed = False
        self.works: list[Any] | None = None
        self.before: Bucket | None = None
        self.after: Bucket | None = None


class Reduction:
    """The buckets of one stage that are reduced, by number; those of the same group start in the order of numbers."""

    def __init__(self, buckets: Mapping[int, Bucket]) -> None:
        self.buckets = dict(buckets)
        last: dict[int, Bucket] = {}
        for bucket in self.buckets.values():
            before = last.get(id(bucket.group))
            if before is not None:
                bucket.before, before.after = before, bucket
            last[id(bucket.group)] = bucket

    def begin(self) -> None:
        """Nothing is started; the flat buffers are the caller's to clear."""
        for bucket in self.buckets.values():
            bucket.works, bucket.armed = None, False

    def arm(self, number: int, firings: int, parameters: Callable[[], Sequence[nn.Parameter]]) -> None:
        """The backward that follows is the last one: start bucket ``number`` as soon as it has all its gradients.

        ``firings``: how often that backward adds to gradients of the bucket; ``parameters``: those that it adds to.
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
        """Start bucket ``number`` if it has not been started: no gradient will be added any more."""
        self._start(self.buckets[number])

    def wait(self, number: int) -> None:
        """Return when bucket ``number`` is summed over its group."""
        bucket = self.buckets[number]
        self._start(bucket)
        for work in bucket.works or ():
            work.wait()

    def wait_all(self) -> None:
        """Return when every bucket is."""
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
        for hook in bucket.hooks:
            hook.remove()
        bucket.hooks = []
        bucket.works = [sum_over(flat, bucket.group) for flat in bucket.flat]


def uses(stage: StageModule, parameter: nn.Parameter) -> int:
    """How often one backward of the stage adds to a parameter's gradient: once per segment that holds it."""
    return sum(any(parameter is other for m in s.modules for other in m.parameters()) for s in stage.segments)
