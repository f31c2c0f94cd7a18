"""Ranks that share layers against a loop over DTensor and FSDP2 written by hand, and the CPU time of both.

``python benchmarks/bench_divided.py [--runs N] [--sharding S]``: one line per row: name, value, unit, target,
ok or MISSED.

Both train the same LLaMA on the same partition. Each layer is divided by `parallelize_module`. Where there are
replicas, Penstock shards as a plan's ``sharding`` says, and the loop by ``fully_shard`` with the settings that move the
same (``SETTINGS``). A run is a step of all micro-batches with its update. Runs alternate in the same processes; a row
is the median of the ratios of neighbours, of the CPU seconds of all ranks together. Losses are compared after every
run.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from runtimes import MICRO_BATCHES, ROWS, SEED, Prepared, Sequential, in_processes, token_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from penstock.convert import to_problem
from penstock.examples import llama
from penstock.executor.divided.crossing_tensors import divided_shapes
from penstock.executor.divided.division import Division
from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.run.local import loopback_interface
from penstock.executor.transport import GlooTransport, process_groups
from penstock.schemas.program import WITHIN_PASSES, Program
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.degrees.contract import contract
from penstock.solvers.degrees.replicas import on_replicas
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees, Sharding
from penstock.solvers.schedules.early_backward import one_f_one_b

LLAMA = llama.Config(blocks=8, width=256, heads=4, key_value_heads=4, inner=512, length=64, vocabulary=1024)


class Settings(NamedTuple):
    """The settings of ``fully_shard`` that do what a sharding does.

    ``reshards``: parameters are freed after each forward and backward, not after the step's last backward.
    ``sums_each``: gradients are summed in the backward of each micro-batch, not in the last one.
    """

    reshards: bool
    sums_each: bool


SETTINGS: dict[Sharding, Settings] = {
    "optimizer": Settings(reshards=False, sums_each=False),
    "gradients": Settings(reshards=False, sums_each=True),
    "parameters": Settings(reshards=True, sums_each=True),
    "parameters_kept": Settings(reshards=False, sums_each=False),
}
"""The settings by sharding.

``fully_shard`` shards parameters in each: under ``optimizer`` and ``gradients`` it, too, gathers once a step.
"""
ROWS_OF_TABLE: tuple[tuple[int, int, Sharding], ...] = (
    (2, 1, "none"),
    *((tensor, 2, sharding) for sharding in SETTINGS for tensor in (2, 1)),
)
"""The cases: ranks that share a layer, replicas, and the sharding of these."""
TARGET = 1.05
WARMUP = 2
CLOSE = 1e-4
"""The relative difference allowed between losses: fp32 sums in another order, enlarged by AdamW's first steps."""


class Trained(Prepared):
    """A LLaMA with AdamW, whose batch lies ready."""

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-4)


def job() -> Trained:
    """Build the job on random tokens."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, LLAMA.vocabulary, (MICRO_BATCHES * ROWS, LLAMA.length + 1), generator=generator)
    return Trained(llama.layers(LLAMA), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), token_loss)


def programs(tensor: int, replicas: int, sharding: Sharding) -> list[dict[str, Any]]:
    """Return every rank's program: one stage of all layers, micro-batch after micro-batch."""
    profile = analytic_profile(job(), "H100", (1, ROWS), tensor_degrees=(tensor,) if tensor > 1 else ())
    cluster = UniformCluster(
        nodes=1,
        devices_per_node=tensor * replicas,
        kind="H100",
        memory_bytes=2**40,
        fabric=Fabric(bandwidth_bytes_per_s=10**11),
    )
    topology = ClusterTopology(name="benchmark", uniform=cluster)
    degrees = Degrees(tensor=tensor)
    request = PlanRequest.model_validate(
        {
            "profile": profile,
            "topology": topology,
            "global_batch_size": MICRO_BATCHES * ROWS,
            "memory": {"precision": "full"},
            "degrees": degrees._asdict(),
            "sharding": sharding,
        }
    )
    cells = contract(to_problem(request), Choice(degrees, sharding))
    devices = 1 if sharding in WITHIN_PASSES else replicas
    allocation = single_pipeline((Stage(0, len(profile.layers) - 1, tuple(range(devices))),), MICRO_BATCHES)
    apart = on_replicas(cells, allocation, one_f_one_b(cells, allocation))
    return [program.to_json() for program in lower(*apart)]


