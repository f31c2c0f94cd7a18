"""A separate process with one release of torchtitan on the path: its splitting code on exported files.

The process reads ``{"release": "0.3", "cases": [{"text": …, "layers": …}]}``. It writes for each case the settings as
torchtitan's own configuration classes hold them, and what each pipeline rank builds: stage by stage the names of its
parameters.

``distributed/pipeline_parallel.py`` and the configuration classes are real. Imports of theirs that the split does not
call (command lines, tokenizers, kernels) are replaced, and so is ``PipelineStage``, which needs ranks that communicate.
"""

from __future__ import annotations

import json
import sys
import tomllib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

UNUSED = {
    "0.2": (
        "torchtitan.components.quantization",
        "torchtitan.distributed.dual_pipe_v",
        "torchtitan.protocols.train_spec",
    ),
    "0.3": ("spmd_types", "spmd_types.checker", "spmd_types.runtime"),
}


class Mesh:
    """A pipeline's mesh as one rank sees it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def get_group(self, _name: str) -> None:
        return None


def model(layers: int, head: str) -> Any:
    """Build torchtitan's decoder with the names of its modules."""
    from torch import nn

    module = nn.Module()
    module.tok_embeddings = nn.Embedding(4, 2)
    module.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(layers)})
    module.norm = nn.LayerNorm(2)
    setattr(module, head, nn.Linear(2, 4))
    return module


def settings(release: str, text: str) -> Any:
    """Read the file as torchtitan does, into its own classes: an unknown name or a missing import raises."""
    if release == "0.2":
        from torchtitan.config.job_config import ActivationCheckpoint, Parallelism, Training

        tables = tomllib.loads(text)
        return SimpleNamespace(
            parallelism=Parallelism(**tables["parallelism"]),
            training=Training(**tables["training"]),
            activation_checkpoint=ActivationCheckpoint(**tables["activation_checkpoint"]),
        )
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig

    config = SimpleNamespace(parallelism=ParallelismConfig(), training=TrainingConfig(), activation_checkpoint=None)
    names: dict[str, Any] = {}
    exec(compile(text, "exported.py", "exec"), names)
    return names["planned"](config)


def recomputes(config: Any) -> bool:
    checkpoint = config.activation_checkpoint
    return checkpoint is not None and (
        type(checkpoint).__qualname__.startswith("FullAC") or getattr(checkpoint, "mode", "none") == "full"
    )


def split(release: str, case: dict[str, Any]) -> dict[str, Any]:
    import torchtitan.distributed.pipeline_parallel as pipelines

    config = settings(release, case["text"])
    parallelism = config.parallelism
    pipelines.PipelineStage = lambda part, index, *_args, **_named: SimpleNamespace(index=index, part=part)
    cut = pipelines.pipeline_module_split if release == "0.2" else pipelines._pipeline_module_split
    whole = model(case["layers"], "output" if release == "0.2" else "lm_head")
    ranks = []
    for rank in range(parallelism.pipeline_parallel_degree):
        mesh = Mesh(rank, parallelism.pipeline_parallel_degree)
        stages, _parts = cut(
            whole, mesh, parallelism.pipeline_parallel_schedule, None, parallelism.module_fqns_per_model_part
        )
        ranks.append([[stage.index, [name for name, _value in stage.part.named_parameters()]] for stage in stages])
    return {
        "whole": [name for name, _value in whole.named_parameters()],
        "ranks": ranks,
        "schedule": parallelism.pipeline_parallel_schedule,
        "micro_batch": parallelism.pipeline_parallel_microbatch_size,
        "replicate": parallelism.data_parallel_replicate_degree,
        "shard": parallelism.data_parallel_shard_degree,
        "local": config.training.local_batch_size,
        "global": config.training.global_batch_size,
        "recomputes": recomputes(config),
        "groups": groups(config, case["world"]) if "world" in case else [],
    }


def groups(config: Any, world: int) -> list[dict[str, list[int]]]:
    """Return the ranks of every rank's groups, as ``ParallelDims`` builds them over torch's ``fake`` processes."""
    import torch
    from torch.testing._internal.distributed import fake_pg
    from torchtitan.distributed import parallel_dims

    assert fake_pg  # its import registers the backend
    parallel_dims.device_type = "cpu"
    parallelism, ranks = config.parallelism, []
    named = {
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "pp": parallelism.pipeline_parallel_degree,
        "ep": parallelism.expert_parallel_degree,
    }
    if "etp" in parallel_dims.ParallelDims.__dataclass_fields__:
        named["etp"] = parallelism.expert_tensor_parallel_degree
    for rank in range(world):
        torch.distributed.init_process_group("fake", rank=rank, world_size=world)
        dims = parallel_dims.ParallelDims(world_size=world, **named)
        dims.build_mesh()
        meshes = getattr(dims, "_single_axis_meshes", None) or dims._meshes
        ranks.append({name: meshes[name].mesh.tolist() for name in ("pp", "cp", "tp", "ep", "batch", "loss")})
        torch.distributed.destroy_process_group()
    return ranks


def main() -> None:
    question = json.load(sys.stdin)
    for name in ("tyro", "tokenizers", *UNUSED[question["release"]]):
        sys.modules[name] = MagicMock()
    answers = [split(question["release"], case) for case in question["cases"]]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
