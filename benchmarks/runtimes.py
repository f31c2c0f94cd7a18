"""The same data, layers and order for Penstock's interpreter and for PyTorch's runtimes; processes to run them in."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import connection, get_context
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional

from penstock.convert import to_problem
from penstock.convert.torch_csv import to_csv
from penstock.examples import gpt
from penstock.executor.node.tcp_store import listen
from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import LayerSpec, SimpleJob
from penstock.executor.transport import connect
from penstock.schemas.profile import BoundaryTensor, Layer, LayerMeasurement, Measurement, ModelProfile, ProfileSource
from penstock.schemas.program import Program
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders

SEED = 0
MICRO_BATCHES, ROWS = 8, 4
GPT = gpt.Config(blocks=8, width=256, heads=4, length=64, vocabulary=1024)


class Prepared(SimpleJob):
    """A job whose batch is generated in advance, so that only the runtime is measured."""

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
    """Return GPT with d = 256 and random tokens."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, GPT.vocabulary, (MICRO_BATCHES * ROWS, GPT.length + 1), generator=generator)
    return Prepared(gpt.layers(GPT), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), token_loss)


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy, summed."""
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def tiny_job(stages: int, micro_batches: int) -> Prepared:
    """Return tiny linear layers; one row per micro-batch."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(micro_batches, 4, generator=generator)
    layers = [LayerSpec(f"linear{i}", partial(nn.Linear, 4, 4)) for i in range(stages)]
    return Prepared(layers, x, torch.randn(micro_batches, 4, generator=generator), functional.mse_loss)


class Laid(NamedTuple):
    """The stages on devices, and their order."""

    problem: Problem
    allocation: Allocation
    orders: Orders

    def programs(self, transport: Literal["gloo", "nccl"] = "gloo") -> list[Program]:
        """Return programs without the optimizer's step, which the runtimes of PyTorch leave to their caller."""
        return [
            replace(program, prologue=tuple(one for one in program.prologue if one.kind != "STEP"))
            for program in lower(*self, transport=transport)
        ]


def laid(chain: Chain, stages: Sequence[Stage], count: int, schedule: Callable[[Problem, Allocation], Orders]) -> Laid:
    """Return a job's layers as stages under a schedule, on equal devices."""
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
            for cut in chain.infer_shapes(range(1))
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
    topology = ClusterTopology(name="benchmark", uniform=cluster)
    problem = to_problem(PlanRequest(profile=profile, topology=topology, global_batch_size=chain.job.batch_size))
    allocation = single_pipeline(tuple(stages), count)
    return Laid(problem, allocation, schedule(problem, allocation))


class Sequential(nn.Module):
    """A stage for the runtimes of PyTorch."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TorchRuntime:
    """A runtime of PyTorch for this rank's stages: ``_PipelineScheduleRuntime`` from the CSV, or ``Schedule1F1B``.

    ``group``: its process group, with the device on which it computes; None: the default group, on the CPU.
    """

    def __init__(
        self,
        name: str,
        plan: Laid,
        chain: Chain,
        rank: int,
        job: Prepared,
        group: tuple[Any, torch.device] | None = None,
    ) -> None:
        over, device = group or (None, torch.device("cpu"))
        numbered = [(number, stage) for number, stage in enumerate(plan.allocation.stages) if rank in stage.devices]
        total = len(plan.allocation.stages)
        self.modules = {
            number: Sequential([chain.build_layer(i, SEED, device) for i in range(stage.first, stage.last + 1)])
            for number, stage in numbered
        }
        stages = [PipelineStage(self.modules[number], number, total, device, group=over) for number, _ in numbered]
        loss = partial(_mean, job)
        self._schedule: Any
        if name == "Schedule1F1B":
            self._schedule = Schedule1F1B(stages[0], MICRO_BATCHES, loss, scale_grads=False)
        else:
            self._schedule = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss, scale_grads=False)
            with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                file.write(to_csv(plan.allocation, plan.orders))
                file.flush()
                self._schedule._load_csv(file.name)
        self._inputs = (job.x.to(device),) if 0 in self.modules else ()
        self._targets: dict[str, Any] = {"target": job.y.to(device), "losses": []} if total - 1 in self.modules else {}

    def zero_grad(self) -> None:
        """Free all gradients."""
        for module in self.modules.values():
            module.zero_grad()

    def step(self) -> None:
        """Run one iteration."""
        if self._targets:
            self._targets["losses"].clear()
        self._schedule.step(*self._inputs, **self._targets)

    def check_equal(self, interpreter: Interpreter) -> None:
        """Check that the runtimes train the same numbers; otherwise their times mean nothing."""
        for number, module in self.modules.items():
            stage = interpreter.stages[number]
            for i, layer in enumerate(module.layers, start=stage.entry.first):
                parameters = dict(stage.module.modules[i].named_parameters())
                for name, parameter in layer.named_parameters():
                    torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-7)


def _mean(job: Prepared, output: Tensor, targets: Tensor) -> Tensor:
    return job.loss({"x": output}, targets)[0] / job.y.numel()


def _child(measure: Any, rank: int, world_size: int, port: int, iterations: int, answer_to: Any) -> None:
    torch.set_num_threads(1)
    connect(f"127.0.0.1:{port}", prefix="bench", rank=rank, world_size=world_size)
    answer = measure(rank, world_size, iterations)
    dist.barrier()
    if answer is not None:
        answer_to.send(answer)
    os._exit(0)


def in_processes(measure: Any, world_size: int, iterations: int) -> dict[str, float]:
    """Run a measurement on the given number of ranks; return what rank 0 answers."""
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
