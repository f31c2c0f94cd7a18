"""A separate process with one release of megatron-core on the path: its own code on exported flags.

The process reads ``{"cases": [{"words": …, "model": …, "world": …}]}``, where ``words`` are as a shell passes them. It
writes for each case what Megatron makes of every rank: layers of each of its stages, groups, number of micro-batches,
and the order in which the schedule's function calls forward and backward steps. It also writes the settings in which a
function for Megatron-Bridge's recipes differs.

The configuration classes with their checks are real, and so are ``initialize_model_parallel`` (over torch's ``fake``
processes), the cut into layers, the calculator of micro-batches and the schedule functions. The steps and the sends of
tensors are replaced by functions that record their calls.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

NAMES = {
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
}
"""Flags that are called otherwise in the configuration classes, as Megatron-LM's ``training/arguments.py`` has it."""
BATCH = ("micro_batch_size", "global_batch_size")
NOWHERE = ("grad_reduce_in_bf16",)
"""Flags of Megatron-LM alone, which then leaves ``grad_reduce_in_fp32`` off."""


def settings(words: list[str]) -> dict[str, Any]:
    """Return the values of the flags by the names of the configuration classes."""
    values_of: dict[str, Any] = {}
    at = 0
    while at < len(words):
        name = words[at].removeprefix("--").replace("-", "_")
        assert words[at].startswith("--"), words[at]
        end = next((i for i in range(at + 1, len(words)) if words[i].startswith("--")), len(words))
        values = [_value(word) for word in words[at + 1 : end]]
        name = NAMES.get(name, name)
        assert name not in values_of, f"{name} is given twice"
        values_of[name] = values if name == "recompute_modules" else values[0] if values else True
        at = end
    return values_of


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def configured(flags: dict[str, Any], model: dict[str, Any]) -> TransformerConfig:
    """Build the model's configuration; every flag is a field of one of the classes, and each class takes its fields."""
    classes = [MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig]
    classes += [DistributedDataParallelConfig, OptimizerConfig]
    classified: set[str] = {*BATCH, *NOWHERE}
    configurations = []
    for each in classes:
        accepted = {name: value for name, value in flags.items() if name in {field.name for field in fields(each)}}
        classified |= accepted.keys()
        more = model | {"pipeline_dtype": torch.bfloat16, "bf16": True} if each is classes[0] else {}
        configurations.append(each(**accepted, **more))
    assert flags.keys() <= classified, f"no class has {sorted(flags.keys() - classified)}"
    return configurations[0]


class Recorder:
    """A record of the calls of a schedule's function: [kind, chunk of the rank, micro-batch].

    Tensors are such calls too.
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self.chunks, self.calls = chunks, []

    def forward(self, _step: Any, _data: Any, model: Any, *_more: Any, **named: Any) -> tuple[Any, Any]:
        call = (next(i for i, chunk in enumerate(self.chunks) if chunk is model), named["current_microbatch"])
        self.calls.append(["F", *call])
        return [call], torch.zeros([], dtype=torch.int)

    def backward(self, _input: Any, output: Any, *_more: Any, **_named: Any) -> list[Any]:
        self.calls.append(["B", *output[0]])
        return [None]


class Silent:
    """A communicator that sends nothing and has always received."""

    def __init__(self, group: Any, config: Any) -> None:
        self.pp_group, self.config = group, config

    def __getattr__(self, name: str) -> Any:
        several = name == "send_forward_backward_recv_forward_backward"
        return lambda *_args, **_named: ([None], [None]) if several else [None]


class OnCpu:
    """torch, whose tensors are on the CPU whatever device is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **named: Any) -> torch.Tensor:
        return torch.zeros(*args, **{name: value for name, value in named.items() if name != "device"})


def order(config: TransformerConfig, ranks: int, chunks: int, number: int) -> list[list[Any]]:
    """Return the calls of this rank in a step of ``number`` micro-batches."""
    model = []
    for chunk in range(chunks):
        module = torch.nn.Module()
        module.config, module.model_type, module.vp_stage = config, ModelType.encoder_or_decoder, chunk
        model.append(module)
    recorder = Recorder(model)
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])
    groups.embd = groups.pos_embd = None
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    run = schedules.get_forward_backward_func(ranks, chunks if chunks > 1 else None)
    more = {"p2p_communicator": Silent(groups.pp, config)} if ranks > 1 else {}
    with (
        patch.object(schedules, "forward_step", recorder.forward),
        patch.object(schedules, "backward_step", recorder.backward),
        patch.object(schedules, "torch", OnCpu()),
    ):
        run(
            forward_step_func=None,
            data_iterator=[None] * chunks if chunks > 1 else None,
            model=model if chunks > 1 else model[0],
            num_microbatches=number,
            seq_length=64,
            micro_batch_size=1,
            forward_only=False,
            pg_collection=groups,
            **more,
        )
    return recorder.calls