class HandWritten:
    """The loop written without Penstock: each layer parallelised, then sharded over the replicas."""

    def __init__(self, chain: Chain, job: Trained, mesh: DeviceMesh, replica: int, sharding: Sharding) -> None:
        self._job, self._rows = job, ROWS // mesh.size(0)
        self._first = replica * self._rows
        layers = [chain.build_layer(i, SEED) for i in range(len(chain.specs))]
        for spec, layer in zip(chain.specs, layers, strict=True):
            if mesh.size(1) > 1 and callable(spec.parallel):
                parallelize_module(layer, mesh["tensor"], dict(spec.parallel()), src_data_rank=None)
        self._model: Any = Sequential(layers)  # which FSDP2 gives more methods
        self._settings = SETTINGS.get(sharding)
        if self._settings is not None:
            reshards = self._settings.reshards
            for module in (*layers, self._model):
                sharded: Any = fully_shard(module, mesh=mesh["replicas"], reshard_after_forward=reshards)
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
        self._optimizer = job.optimizer(self._model.parameters())

    def step(self) -> float:
        """Train one global batch; return the mean loss of this rank's part, times its share."""
        job, model = self._job, self._model
        self._optimizer.zero_grad()
        total = torch.zeros(())
        for number in range(MICRO_BATCHES):
            if self._settings is not None:
                is_last = number == MICRO_BATCHES - 1
                model.set_requires_gradient_sync(is_last or self._settings.sums_each)
                model.set_reshard_after_backward(is_last or self._settings.reshards)
                model.set_is_last_backward(is_last)
            first = number * ROWS + self._first
            inputs, targets = job.batch(0, range(first, first + self._rows))
            with loss_parallel():
                loss = job.loss({"x": model(inputs["x"])}, targets)[0] / job.y.numel()
                loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
                loss.backward()
            total += loss.detach()
        self._optimizer.step()
        return total.item()


def compare(
    documents: Sequence[dict[str, Any]],
    shape: tuple[int, int, Sharding],
    rank: int,
    world_size: int,
    runs: int,
) -> dict[str, float]:
    """Return the ratio of CPU seconds, and each side's seconds of a run; all ranks return the same."""
    trained = job()
    chain, program = Chain(trained), Program.from_json(documents[rank])
    groups = process_groups(program.groups)
    division = None if program.mesh is None else Division(program.mesh, groups)
    shapes: Sequence[dict[str, TensorShape]] = chain.infer_shapes(range(1))
    interpreter = Interpreter(
        program,
        chain,
        shapes if division is None else divided_shapes(chain, shapes, division),
        seed=SEED,
        transport=GlooTransport(),
        groups=groups,
        division=division,
    )
    interpreter.agree()
    tensor, replicas, sharding = shape
    ranks = torch.arange(world_size).view(replicas, tensor)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicas", "tensor"))
    hand = HandWritten(chain, trained, mesh, rank // tensor, sharding)
    sides: dict[str, Callable[[], float]] = {"own": lambda: interpreter.step(0).loss, "hand": hand.step}
    cpu_s: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.freeze()
    for run in range(-WARMUP, runs):
        losses = {}
        for name in list(sides) if run % 2 else list(sides)[::-1]:
            dist.barrier()
            start = time.process_time()
            losses[name] = sides[name]()
            dist.barrier()
            spent = torch.tensor([time.process_time() - start], dtype=torch.float64)
            dist.all_reduce(spent)
            if run >= 0:
                cpu_s[name].append(spent.item())
        theirs = torch.tensor([losses["hand"] / tensor])  # each rank of a tensor group has it whole
        dist.all_reduce(theirs)
        if not math.isclose(theirs.item(), losses["own"], rel_tol=CLOSE):
            raise SystemExit(f"run {run}: the loss is {losses['own']}, and {theirs.item()} by hand")
    ratio = statistics.median(a / b for a, b in zip(cpu_s["own"], cpu_s["hand"], strict=True))
    return {"ratio": ratio} | {name: statistics.median(seconds) for name, seconds in cpu_s.items()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=9, help="alternated runs per row")
    parser.add_argument("--sharding", choices=("none", *SETTINGS), help="only rows of this sharding")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # from the loop written by hand, and from torch about itself
    good = True
    for tensor, replicas, sharding in ROWS_OF_TABLE:
        if options.sharding not in (None, sharding):
            continue
        shape = (tensor, replicas, sharding)
        result = in_processes(partial(compare, programs(*shape), shape), tensor * replicas, options.runs)
        good &= result["ratio"] <= TARGET
        name = f"LLaMA d=256, tensor {tensor} x {replicas} replicas, {sharding} / DTensor, FSDP2 by hand"
        seconds = f"{result['own']:.2f} / {result['hand']:.2f} s"
        verdict = "ok" if result["ratio"] <= TARGET else "MISSED"
        print(f"{name:76s} {result['ratio']:8.3f} ratio  target <= {TARGET:<6g} {verdict} ({seconds})", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
