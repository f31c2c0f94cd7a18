"""The interpreter against torch's own pipeline runtimes, and what an instruction costs.

``python benchmarks/bench_interpreter.py [--iterations N]``: one line per row: name, value, unit, target, ok or MISSED.

Iterations are paired and alternate in the same processes, on the same partition, order and data; the figure is the
median of the ratios of neighbours, since absolute times drift with the load (EXECUTOR.md, section C). For DAPPLE's
Figure 8 devices are emulated by sleeping, so that three of them need no three cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import connection, get_context
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.nn import functional

from penstock.convert import to_problem
from penstock.examples import gpt
from penstock.executor.chain import Chain
from penstock.executor.interpreter import Interpreter
from penstock.executor.job import LayerSpec, SimpleJob
from penstock.executor.launch import loopback_interface
from penstock.executor.store import listen
from penstock.executor.transport import GlooTransport, connect, process_groups
from penstock.schemas.profile import BoundaryTensor, Layer, LayerMeasurement, Measurement, ModelProfile, ProfileSource
from penstock.schemas.program import Program, parse_row
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.allocation import Stage, single_pipeline
from penstock.solvers.lowering import lower
from penstock.solvers.schedule import Orders, Row
from penstock.solvers.schedules.early_backward import early_backward

SEED = 0
MICRO_BATCHES, ROWS = 8, 4
GPT = gpt.Config(blocks=8, width=256, heads=4, length=64, vocabulary=1024)
PARTS = {2: [(0, 4), (5, 9)], 4: [(0, 2), (3, 4), (5, 6), (7, 9)]}
TINY_MICRO_BATCHES = 64
DELAY_S = 0.004
WARMUP = 2


class Prepared(SimpleJob):
    """A job whose batch lies ready: what is measured is the runtime."""

    def __init__(self, layers: Sequence[LayerSpec], x: Tensor, y: Tensor, loss: Callable[..., Tensor]) -> None:
        super().__init__("benchmark", batch_size=len(x), seed=SEED)
        self._layers, self.x, self.y, self._loss = layers, x, y, loss

    def layers(self) -> Sequence[LayerSpec]:
        return self._layers

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Tensor]:
        return {"x": self.x[rows.start : rows.stop]}, self.y[rows.start : rows.stop]

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        return self._loss(outputs["x"], targets), targets.numel()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)


def gpt_job() -> Prepared:
    """GPT with d = 256 and random tokens."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, GPT.vocabulary, (MICRO_BATCHES * ROWS, GPT.length + 1), generator=generator)
    return Prepared(gpt.layers(GPT), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), token_loss)


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, summed."""
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def one_f_one_b(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """Torch's order of Schedule1F1B."""
    ahead = min(count, stages - stage)
    order = [("F", m) for m in range(ahead)]
    for m in range(count):
        order.append(("B", m))
        if m + ahead < count:
            order.append(("F", m + ahead))
    return order


def programs_of(
    chain: Chain, stages: Sequence[Stage], count: int, *, warmup: Sequence[int] | None = None, text: str = ""
) -> list[Program]:
    """Lowered programs without the optimizer's step: early backward, or one device's order as a text."""
    shapes = chain.infer_shapes(range(1))
    cost = LayerMeasurement(forward_ns=1, backward_ns=2, stash_bytes=1)
    profile = ModelProfile(
        name="benchmark",
        layers=tuple(Layer(name=name, parameter_bytes=4) for name in chain.names),
        boundaries=tuple(
            tuple(
                BoundaryTensor(
                    name=n, bytes_per_sample=t.bytes_per_sample, gradient_bytes_per_sample=t.bytes_per_sample
                )
                for n, t in cut.items()
            )
            for cut in shapes
        ),
        measurements=(Measurement(device_kind="cpu", micro_batch_size=1, layers=(cost,) * len(chain.specs)),),
        source=ProfileSource(method="analytic", expected_error=1),
    )
    cluster = UniformCluster(
        nodes=1,
        devices_per_node=1 + max(device for stage in stages for device in stage.devices),
        kind="cpu",
        memory_bytes=2**40,
        fabric=Fabric(bandwidth_bytes_per_s=10**9),
    )
    request = PlanRequest(
        profile=profile,
        topology=ClusterTopology(name="benchmark", uniform=cluster),
        global_batch_size=chain.job.batch_size,
    )
    problem, allocation = to_problem(request), single_pipeline(tuple(stages), count)
    if text:
        orders = Orders("benchmark", (Row((0,), np.asarray(parse_row(text), dtype=np.int32)),))
    else:
        orders = early_backward(problem, allocation, warmup=warmup)
    return [
        replace(program, prologue=tuple(one for one in program.prologue if one.kind != "STEP"))
        for program in lower(problem, allocation, orders)
    ]