def groups_here() -> dict[str, list[int]]:
    """Return the ranks of each of this rank's groups."""
    groups_of = {
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "dense": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "replicas": parallel_state.get_data_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_group(),
        "expert_replicas": parallel_state.get_expert_data_parallel_group(),
    }
    return {name: torch.distributed.get_process_group_ranks(group) for name, group in groups_of.items()}


def layers_here(config: TransformerConfig, ranks: int, rank: int, chunks: int) -> list[dict[str, Any]]:
    """Return for each stage of this rank its transformer layers' numbers, and whether it has embedding and head."""
    layout = config.pipeline_model_parallel_layout
    if ranks == 1:
        return [{"layers": list(range(config.num_layers)), "embedding": True, "head": True}]
    assert isinstance(layout, PipelineParallelLayerLayout)
    layout.validate_layer_layout(config.num_layers, config.mtp_num_layers)
    stages = []
    for chunk in range(chunks):
        chunk_layers = layout.layout[rank][chunk]
        ids = layout.get_layer_id_list(LayerType.decoder, vp_stage=chunk, pp_rank=rank)
        stages.append(
            {"layers": ids, "embedding": LayerType.embedding in chunk_layers, "head": LayerType.loss in chunk_layers}
        )
    return stages


def rank_of(case: dict[str, Any], flags: dict[str, Any], rank: int) -> dict[str, Any]:
    """Describe one rank."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=case["world"])
    config = configured(flags, case["model"])
    chunks = config.virtual_pipeline_model_parallel_size or 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    replicas = parallel_state.get_data_parallel_world_size()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        1, None, flags["global_batch_size"], flags["micro_batch_size"], replicas
    )
    number = num_microbatches_calculator.get_num_microbatches()
    ranks = config.pipeline_model_parallel_size
    description = {
        "stages": layers_here(config, ranks, parallel_state.get_pipeline_model_parallel_rank(), chunks),
        "groups": groups_here(),
        "micro_batches": number,
        "order": order(config, ranks, chunks, number),
        "recompute": [config.recompute_granularity, config.recompute_method, config.recompute_num_layers],
        "modules": config.recompute_modules if config.recompute_granularity == "selective" else [],
        "sequence_parallel": config.sequence_parallel,
    }
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return description


def bridged(case: dict[str, Any], flags: dict[str, Any]) -> list[str]:
    """Return the fields in which Bridge's function and the flags differ; the recipe differs in all of them."""
    of_flags = configured(flags, case["model"])
    wrong = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}
    wrong |= {"tensor_model_parallel_size": 64, "virtual_pipeline_model_parallel_size": 9, "sequence_parallel": True}
    more = {"num_layers": flags["num_layers"], "mtp_num_layers": None, "bf16": True, "params_dtype": torch.bfloat16}
    names = ("model", "train", "ddp", "optimizer", "comm_overlap")
    config = SimpleNamespace(**{name: SimpleNamespace() for name in names})
    config.model = SimpleNamespace(**case["model"] | wrong | more)
    namespace: dict[str, Any] = {}
    exec(compile(case["bridge"], "exported.py", "exec"), namespace)
    namespace["planned"](config)
    by_recipe = type(of_flags)(**vars(config.model))
    ddp = DistributedDataParallelConfig(**vars(config.ddp))
    differing = [
        f"{field.name}: {getattr(by_recipe, field.name)!r}, by flags {getattr(of_flags, field.name)!r}"
        for field in fields(by_recipe)
        if field.name in flags
        and getattr(by_recipe, field.name) != getattr(of_flags, field.name)
        and field.name != "pipeline_model_parallel_layout"
    ]
    differing += [
        f"{name}: {getattr(ddp, name)}"
        for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32")
        if getattr(ddp, name) != flags.get(name, False)
    ]
    layouts = [getattr(each.pipeline_model_parallel_layout, "layout", None) for each in (by_recipe, of_flags)]
    batch = [name for name in BATCH if getattr(config.train, name) != flags[name]]
    return differing + batch + (["the cut"] if layouts[0] != layouts[1] else [])


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """Describe every rank of a case, or return Megatron's refusal."""
    try:
        flags = settings(case["words"])
        ranks = [rank_of(case, flags, rank) for rank in range(case["world"])]
        return {"ranks": ranks, "bridge": bridged(case, flags)}
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    finally:
        if torch.distributed.is_initialized():
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def main() -> None:
    question = json.load(sys.stdin)
    answers = [judged(case) for case in question["cases"]]
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg  # its import registers the backend
    main()
