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


def compare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compare one step of both: losses, the largest difference of a gradient, and the number of gradients compared."""
    program = Program.from_json(request["program"])
    job = getattr(small_jobs, request["job"])
    chain = Chain(job)
    interpreter = Interpreter(
        program,
        chain,
        chain.infer_shapes(range(program.row_classes[0][0])),
        seed=SEED,
        transport=GlooTransport(),
        groups=process_groups(program.groups),
    )
    interpreter.agree()
    inputs, (wanted, counts) = job.batch(0, range(job.batch_size))
    sums: list[float] = []
    schedule, modules = torch_schedule(request, program, chain, partial(_loss, job, wanted, counts, sums))
    arguments = (inputs["x"],) if 0 in modules else ()
    is_last = len(request["stages"]) - 1 in modules
    schedule.step(*arguments, **({"target": torch.arange(job.batch_size), "losses": []} if is_last else {}))
    ours = interpreter.step(0)
    count = sum(number for _, number in program.row_classes)  # before them PyTorch tries the shapes with anything
    differences = []
    for number, module in modules.items():
        for i, layer in enumerate(module.layers, start=module.first):
            mine = dict(interpreter.stages[number].module.modules[i].named_parameters())
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
    request: Mapping[str, Any], program: Program, chain: Chain, loss: Any
) -> tuple[Any, dict[int, Layers]]:
    """Build PyTorch's runtime for the CSV, and the modules of this rank's stages."""
    stages, modules = [], {}
    for entry in program.stages:
        first, last = request["stages"][entry.stage]
        modules[entry.stage] = Layers(chain, first, last)
        stages.append(PipelineStage(modules[entry.stage], entry.stage, len(request["stages"]), torch.device("cpu")))
    count = sum(number for _, number in program.row_classes)
    schedule = _PipelineScheduleRuntime(stages, count, loss, scale_grads=False)
    schedule._load_csv(request["csv"])
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
        request = json.loads(line)
        connect(request["store"], prefix=request["prefix"], rank=request["rank"], world_size=request["world_size"])
        out.write(json.dumps(compare(request)) + "\n")
        out.flush()
        dist.barrier()
        dist.destroy_process_group()
