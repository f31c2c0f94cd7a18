"""A separate process with one release of megatron-core on the path: the degrees that it refuses, and when.

The process reads ``{"cases": [row]}``, with rows as ``test_megatron_legality.py`` draws them, and writes ``{"rule":
message}`` for the refusals of each. The configuration class is real, and so are ``initialize_model_parallel`` (over
torch's ``fake`` processes), the calculator of micro-batches, the cut into layers of all ranks, the construction of
layers, the first scatter of a sequence and the first statements of the forward of a layer with experts. A row whose
configuration or groups are refused goes no further, as in training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig


class Bare(BaseMoELayer):
    """A layer with experts, with only the parts that all kinds of such layers have."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class Refusals(dict[str, str]):
    """The messages of refusals, by rule."""

    def passes(self, rule: str, check: Callable[[], object]) -> bool:
        """Return whether a check passes."""
        try:
            check()
        except (AssertionError, ValueError, RuntimeError) as error:
            self[rule] = f"{type(error).__name__}: {error}"
        return rule not in self


def configured(row: dict[str, Any]) -> TransformerConfig:
    return TransformerConfig(
        num_layers=row["layers"],
        hidden_size=row["hidden"],
        num_attention_heads=row["heads"],
        num_query_groups=row["kv_heads"],
        ffn_hidden_size=row["ffn"],
        num_moe_experts=row["experts"],
        tensor_model_parallel_size=row["tp"],
        context_parallel_size=row["cp"],
        pipeline_model_parallel_size=row["pp"],
        virtual_pipeline_model_parallel_size=row["vpp"],
        expert_model_parallel_size=row["ep"],
        expert_tensor_parallel_size=row["etp"],
        sequence_parallel=row["sp"],
        account_for_embedding_in_pipeline_split=row["ends"],
        account_for_loss_in_pipeline_split=row["ends"],
        pipeline_dtype=torch.float32,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )


def grouped(row: dict[str, Any]) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=row["tp"],
        pipeline_model_parallel_size=row["pp"],
        virtual_pipeline_model_parallel_size=row["vpp"],
        context_parallel_size=row["cp"],
        expert_model_parallel_size=row["ep"],
        expert_tensor_parallel_size=row["etp"],
        create_gloo_process_groups=False,
    )


def counted(row: dict[str, Any]) -> None:
    num_microbatches_calculator.unset_num_microbatches_calculator()
    replicas = parallel_state.get_data_parallel_world_size()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, row["gbs"], row["mbs"], replicas)


def cut(config: TransformerConfig, row: dict[str, Any]) -> None:
    chunks: list[int | None] = list(range(row["vpp"])) if row["vpp"] else [None]
    for rank in range(row["pp"]):
        for chunk in chunks:
            get_num_layers_to_build(config, chunk, rank)


def widths(config: TransformerConfig, row: dict[str, Any], expert: bool) -> None:
    """Build both products of a feed-forward."""
    group = parallel_state.get_expert_tensor_parallel_group() if expert else None
    more = {
        "config": config,
        "init_method": config.init_method,
        "bias": False,
        "skip_bias_add": False,
        "is_expert": expert,
        "tp_group": group or parallel_state.get_tensor_model_parallel_group(),
    }
    tensor_parallel.ColumnParallelLinear(row["hidden"], row["ffn"], **more)
    tensor_parallel.RowParallelLinear(row["ffn"], row["hidden"], input_is_parallel=True, **more)


def scattered(row: dict[str, Any]) -> None:
    tokens = torch.zeros(row["sequence"] // row["cp"], 1, 1)
    tensor_parallel.scatter_to_sequence_parallel_region(tokens)


def stepped(config: TransformerConfig) -> None:
    """Run the first statements of a layer with experts; later ones need a GPU, and are not reached."""
    layer = SimpleNamespace(
        training=True, config=config, attn_tp_group=parallel_state.get_tensor_model_parallel_group()
    )
    with suppress(AttributeError):  # past the check: the stand-in has no router
        MoELayer.forward(layer, torch.zeros(1))


def judged(row: dict[str, Any]) -> dict[str, str]:
    refusals = Refusals()
    torch.distributed.init_process_group("fake", rank=0, world_size=row["gpus"])
    try:
        if not (
            refusals.passes("configuration", lambda: configured(row))
            and refusals.passes("groups", lambda: grouped(row))
        ):
            return refusals
        config = configured(row)
        refusals.passes("batch", lambda: counted(row))
        refusals.passes("layers", lambda: cut(config, row))
        if row["experts"]:
            groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "tp"])
            refusals.passes("experts", lambda: Bare(config, 1, groups))
            refusals.passes("expert_width", lambda: widths(config, row, expert=True))
            refusals.passes("expert_sequence_parallel", lambda: stepped(config))
        else:
            refusals.passes("feed_forward", lambda: widths(config, row, expert=False))
        if row["sp"] and row["tp"] > 1:
            refusals.passes("sequence_parallel", lambda: scattered(row))
        return refusals
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def main() -> None:
    question = json.load(sys.stdin)
    answers = [judged(row) for row in question["cases"]]
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg  # its import registers the backend
    main()
