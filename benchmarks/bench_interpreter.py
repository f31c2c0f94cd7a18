"""The interpreter against the pipeline runtimes of PyTorch, and the cost of an instruction.

``python benchmarks/bench_interpreter.py [--iterations N]``: one line per row: name, value, unit, target, ok or MISSED.

Iterations are paired and alternate in the same processes, on the same partition, order and data; the figure is the
median of the ratios of neighbours, since absolute times drift with the load (EXECUTOR B). Orders go to
``_PipelineScheduleRuntime`` as the CSV of ``penstock export schedule``. For DAPPLE's Figure 8 devices are emulated by
sleeping, so that three of them need no three cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from runtimes import MICRO_BATCHES, ROWS, SEED, Prepared, TorchRuntime, gpt_job, in_processes, laid, tiny_job
from torch import Tensor, nn
from torch.nn import functional

from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import LayerSpec
from penstock.executor.run.local import loopback_interface
from penstock.executor.runtime.cpu import CpuRuntime, HostTimer
from penstock.executor.transport import GlooTransport, process_groups
from penstock.schemas.program import parse_row
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.interleaved import interleaved
from penstock.solvers.schedules.v_shape import zb_v
from penstock.solvers.schedules.zero_bubble import zb_h1

LAYERS = 10
CUTS = {2: (5,), 4: (3, 5, 7)}
"""The first layers of the stages of GPT after the first, as in EXECUTOR B."""
TINY_MICRO_BATCHES = 64
DELAY_S = 0.004
WARMUP = 2
RUNTIME, ONE_F_ONE_B = "_PipelineScheduleRuntime", "Schedule1F1B"
TARGETS = {RUNTIME: 1.00, ONE_F_ONE_B: 1.02}
SCHEDULES: dict[str, Callable[[Problem, Allocation], Orders]] = {
    "1F1B": lambda problem, allocation: early_backward(
        problem, allocation, warmup=[len(allocation.stages) - s for s in range(len(allocation.stages))]
    ),
    "interleaved": interleaved,
    "ZB-H1": zb_h1,
    "ZBV": zb_v,
}


def stages_of(schedule: str, world_size: int) -> list[Stage]:
    """Return one stage per rank, or two per rank for interleaved and V-shaped orders.

    Interleaved orders have them in turn, V-shaped orders there and back.
    """
    if schedule in ("1F1B", "ZB-H1"):
        bounds, devices = [0, *CUTS[world_size], LAYERS], list(range(world_size))
    else:
        back = range(world_size) if schedule == "interleaved" else reversed(range(world_size))
        devices = [*range(world_size), *back]
        bounds = [LAYERS * s // len(devices) for s in range(len(devices) + 1)]
    return [Stage(bounds[s], bounds[s + 1] - 1, (device,)) for s, device in enumerate(devices)]


def compare(schedule: str, rank: int, world_size: int, iterations: int) -> dict[str, float] | None:
    """Return ratios of iteration times with this order on rank 0, None on others."""
    job = gpt_job()
    chain = Chain(job)
    plan = laid(chain, stages_of(schedule, world_size), MICRO_BATCHES, SCHEDULES[schedule])
    program = plan.programs()[rank]
    shapes = chain.infer_shapes(range(ROWS))
    interpreter = Interpreter(program, chain, shapes, seed=SEED, transport=GlooTransport())
    interpreter.agree()
    names = (RUNTIME, ONE_F_ONE_B) if schedule == "1F1B" else (RUNTIME,)
    runtimes = {name: TorchRuntime(name, plan, chain, rank, job) for name in names}
    candidates: dict[str, Callable[[], object]] = {"own": lambda: interpreter.step(0)}
    candidates |= {name: runtime.step for name, runtime in runtimes.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(-WARMUP, iterations):
        for name in list(candidates) if i % 2 else list(candidates)[::-1]:
            if name != "own":
                runtimes[name].zero_grad()
            dist.barrier()
            start = time.perf_counter()
            candidates[name]()
            dist.barrier()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
        for runtime in runtimes.values():
            runtime.check_equal(interpreter)
    if rank:
        return None
    return {name: median_ratio(times["own"], times[name]) for name in names}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def overhead(rank: int, world_size: int, iterations: int) -> dict[str, float]:
    """Measure the CPU time per compute instruction above a plain loop that does the same autograd work.

    Also measures the cost of a trace.
    """
    count = TINY_MICRO_BATCHES
    job = tiny_job(2, count)
    chain = Chain(job)
    stages = [Stage(0, 0, (0,)), Stage(1, 1, (0,))]
    row = np.asarray(parse_row(f"(0F0 1F0 1B0 0B0)*{count}"), dtype=np.int32)
    (program,) = laid(chain, stages, count, lambda _p, _a: Orders("one after another", (Row((0,), row),))).programs()
    interpreter = Interpreter(program, chain, chain.infer_shapes(range(1)), seed=SEED, transport=GlooTransport())
    interpreter.agree()
    layers = [chain.build_layer(i, SEED) for i in range(2)]
    scale = torch.tensor(1.0 / job.y.numel())

    def plain() -> None:
        for layer in layers:
            for parameter in layer.parameters():
                parameter.grad = None
        for m in range(count):
            inputs, targets = job.batch(0, range(m, m + 1))
            middle = layers[0](inputs["x"])
            leaf = middle.detach().requires_grad_()
            loss, _ = job.loss({"x": layers[1](leaf)}, targets)
            loss.backward(scale)
            middle.backward(leaf.grad)

    times: dict[str, list[float]] = {"plain": [], "own": [], "traced": []}
    runs: dict[str, Callable[[], object]] = {
        "plain": plain,
        "own": lambda: interpreter.step(0),
        "traced": lambda: interpreter.step(0, []),
    }
    for _ in range(20 * iterations):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    extra = statistics.median(a - b for a, b in zip(times["own"], times["plain"], strict=True))
    traced = statistics.median(a - b for a, b in zip(times["traced"], times["own"], strict=True))
    return {"compute_us": 1e6 * extra / (4 * count), "trace_us": 1e6 * traced / len(program.prologue)}


def messages(rank: int, world_size: int, iterations: int) -> dict[str, float] | None:
    """Measure the CPU time of an instruction that issues one message, between two ranks.

    Returns medians over all messages in traced steps. ``raw SEND`` and ``raw RECV``: the part inside gloo's call.
    """
    count = TINY_MICRO_BATCHES
    chain = Chain(tiny_job(2, count))
    stages = [Stage(0, 0, (0,)), Stage(1, 1, (1,))]
    program = laid(chain, stages, count, SCHEDULES["1F1B"]).programs()[rank]
    durations: dict[str, list[int]] = {"SEND": [], "RECV": [], "raw SEND": [], "raw RECV": []}
    group = dist.group.WORLD
    assert group is not None
    timed = SimpleNamespace(
        send=partial(timed_call, durations["raw SEND"], group.send),
        recv=partial(timed_call, durations["raw RECV"], group.recv),
    )
    interpreter = Interpreter(
        program,
        chain,
        chain.infer_shapes(range(1)),
        seed=SEED,
        transport=GlooTransport(timed),
        runtime=BusyRuntime(),
    )
    interpreter.agree()
    for _ in range(5 * iterations):
        events: list[int] = []
        interpreter.step(0, events)
        for i, one in enumerate(interpreter.instructions):
            if one.kind[:4] in durations:
                durations[one.kind[:4]].append(events[2 * i + 1] - events[2 * i])
    return None if rank else {kind: statistics.median(times) / 1000 for kind, times in durations.items()}


class BusyTimer(HostTimer):
    """A timer of the processor time of this thread."""

    def mark(self) -> None:
        self._add(time.thread_time_ns())


class BusyRuntime(CpuRuntime):
    """A CPU whose instructions are timed by the processor time that they use."""

    def timer(self) -> BusyTimer:
        return BusyTimer()


def timed_call(taken_ns: list[int], call: Callable[..., Any], *arguments: object) -> Any:
    """Make the call, and append this thread's CPU time in it."""
    start = time.thread_time_ns()
    result = call(*arguments)
    taken_ns.append(time.thread_time_ns() - start)
    return result


