"""A separate process with DeepSpeed on the path: its ``PipelineModule`` on exported modules.

The process reads ``{"cases": [{"text": …, "layers": …, "world": …}]}``. It writes for each case what every rank builds:
the numbers of its layers, how many it recomputes together, its instructions in a step by ``TrainSchedule``, and the
batch sizes that ``DeepSpeedConfig`` derives from the configuration.

These classes are real, over torch's ``fake`` processes. A kernel of collectives that would be compiled is replaced.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from torch.testing._internal.distributed import fake_pg

assert fake_pg  # its import registers the backend
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # deepspeed.comm.torch is torch itself


class Numbered(torch.nn.Module):
    """A layer that knows its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def order(steps: schedule.TrainSchedule) -> list[list[Any]]:
    """Forward and backward passes with their micro-batches, in the order of the schedule."""
    actions: list[list[Any]] = []
    done = {"F": 0, "B": 0}
    for step in steps:
        for instruction in step:
            kind = {schedule.ForwardPass: "F", schedule.BackwardPass: "B"}.get(type(instruction))
            if kind is not None:
                actions.append([kind, done[kind]])
                done[kind] += 1
    return actions


def rank_of(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Describe what one rank builds."""
    os.environ["LOCAL_RANK"] = "0"
    torch.distributed.init_process_group("fake", rank=rank, world_size=case["world"])
    deepspeed.comm.comm.cdb = None
    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    names: dict[str, Any] = {}
    exec(compile(case["text"], "exported.py", "exec"), names)
    module = names["PlannedPipelineModule"]([LayerSpec(Numbered, number) for number in range(case["layers"])])
    config = DeepSpeedConfig({**names["CONFIG"]}, mpu=module.mpu())
    summary = {
        "layers": [layer.number for layer in module.forward_funcs],
        "stage": module.stage_id,
        "together": module.activation_checkpoint_interval,
        "batch": [config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps],
        "zero": config.zero_optimization_stage,
        "order": order(
            schedule.TrainSchedule(config.gradient_accumulation_steps, module.num_stages, stage_id=module.stage_id)
        ),
        "replicas": module.mpu().get_data_parallel_world_size(),
        "peers": torch.distributed.get_process_group_ranks(module.mpu().get_data_parallel_group()),
    }
    torch.distributed.destroy_process_group()
    return summary


def main() -> None:
    question = json.load(sys.stdin)
    answers = [[rank_of(case, rank) for rank in range(case["world"])] for case in question["cases"]]
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    main()
