"""A process that is a rank twice: it runs a program by our interpreter, and the same order by PyTorch's runtime.

Reads an assignment per line: ``{rank, world_size, store, prefix, program, csv, stages, job}``, where ``stages`` has the
first and the last layer of every stage and ``csv`` names the file of the order.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import small_jobs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.transport import GlooTransport, connect, process_groups
from penstock.schemas.program import Program

SEED = 5


class Layers(nn.Module):
    """A stage for PyTorch's runtime."""

    def __init__(self, chain: Chain, first: int, last: int) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(chain.build_layer(i, SEED) for i in range(first, last + 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compare(given: Mapping[str, Any]) -> dict[str, Any]:
    """One step of both: losses, the largest difference of a gradient, and the number of gradients compared."""
    program = Program.from_json(given["program"])
    job = getattr(small_jobs, given["job"])
    chain = Chain(job)
    own = Interpreter(
        program,
        chain,
        chain.infer_shapes(range(program.row_classes[0][0])),
        seed=SEED,
        transport=GlooTransport(),
        groups=process_groups(program.groups),
    )
    own.agree()
    inputs, (wanted, counts) = job.batch(0, range(job.batch_size))
    sums: list[float] = []
    schedule, modules = torch_schedule(given, program, chain, partial(_loss, job, wanted, counts, sums))
    arguments = (inputs["x"],) if 0 in modules else ()
    is_last = len(given["stages"]) - 1 in modules
    schedule.step(*arguments, **({"target": torch.arange(job.batch_size), "losses": []} if is_last else {}))
    ours = own.step(0)
    count = sum(number for _, number in program.row_classes)  # before them PyTorch tries the shapes with anything
    differences = []
    for number, module in modules.items():
        for i, layer in enumerate(module.layers, start=module.first):
            mine = dict(own.stages[number].module.modules[i].named_parameters())
            for name, parameter in layer.named_parameters():
                differences.append(float((mine[name].grad - parameter.grad).abs().max()))
    return {
        "kind": "done",
        "own": ours.loss,
        "torch": sum(sums[-count:]) / int(counts.sum()) if is_last else None,
        "apart": max(differences),
        "compared": len(differences),
    }


def torch_schedule(
    given: Mapping[str, Any], program: Program, chain: Chain, loss: Any
) -> tuple[Any, dict[int, Layers]]:
    """PyTorch's runtime for the CSV, and the modules of this rank's stages."""
    stages, modules = [], {}
    for held in program.stages:
        first, last = given["stages"][held.stage]
        modules[held.stage] = Layers(chain, first, last)
        stages.append(PipelineStage(modules[held.stage], held.stage, len(given["stages"]), torch.device("cpu")))
    count = sum(number for _, number in program.row_classes)
    schedule = _PipelineScheduleRuntime(stages, count, loss, scale_grads=False)
    schedule._load_csv(given["csv"])
    return schedule, modules


def _loss(job: Any, wanted: Tensor, counts: Tensor, sums: list[float], output: Tensor, rows: Tensor) -> Tensor:
    total, _ = job.loss({"x": output}, (wanted[rows], counts[rows]))
    sums.append(float(total.detach().double()))
    return total / int(counts.sum())


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for line in sys.stdin:
        given = json.loads(line)
        connect(given["store"], prefix=given["prefix"], rank=given["rank"], world_size=given["world_size"])
        out.write(json.dumps(compare(given)) + "\n")
        out.flush()
        dist.barrier()
        dist.destroy_process_group()
