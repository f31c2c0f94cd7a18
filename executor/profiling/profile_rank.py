"""A process of a measured profile, which runs its share of the layers over and over, like a rank of a pipeline.

`profiler` starts it as ``python -m penstock.executor.profiling.profile_rank``. It reads lines of JSON on standard input
and answers on standard output. A pass is a forward of all its layers and one backward through them. Gradients
accumulate in place, and the first layer's inputs are leaves. Hooks on the tensors between the layers mark where the
backward of one layer ends and the next one begins.

The layers are built once, with inputs for every micro-batch size. ``{"block": k}`` requests passes at size number ``k``
for ``BLOCK_S`` seconds or more, ``{"parts": true}`` the other measurements. A process that has answered continues with
passes that do not count, so that no device rests while another one measures.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.host_memory import keep_freed_memory
from penstock.executor.profiling.layer_costs import (
    kept_bytes,
    update_times_ns,
    update_workspace,
    weight_shares,
    workspace_bytes,
)
from penstock.executor.profiling.rounds import Block
from penstock.executor.profiling.share import Share, make_shares
from penstock.executor.profiling.stopwatch import Stopwatch, stopwatch
from penstock.executor.run.job import Job, load_job
from penstock.executor.runtime.interface import Runtime
from penstock.executor.runtime.opening import open_device
from penstock.executor.stage.precision import Training, kept_casts
from penstock.schemas.errors import PenstockError

WARM_UP_PASSES = 3
BLOCK_S = 0.25


class _Pass(NamedTuple):
    forward_ns: list[int]
    backward_ns: list[int]


class Passes:
    """A share of the layers that runs over and over."""

    def __init__(self, share: Share, watch: Stopwatch) -> None:
        self._share = share
        self._watch = watch
        roots = share.forward(lambda index, results: None)
        self._gradients = [torch.ones_like(root) for root in roots]

    def block(self, least_s: float = BLOCK_S) -> Block:
        """Run passes for ``least_s`` seconds, at least one."""
        passes: list[_Pass] = []
        start_ns = time.perf_counter_ns()
        while not passes or time.perf_counter_ns() - start_ns < least_s * 1e9:
            passes.append(self.one())
        wall_ns = time.perf_counter_ns() - start_ns
        forward_ns = _medians([one.forward_ns for one in passes])
        backward_ns = _medians([one.backward_ns for one in passes])
        return Block(forward_ns, backward_ns, len(passes), wall_ns)

    def one(self) -> _Pass:
        """Run a single pass."""
        watch = self._watch
        forward_marks = [watch.mark()]
        arrived: list[int | None] = [None] * len(self._share.modules)

        def after(index: int, results: list[Tensor]) -> None:
            def note(gradient: Tensor) -> None:
                arrived[index] = watch.mark()

            for tensor in results:
                tensor.register_hook(note)
            forward_marks.append(watch.mark())

        roots = self._share.forward(after)
        begin = watch.mark()
        if roots:
            torch.autograd.backward(roots, self._gradients)
        end = watch.mark()
        at_ns = watch.read_ns()
        backward_ns = []
        stop = end
        for i, mark in enumerate(arrived):
            start = begin if i == len(arrived) - 1 else mark
            backward_ns.append(0 if start is None or not roots else max(0, at_ns[stop] - at_ns[start]))
            stop = stop if start is None else start
        forward_ns = [at_ns[b] - at_ns[a] for a, b in pairwise(forward_marks)]
        return _Pass(forward_ns, backward_ns)


def _medians(rows: Sequence[Sequence[int]]) -> list[int]:
    return [round(statistics.median(column)) for column in zip(*rows, strict=True)]


def _serve(orders: IO[bytes], answer: Callable[[dict[str, Any]], None]) -> None:
    order = json.loads(orders.readline())
    job: Job = (
        load_job(order["reference"], order["directory"])
        if order["reference"]
        else pickle.loads(base64.b64decode(order["pickled"]))
    )
    runtime, training = open_device(order["device"]), Training(order["precision"])
    runtime.use_precision(training.precision)
    with kept_casts() if training.lowered else nullcontext():
        _measure(job, runtime, training, order, orders, answer)


def _measure(
    job: Job,
    runtime: Runtime,
    training: Training,
    order: dict[str, Any],
    orders: IO[bytes],
    answer: Callable[[dict[str, Any]], None],
) -> None:
    """Measure the layers of an order, then answer the orders that follow."""
    watch = stopwatch(runtime)
    shares = make_shares(job, order["first"], order["last"], order["sizes"], runtime, training)
    passes = [Passes(share, watch) for share in shares]
    for each in passes:
        for _ in range(WARM_UP_PASSES):
            each.one()
    kept = [kept_bytes(share) for share in shares]
    workspaces = [workspace_bytes(share, each.stash) for share, each in zip(shares, kept, strict=True)]
    stashes = [each.stash for each in kept]
    answer({"stash_bytes": stashes, "workspace_bytes": workspaces, "copied_bytes": kept[-1].copied})
    order = _next_order(orders, passes[-1])
    while "block" in order:
        at_size = passes[order["block"]]
        answer(at_size.block()._asdict())
        order = _next_order(orders, at_size)
    answer(
        {
            "weight_shares": [weight_shares(share, watch) for share in shares],
            "update_ns": update_times_ns(shares[-1], job, watch),
            "update_workspace": update_workspace(shares[-1], job)._asdict(),
        }
    )
    _next_order(orders, passes[-1])


def _next_order(orders: IO[bytes], passes: Passes) -> dict[str, Any]:
    """Run passes until the next order arrives."""
    while not select.select([orders], [], [], 0)[0]:
        passes.one()
    order: dict[str, Any] = json.loads(orders.readline())
    return order


def main() -> None:
    """Serve the profiler on standard input and output; output of user code goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    keep_freed_memory()

    def answer(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        with os.fdopen(0, "rb", buffering=0) as orders:
            _serve(orders, answer)
    except PenstockError as error:
        answer({"error": type(error).__name__, "detail": error.detail, "remedy": error.remedy})
        sys.exit(1)


if __name__ == "__main__":
    main()