class Sequential(nn.Module):
    """A stage for torch's runtimes."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compare(rank: int, world_size: int, iterations: int) -> dict[str, float] | None:
    """Ratios of iteration times on this partition; only rank 0 has an answer."""
    job = gpt_job()
    chain = Chain(job)
    parts = PARTS[world_size]
    stages = [Stage(first, last, (i,)) for i, (first, last) in enumerate(parts)]
    warmup = [world_size - i for i in range(world_size)]
    program = programs_of(chain, stages, MICRO_BATCHES, warmup=warmup)[rank]
    shapes = chain.infer_shapes(range(ROWS))
    interpreter = Interpreter(program, chain, shapes, seed=SEED, transport=GlooTransport())
    interpreter.agree()
    first, last = parts[rank]
    runtimes: dict[str, tuple[Callable[[], object], Sequential]] = {}
    for name in ("_PipelineScheduleRuntime", "Schedule1F1B"):
        module = Sequential([chain.build_layer(i, SEED) for i in range(first, last + 1)])
        runtimes[name] = torch_step(name, module, rank, world_size, job), module
    candidates: dict[str, Callable[[], object]] = {"own": lambda: interpreter.step(0)}
    candidates |= {name: step for name, (step, _) in runtimes.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(-WARMUP, iterations):
        for name in list(candidates) if i % 2 else list(candidates)[::-1]:
            if name != "own":
                runtimes[name][1].zero_grad()
            dist.barrier()
            start = time.perf_counter()
            candidates[name]()
            dist.barrier()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
        for _, module in runtimes.values():
            check_equal(interpreter, module, first)
    if rank:
        return None
    ratios = {name: median_ratio(times["own"], times[name]) for name in runtimes}
    return ratios | {"ms": 1e3 * statistics.median(times["own"])}


def torch_step(name: str, module: nn.Module, rank: int, world_size: int, job: Prepared) -> Callable[[], object]:
    """One iteration of a torch runtime on the same data, loss and order."""
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    loss = partial(_mean, job.y.numel())
    schedule: Any
    if name == "Schedule1F1B":
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss, scale_grads=False)
    else:
        schedule = _PipelineScheduleRuntime([stage], MICRO_BATCHES, loss, scale_grads=False)
        kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
        schedule._prepare_schedule_with_comms(
            {
                r: [_Action(r, kinds[kind], m) for kind, m in one_f_one_b(r, world_size, MICRO_BATCHES)]
                for r in range(world_size)
            }
        )
    given = (job.x,) if rank == 0 else ()
    if rank == world_size - 1:
        return lambda: schedule.step(*given, target=job.y, losses=[])
    return lambda: schedule.step(*given)


def _mean(count: int, output: Tensor, targets: Tensor) -> Tensor:
    return token_loss(output, targets) / count


def check_equal(interpreter: Interpreter, module: Any, first: int) -> None:
    """The runtimes have to train the same numbers, or their times mean nothing."""
    (stage,) = interpreter.stages.values()
    for i, layer in enumerate(module.layers, start=first):
        own = dict(stage.module.modules[i].named_parameters())
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-7)


def median_ratio(own: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def tiny_job(stages: int) -> Prepared:
    """Two tiny linear layers; one row per micro-batch."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(TINY_MICRO_BATCHES, 4, generator=generator)
    layers = [LayerSpec(f"linear{i}", partial(nn.Linear, 4, 4)) for i in range(stages)]
    return Prepared(layers, x, torch.randn(TINY_MICRO_BATCHES, 4, generator=generator), functional.mse_loss)


