"""One of the ranks of a loop with torch's ``fully_shard``: run as ``RANK WORLD STORE JOB DIRECTORY ROWS``.

Each layer is a unit, as torchtitan has it. Prints a line of JSON: for each sharding the collectives of a step of
``MICRO_BATCHES``, up to its end, with their bytes; and of each parameter, by full name, the shape of this rank's rows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock.executor.divided.tensor_group import LocalMode
from penstock.executor.profiling.tracing import Sent
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import load_job

MICRO_BATCHES = 2
RESHARDED = {"parameters": True, "parameters_kept": False, "gradients": False}
"""True where whole parameters are freed after each pass.

Gradients are summed in every backward; with ``parameters_kept`` in the last one, as in torch's pipelines."""


class Ran(LocalMode):
    """Notes every collective: its kind and its bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def sends(self, sent: Sent) -> None:
        """Note one."""
        self.seen.append((sent.operation, sent.bytes))


def main(rank: int, world: int, store: str, reference: str, directory: str, rows: int) -> None:
    """Run the layers over this rank's samples, sharded in every way."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    chain = Chain(load_job(reference, directory))
    collectives = {}
    for sharding, resharded in RESHARDED.items():
        layers: list[Any] = [chain.build_layer(i) for i in range(len(chain.specs))]
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=resharded)
            layer.set_gradient_divide_factor(1.0)
            layer.set_reshard_after_backward(resharded)
        with Ran() as ran:
            for number in range(MICRO_BATCHES):
                for layer in layers:
                    layer.set_requires_gradient_sync(sharding != "parameters_kept" or number == MICRO_BATCHES - 1)
                first = (number * world + rank) * rows
                _passes(chain, layers, range(first, first + rows))
        collectives[sharding] = ran.seen
        for layer in layers:
            layer.reshard()
    local_shapes = {}
    for spec, layer in zip(chain.specs, layers, strict=True):
        for name, parameter in layer.named_parameters():
            local_shapes[f"{spec.name}.{name}"] = list(parameter.to_local().shape)
    sys.stdout.write(json.dumps({"collectives": collectives, "local_shapes": local_shapes}) + "\n")
    dist.destroy_process_group()


def _passes(chain: Chain, layers: list[Any], samples: range) -> None:
    """Run a micro-batch, forward and backward."""
    env, targets = chain.job.batch(0, samples)
    for i, (spec, layer) in enumerate(zip(chain.specs, layers, strict=True)):
        env.update(zip(spec.writes, chain.call(i, layer, [env[name] for name in spec.reads]), strict=True))
    total, _ = chain.job.loss({name: env[name] for name in chain.outputs}, targets)
    total.backward()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5], int(sys.argv[6]))
