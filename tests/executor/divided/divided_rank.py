"""One of the ranks that really share the layers of some jobs, over gloo: run as ``RANK WORLD STORE JOB [JOB ...]``.

A job followed by ``/context`` has its sequences shared instead of its layers.

It computes with 64 bits: there rounding, which is another in each order of a sum, is far below any fault.

Prints a line of JSON for each job: the greatest relative difference of loss and gradients from the whole model's, and
of each pass the collectives that ran, with the bytes of what a rank gives and gets where numbers have 32 bits.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.executor.divided.context import Context
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import load_job

ROWS = range(2)


class Ran(TorchDispatchMode):
    """Notes every collective: its name, and the bytes of its input and its result on this rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(each is DTensor for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")
        if name[0] == "_c10d_functional" and not name[1].startswith(("wait", "_wrap")):
            self.seen.append((name[1], _bytes(args[0]), _bytes(result)))
        return result


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes // 2 if tensor.dtype == torch.float64 else tensor.nbytes


def main(rank: int, world: int, store: str, references: list[str]) -> None:
    """Compare one step of each divided model with one of the whole."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for entry in references:
        reference, _, shared = entry.partition("/")
        context = Context(mesh.get_group()) if shared == "context" else None
        chain = Chain(load_job(reference))
        whole, divided = ([chain.build_layer(i) for i in range(len(chain.specs))] for _ in ("whole", "divided"))
        for spec, module in zip(chain.specs, divided, strict=True):
            assert callable(spec.parallel)
            if context is None:
                parallelize_module(module, mesh, dict(spec.parallel()))
            else:
                context.enclose(module)
        expected = _loss(chain, whole)
        expected.backward()
        with loss_parallel() if context is None else nullcontext():
            with Ran() as there:
                total = _loss(chain, divided, context)
            with Ran() as back:
                total.backward()
        if context is not None:
            total = total.detach()
            dist.all_reduce(total)
        apart = [_apart(total.full_tensor() if isinstance(total, DTensor) else total, expected, float(abs(expected)))]
        gradients = [parameter.grad for module in whole for parameter in module.parameters()]
        greatest = max(float(each.abs().max()) for each in gradients if each is not None)
        for one, other in zip(divided, whole, strict=True):
            for part, parameter in zip(one.parameters(), other.parameters(), strict=True):
                assert part.grad is not None
                assert parameter.grad is not None
                apart.append(_apart(_summed(part.grad), parameter.grad, greatest))
        sys.stdout.write(json.dumps({"apart": max(apart), "forward": there.seen, "backward": back.seen}) + "\n")
    dist.destroy_process_group()


def _loss(chain: Chain, modules: list[nn.Module], context: Context | None = None) -> Tensor:
    env, targets = chain.job.batch(0, ROWS)
    if context is not None:
        env, targets = context.cut(chain.job, env, targets)
    for i, (spec, module) in enumerate(zip(chain.specs, modules, strict=True)):
        env.update(zip(spec.writes, chain.call(i, module, [env[name] for name in spec.reads]), strict=True))
    total, _ = chain.job.loss({name: env[name] for name in chain.outputs}, targets)
    return total


def _summed(gradient: Tensor) -> Tensor:
    """Sum a gradient over ranks; parameters without a style are whole on each rank, their gradients parts of sums."""
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    dist.all_reduce(gradient)
    return gradient


def _apart(one: Tensor, other: Tensor, greatest: float) -> float:
    """Return the difference, relative to the greatest of all such numbers, since some gradients are only rounding."""
    return float((one - other).detach().abs().max()) / greatest


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    Tensor.float = Tensor.double  # type: ignore[method-assign]  # for losses, which ask for 32 bits
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