def overhead(rank: int, world_size: int, iterations: int) -> dict[str, float]:
    """CPU time per compute instruction above a plain loop that does the same autograd work; and what a trace adds."""
    count = TINY_MICRO_BATCHES
    job = tiny_job(2)
    chain = Chain(job)
    stages = [Stage(0, 0, (0,)), Stage(1, 1, (0,))]
    (program,) = programs_of(chain, stages, count, text=f"(0F0 1F0 1B0 0B0)*{count}")
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
    own = statistics.median(a - b for a, b in zip(times["own"], times["plain"], strict=True))
    traced = statistics.median(a - b for a, b in zip(times["traced"], times["own"], strict=True))
    return {"compute_us": 1e6 * own / (4 * count), "trace_us": 1e6 * traced / len(program.prologue)}


class Sleep(torch.autograd.Function):
    """As long as a device that needs ``DELAY_S`` per row, and twice that backward."""

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
    """Two replicas before one, rows against whole micro-batches in turn: the ratio of their iteration times."""
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
    found = {}
    dispatches: tuple[Literal["rows"], Literal["round_robin"]] = ("rows", "round_robin")
    for dispatch in dispatches:
        stages = [Stage(0, 1, (0, 1), dispatch), Stage(2, 2, (2,))]
        warmup = (2, 1) if dispatch == "rows" else (4, 1)
        program = programs_of(chain, stages, count, warmup=warmup)[rank]
        groups = process_groups(program.groups, 60.0)
        found[dispatch] = Interpreter(program, chain, shapes, seed=SEED, transport=GlooTransport(), groups=groups)
        found[dispatch].agree()
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(max(5, iterations // 2)):
        for name, interpreter in found.items():
            dist.barrier()
            start = time.perf_counter()
            interpreter.step(0)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    if rank:
        return None
    return {"ratio": median_ratio(times["rows"], times["round_robin"])}


def _child(measure: Any, rank: int, world_size: int, port: int, iterations: int, answer_to: Any) -> None:
    torch.set_num_threads(1)
    connect(f"127.0.0.1:{port}", prefix="bench", rank=rank, world_size=world_size, timeout_s=120)
    answer = measure(rank, world_size, iterations)
    dist.barrier()
    if answer is not None:
        answer_to.send(answer)
    os._exit(0)


def in_processes(measure: Any, world_size: int, iterations: int) -> dict[str, float]:
    """Run a measurement on so many ranks; what rank 0 answers."""
    server = listen("127.0.0.1")
    port = server.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    children = [
        context.Process(target=_child, args=(measure, rank, world_size, port, iterations, sender), daemon=True)
        for rank in range(world_size)
    ]
    for child in children:
        child.start()
    ready = connection.wait([receiver, *(child.sentinel for child in children)])
    if receiver not in ready and not receiver.poll(5):
        raise SystemExit("a rank of the benchmark ended without an answer")
    answer: dict[str, float] = receiver.recv()
    for child in children:
        child.join()
    del store
    return answer


def row(name: str, value: float, unit: str, target: float) -> bool:
    """Print one line of the summary."""
    verdict = "ok" if value <= target else "MISSED"
    print(f"{name:58s} {value:8.3f} {unit:6s} target <= {target:<6g} {verdict}", flush=True)
    return value <= target


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--iterations", type=int, default=12, help="paired iterations per row")
    iterations = parser.parse_args(arguments).iterations
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    good = []
    for world_size in (2, 4):
        found = in_processes(compare, world_size, iterations)
        for name, target in (("_PipelineScheduleRuntime", 1.00), ("Schedule1F1B", 1.05)):
            good.append(row(f"interpreter, GPT d=256, {world_size} ranks / {name}", found[name], "ratio", target))
    found = in_processes(overhead, 1, iterations)
    good.append(row("overhead per compute instruction", found["compute_us"], "us", 20))
    good.append(row("overhead of the trace per instruction", found["trace_us"], "us", 3))
    found = in_processes(figure_8, 3, iterations)
    good.append(row("DAPPLE figure 8, 2 replicas before 1: rows / round robin", found["ratio"], "ratio", 0.999))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
