"""One of the ranks of a loop with torch's ``fully_shard``: run as ``RANK WORLD STORE JOB DIRECTORY ROWS``.

Each layer is a unit, as torchtitan has it. Prints a line of JSON: the collectives of one forward and backward with
their bytes, and of each parameter, by full name, the shape of this rank's rows.
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


class Ran(LocalMode):
    """Notes every collective: its kind and its bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def sends(self, sent: Sent) -> None:
        """Note one."""
        self.seen.append((sent.operation, sent.bytes))


def main(rank: int, world: int, store: str, reference: str, directory: str, rows: int) -> None:
    """Run the layers once over this rank's samples."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    chain = Chain(load_job(reference, directory))
    layers: list[Any] = [chain.build_layer(i) for i in range(len(chain.specs))]
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        layer.set_gradient_divide_factor(1.0)
    env, targets = chain.job.batch(0, range(rank * rows, (rank + 1) * rows))
    with Ran() as ran:
        for i, (spec, layer) in enumerate(zip(chain.specs, layers, strict=True)):
            env.update(zip(spec.writes, chain.call(i, layer, [env[name] for name in spec.reads]), strict=True))
        total, _ = chain.job.loss({name: env[name] for name in chain.outputs}, targets)
        total.backward()
    held = {}
    for spec, layer in zip(chain.specs, layers, strict=True):
        for name, parameter in layer.named_parameters():
            held[f"{spec.name}.{name}"] = list(parameter.to_local().shape)
    sys.stdout.write(json.dumps({"collectives": ran.seen, "held": held}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5], int(sys.argv[6]))