class Sleep(torch.autograd.Function):
    """A delay as long as a device that needs ``DELAY_S`` per row, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(DELAY_S * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(2 * DELAY_S * len(gradient))
        return gradient


class Slow(nn.Module):
    """A layer on an emulated device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Sleep.apply(self.linear(x))
        return out


def figure_8(rank: int, world_size: int, iterations: int) -> dict[str, float] | None:
    """Measure two replicas before one: the ratio of iteration times of two dispatches.

    In one the replicas split each micro-batch, in the other they take whole micro-batches in turn.
    """
    count, rows = 5, 2
    generator = torch.Generator().manual_seed(SEED)
    x, y = torch.randn(2, count * rows, 8, generator=generator)
    layers = [
        LayerSpec("first.0", partial(Slow, 8)),
        LayerSpec("first.1", partial(Slow, 8)),
        LayerSpec("second", partial(Slow, 8)),
    ]
    chain = Chain(Prepared(layers, x, y, functional.mse_loss))
    shapes = chain.infer_shapes(range(rows))
    interpreters = {}
    dispatches: tuple[Literal["rows"], Literal["round_robin"]] = ("rows", "round_robin")
    for dispatch in dispatches:
        stages = [Stage(0, 1, (0, 1), dispatch), Stage(2, 2, (2,))]
        warmup = (2, 1) if dispatch == "rows" else (4, 1)
        program = laid(chain, stages, count, partial(early_backward, warmup=warmup)).programs()[rank]
        groups = process_groups(program.groups)
        interpreters[dispatch] = Interpreter(
            program, chain, shapes, seed=SEED, transport=GlooTransport(), groups=groups
        )
        interpreters[dispatch].agree()
    times: dict[str, list[float]] = {name: [] for name in interpreters}
    for _ in range(max(5, iterations // 2)):
        for name, interpreter in interpreters.items():
            dist.barrier()
            start = time.perf_counter()
            interpreter.step(0)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    if rank:
        return None
    return {"ratio": median_ratio(times["rows"], times["round_robin"])}


def row(name: str, value: float, unit: str, target: float) -> bool:
    """Print one line of the summary."""
    verdict = "ok" if value <= target else "MISSED"
    print(f"{name:64s} {value:8.3f} {unit:6s} target <= {target:<6g} {verdict}", flush=True)
    return value <= target


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--iterations", type=int, default=12, help="paired iterations per row")
    parser.add_argument("--only", default="", help="rows whose name contains this: 'ZBV, 2', 'overhead', 'figure 8'")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    good = []
    for schedule in SCHEDULES:
        for world_size in CUTS:
            what = f"GPT d=256, {schedule}, {world_size} ranks"
            if options.only in what:
                result = in_processes(partial(compare, schedule), world_size, options.iterations)
                good += [row(f"{what} / {name}", ratio, "ratio", TARGETS[name]) for name, ratio in result.items()]
    if options.only in "overhead":
        result = in_processes(overhead, 1, options.iterations)
        good.append(row("overhead per compute instruction", result["compute_us"], "us", 20))
        good.append(row("overhead of the trace per instruction", result["trace_us"], "us", 3))
        result = in_processes(messages, 2, options.iterations)
        for kind in ("SEND", "RECV"):
            good.append(
                row(
                    f"CPU of {kind} per message, of which gloo's call {result[f'raw {kind}']:.1f}",
                    result[kind],
                    "us",
                    10,
                )
            )
    if options.only in "figure 8":
        result = in_processes(figure_8, 3, options.iterations)
        good.append(row("DAPPLE figure 8, 2 replicas before 1: rows / round robin", result["ratio"], "ratio", 0.999))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
