"""One process of a measured profile: runs its share of the layers over and over, as a rank of a pipeline would.

Started by `profiler` as ``python -m penstock.executor.profiling.profile_rank``; it reads lines of JSON on
standard input and answers on standard output. A pass is a forward of all its layers and one backward through them:
gradients accumulate in place, the first layer's inputs are leaves, and hooks on the tensors between the layers tell
when the backward of one layer ends and that of the next begins.

Passes go on until they are *steady*: they fill ``MIN_BLOCKS`` blocks of ``BLOCK_S`` seconds or more, and the medians of
the last ``STEADY_BLOCKS`` lie within ``STEADY`` of each other. Short of that the time limit ends them. Only the steady
blocks count: what a processor does in its first moments (full caches of the other processes, a higher clock) is not
what it does in training. How far the last blocks were apart is told, steady or not.
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
from collections.abc import Callable
from itertools import pairwise
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.job import Job, load_job
from penstock.executor.profiling.layer_costs import stash_bytes, update_times_ns, weight_shares, workspace_bytes
from penstock.executor.profiling.share import Share, make_share
from penstock.executor.profiling.stopwatch import Mark, Stopwatch
from penstock.executor.stage.precision import Training
from penstock.schemas.errors import PenstockError

WARM_UP_PASSES = 3
BLOCK_S = 0.25
MIN_BLOCKS = 8
STEADY_BLOCKS = 3
STEADY = 0.03


class _Pass(NamedTuple):
    forward_ns: list[int]
    backward_ns: list[int]


def _total_ns(one: _Pass) -> int:
    return sum(one.forward_ns) + sum(one.backward_ns)


class Passes:
    """Passes in blocks of at least ``BLOCK_S``; ``spread``: how far the medians of the last blocks are apart."""

    def __init__(self) -> None:
        self._blocks: list[list[_Pass]] = [[]]
        self._block_start = time.perf_counter()

    def add(self, one: _Pass) -> None:
        """Take a pass that has just ended."""
        self._blocks[-1].append(one)
        if time.perf_counter() - self._block_start >= BLOCK_S:
            self._blocks.append([])
            self._block_start = time.perf_counter()

    @property
    def count(self) -> int:
        """All passes."""
        return sum(map(len, self._blocks))

    @property
    def full(self) -> list[list[_Pass]]:
        """The blocks that have all their passes; before there is one, the one that is being filled."""
        return self._blocks[:-1] or self._blocks

    @property
    def spread(self) -> float:
        """Relative distance between the medians of the last ``STEADY_BLOCKS`` blocks; 1 for fewer."""
        if len(self.full) < STEADY_BLOCKS:
            return 1.0
        medians = [statistics.median(map(_total_ns, block)) for block in self.full[-STEADY_BLOCKS:]]
        return min(1.0, (max(medians) - min(medians)) / max(1, min(medians)))

    @property
    def steady(self) -> bool:
        """Whether enough has been seen."""
        return len(self.full) >= MIN_BLOCKS and self.spread <= STEADY

    def kept(self) -> list[_Pass]:
        """The passes of the last blocks."""
        return [one for block in self.full[-STEADY_BLOCKS:] for one in block]


def repeat(share: Share, watch: Stopwatch, wanted: Callable[[Passes], bool]) -> Passes:
    """Passes over the share as long as ``wanted`` says so."""
    roots = share.forward(lambda index, results: None)
    gradients = [torch.ones_like(root) for root in roots]
    del roots
    passes = Passes()
    while wanted(passes):
        passes.add(_one_pass(share, watch, gradients))
    return passes


def _one_pass(share: Share, watch: Stopwatch, gradients: list[Tensor]) -> _Pass:
    forward_marks = [watch.mark()]
    arrived: list[Mark | None] = [None] * len(share.modules)

    def after(index: int, results: list[Tensor]) -> None:
        def note(gradient: Tensor) -> None:
            arrived[index] = watch.mark()

        for tensor in results:
            tensor.register_hook(note)
        forward_marks.append(watch.mark())

    roots = share.forward(after)
    begin = watch.mark()
    if roots:
        torch.autograd.backward(roots, gradients)
    end = watch.mark()
    watch.settle()
    backward_ns = []
    stop = end
    for i, mark in enumerate(arrived):
        start = begin if i == len(arrived) - 1 else mark
        backward_ns.append(0 if start is None or not roots else max(0, watch.between_ns(start, stop)))
        stop = start or stop
    forward_ns = [watch.between_ns(a, b) for a, b in pairwise(forward_marks)]
    return _Pass(forward_ns, backward_ns)


def _serve(orders: IO[bytes], answer: Callable[[dict[str, Any]], None]) -> None:
    told = json.loads(orders.readline())
    job: Job = (
        load_job(told["reference"], told["directory"])
        if told["reference"]
        else pickle.loads(base64.b64decode(told["pickled"]))
    )
    device = torch.device(told["device"])
    watch = Stopwatch(device)
    training = Training(told["precision"])
    for size in told["sizes"]:
        share = make_share(job, told["first"], told["last"], size, device, training)
        stash = stash_bytes(share)
        workspace = workspace_bytes(share, stash)
        repeat(share, watch, lambda passes: passes.count < WARM_UP_PASSES)
        answer({"ready": size})
        _keep_busy(share, watch, orders)
        answer({"size": size, "stash_bytes": stash, "workspace_bytes": workspace} | _times(share, job, watch, told))
        _keep_busy(share, watch, orders)


def _keep_busy(share: Share, watch: Stopwatch, orders: IO[bytes]) -> None:
    """Passes until the next order is there, which is taken: no device rests while another one is measured."""
    repeat(share, watch, lambda passes: not select.select([orders], [], [], 0)[0])
    orders.readline()


def _times(share: Share, job: Job, watch: Stopwatch, told: dict[str, Any]) -> dict[str, Any]:
    """What the layers of a share take, with the other devices busy; processor and wall-clock time of it all."""
    start_wall, start_busy = time.perf_counter_ns(), time.thread_time_ns()
    limit_ns = start_wall + round(told["seconds"] * 1e9)
    passes = repeat(
        share,
        watch,
        lambda passes: passes.count < 2 or not (passes.steady or time.perf_counter_ns() > limit_ns),
    )
    kept = passes.kept()
    found = {
        "forward_ns": _medians([one.forward_ns for one in kept]),
        "backward_ns": _medians([one.backward_ns for one in kept]),
        "weight_shares": weight_shares(share, watch),
        "update_ns": update_times_ns(share, job, watch),
        "passes": len(kept),
        "spread": passes.spread,
        "steady": passes.steady,
    }
    wall_ns, busy_ns = time.perf_counter_ns() - start_wall, time.thread_time_ns() - start_busy
    return found | {"wall_ns": wall_ns, "busy_ns": busy_ns}


def _medians(rows: list[list[int]]) -> list[int]:
    return [round(statistics.median(column)) for column in zip(*rows, strict=True)]


def main() -> None:
    """Serve the profiler on standard input and output; what user code prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)

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
