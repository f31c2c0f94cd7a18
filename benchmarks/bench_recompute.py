"""The cost of recomputation where a gradient is awaited meanwhile (WPipe, figure 13): R as a separate operation.

``python benchmarks/bench_recompute.py [--iterations N]``: a line per way to recompute, with ok or MISSED at the target.

Two ranks, one stage each, two micro-batches in flight on the first; every message is delayed by F, the time of a
forward, so that the first stage waits for a time of F per micro-batch. Its recomputation fits in there. The same
without R (the layers run again at the start of B) shows the gain. Devices are emulated by sleeping and the
link by a thread, so the load of this machine has little effect; iterations alternate, and the figure is the median of
their ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from runtimes import SEED, Prepared, in_processes, laid
from torch import Tensor, nn
from torch.nn import functional

from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import LayerSpec
from penstock.executor.run.local import loopback_interface
from penstock.executor.transport import GlooTransport
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.support.recomputed import recomputed

FORWARD_S = 0.01
MICRO_BATCHES = 16
WIDTH = 8
TARGET = 0.10
WHOLE, AHEAD, INSIDE = "kept", "R while a gradient is awaited", "again at the start of B"


class Sleep(torch.autograd.Function):
    """The identity, at the speed of an emulated device: F forward, 2 F backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(2 * FORWARD_S)
        return gradient


class Slow(nn.Module):
    """A layer on an emulated device; shape inference takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        slow: Tensor = Sleep.apply(x)
        return x if x.device.type == "meta" else slow


class Delayed(GlooTransport):
    """Gloo over a link of some latency: messages leave later, one after the other."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self._delay_s = delay_s
        self._waiting: SimpleQueue[tuple[float, Callable[[], None]]] = SimpleQueue()
        self._under_way = 0
        self._done = threading.Condition()
        threading.Thread(target=self._carry, daemon=True).start()

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        with self._done:
            self._under_way += 1
        self._waiting.put((time.perf_counter() + self._delay_s, partial(super().send, tensor, peer, tag, size_bytes)))

    def drain(self) -> None:
        with self._done:
            self._done.wait_for(lambda: self._under_way == 0)
        super().drain()

    def _carry(self) -> None:
        while True:
            due, send = self._waiting.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            send()
            with self._done:
                self._under_way -= 1
                self._done.notify()


def orders_of(problem: Problem, allocation: Allocation, *, ahead: bool) -> Orders:
    """Return 1F1B of two stages, with R as an operation or not."""
    orders = early_backward(problem, allocation, warmup=[2, 1])
    return recomputed(allocation, orders) if ahead else orders


def measure(rank: int, world_size: int, iterations: int) -> dict[str, float] | None:
    """Return the cost of each way to recompute the first stage, relative to the iteration that keeps everything."""
    generator = torch.Generator().manual_seed(SEED)
    x, y = torch.randn(2, MICRO_BATCHES, WIDTH, generator=generator)
    layers = [LayerSpec("first", Slow), LayerSpec("second", Slow)]
    chain = Chain(Prepared(layers, x, y, functional.mse_loss))
    shapes = chain.infer_shapes(range(1))
    transport = Delayed(FORWARD_S)
    interpreters = {}
    for name in (WHOLE, AHEAD, INSIDE):
        first = Stage(0, 0, (0,), recompute=() if name == WHOLE else ((0, 0),))
        plan = laid(chain, [first, Stage(1, 1, (1,))], MICRO_BATCHES, partial(orders_of, ahead=name == AHEAD))
        interpreters[name] = Interpreter(plan.programs()[rank], chain, shapes, seed=SEED, transport=transport)
        interpreters[name].agree()
    times: dict[str, list[float]] = {name: [] for name in interpreters}
    for i in range(-1, iterations):
        for name in list(interpreters) if i % 2 else list(interpreters)[::-1]:
            dist.barrier()
            start = time.perf_counter()
            interpreters[name].step(0)
            dist.barrier()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
    if rank:
        return None
    return {
        name: statistics.median(a / b for a, b in zip(times[name], times[WHOLE], strict=True)) - 1
        for name in (AHEAD, INSIDE)
    } | {WHOLE: statistics.median(times[WHOLE]) / MICRO_BATCHES / FORWARD_S}


def main() -> int:
    """Print the rows; return 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=9)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    result = in_processes(measure, 2, arguments.iterations)
    ok = result[AHEAD] <= TARGET
    print(f"recompute: {WHOLE}: {result[WHOLE]:.2f} F per micro-batch")
    print(f"recompute: {AHEAD}: {100 * result[AHEAD]:+.1f} % (target {100 * TARGET:.0f} %) {'ok' if ok else 'MISSED'}")
    print(f"recompute: {INSIDE}: {100 * result[INSIDE]:+.1f} %")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
