"""Memory per GPU: against measurements, against what the shipped layers keep, and by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, chain

import pytest
import torch
from torch import nn

from penstock.examples import catalogue
from penstock.examples.models import MODELS
from penstock.examples.shapes import SHAPES
from penstock.schemas.transformers.shape import Experts, LatentAttention, TransformerShape
from penstock.shapes import parameters
from penstock.shapes.activations import per_token
from penstock.shapes.gpu_memory import in_flight, memory_of_stages
from penstock.shapes.layout import FULL, SHARDINGS, Layout

GIB = 2**30
LLAMA_70B = SHAPES["llama-3-70b"].model_copy(update={"layers": 12, "sequence_length": 4096})
LONG = LLAMA_70B.model_copy(update={"sequence_length": 32_768})
DEEPSEEK_V2 = TransformerShape(
    name="deepseek-v2", layers=4, hidden=5120, heads=128, kv_heads=128, head_width=192, ffn=12_288, gated=True,
    vocabulary=102_400, sequence_length=4096,
    experts=Experts(number=160, per_token=6, ffn=1536, shared_ffn=3072, dense_layers=1, capacity_factor=1.0),
    latent=LatentAttention(query_rank=1536, key_value_rank=512, plain_width=128, rotary_width=64, value_width=128),
)  # fmt: skip

# MooreThreads/SimuMax (Apache-2.0), summary of release 1.2 on B200: GiB that PyTorch's allocator had on
# the fullest of 8 B200, Megatron-Core with sequence parallelism, distributed optimizer, 4 micro-batches of a sample.
MEASURED = [
    (LLAMA_70B, Layout(pipeline=2, data=4, global_batch_size=16), 66.55, 0.02),
    (LLAMA_70B, Layout(tensor=2, data=4, global_batch_size=16), 60.68, 0.02),
    (LLAMA_70B, Layout(tensor=4, data=2, global_batch_size=8), 39.07, 0.02),
    (LLAMA_70B, Layout(tensor=8, data=1, global_batch_size=4), 28.29, 0.02),
    (LONG, Layout(tensor=2, context=4, global_batch_size=4), 68.43, 0.02),
    (LONG, Layout(context=8, global_batch_size=4), 104.51, 0.02),
    (DEEPSEEK_V2, Layout(expert=8, data=8, global_batch_size=32), 45.63, 0.02),
    (DEEPSEEK_V2, Layout(expert=4, pipeline=2, data=4, global_batch_size=16), 44.70, 0.02),
]


@pytest.mark.parametrize(("shape", "layout", "measured_gib", "error"), MEASURED)
def test_measured_memory(shape: TransformerShape, layout: Layout, measured_gib: float, error: float) -> None:
    fullest = max(stage.total for stage in memory_of_stages(shape, layout))
    assert fullest / GIB == pytest.approx(measured_gib, rel=error)


@pytest.mark.parametrize("name", sorted(SHAPES.keys() & set(catalogue.model_names())))
def test_eager_activations_are_those_of_the_shipped_layers(name: str) -> None:
    """The profiles hold what a recorder saw the modules keep; rotary tables and the padding mask are beside it."""
    shape, profile = SHAPES[name], catalogue.profile(name)
    width = 2 if MODELS[name].dtype == "fp32" else 1
    kept = per_token(shape, Layout(framework="torch"), dense=True).kept * shape.sequence_length * width
    assert float(kept) == pytest.approx(profile.measurements[0].layers[1].stash_bytes, rel=0.003)


def test_a_layer_of_megatrons_by_hand() -> None:
    """Korthikanti et al., section 4: 34 bytes per token and hidden unit without what flash attention leaves out."""
    gpt = SHAPES["gpt-3-175b"].model_copy(update={"dropout": 0.1})
    h = gpt.hidden
    extra = 4 * gpt.heads + 2 * 8  # log-sum-exp; mean and deviation of two norms
    dense = per_token(gpt, Layout(), dense=True).kept
    assert dense == 34 * h + extra
    alone = per_token(gpt, Layout(tensor=8, sequence_parallel=False), dense=True).kept
    spread = per_token(gpt, Layout(tensor=8), dense=True).kept
    assert spread * 8 == dense
    assert alone - spread == (10 * h + 2 * 8) * 7 / 8, "norms, their results and dropout masks are on every GPU"
    assert per_token(gpt, Layout(tensor=8, recompute=FULL), dense=True).kept == 2 * h / 8


@pytest.mark.parametrize("modules", [{"norm"}, {"mlp"}, {"attention"}, {"norm", "mlp"}])
def test_what_is_recomputed_is_kept_once(modules: set[str]) -> None:
    layout = Layout(pipeline=4, recompute=frozenset(modules))  # type: ignore[arg-type]
    kept, again = per_token(LLAMA_70B, layout, dense=True)
    assert kept + again == per_token(LLAMA_70B, Layout(), dense=True).kept
    tokens = LLAMA_70B.sequence_length
    first = memory_of_stages(LLAMA_70B, layout)[0]
    assert first.activations == kept * tokens * 3 * 4 + again * tokens, "3 layers of 4 micro-batches, and a layer more"


def _held_at_most(order: list[tuple[str, int]], stages: int) -> list[int]:
    """Return the micro-batches of each virtual stage when their sum is largest."""
    counts = list(accumulate(order, lambda now, step: _after(now, *step), initial=(0,) * stages))
    return list(max(counts, key=sum))


def _after(counts: tuple[int, ...], kind: str, stage: int) -> tuple[int, ...]:
    return tuple(number + (1 if kind == "F" else -1) * (each == stage) for each, number in enumerate(counts))


def _interleaved(pipeline: int, rank: int, virtual: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return Megatron's order of a rank (``schedules.py``): groups of ``pipeline`` micro-batches.

    Virtual stages take turns.
    """
    rounds = micro_batches // pipeline
    forward = [stage for _ in range(rounds) for stage in range(virtual) for _ in range(pipeline)]
    backward = [stage for _ in range(rounds) for stage in reversed(range(virtual)) for _ in range(pipeline)]
    warm = min(2 * (pipeline - rank - 1) + (virtual - 1) * pipeline, len(forward))
    steady = chain.from_iterable((("F", f), ("B", b)) for f, b in zip(forward[warm:], backward, strict=False))
    return [*(("F", stage) for stage in forward[:warm]), *steady, *(("B", b) for b in backward[len(forward) - warm :])]


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("pipeline", [2, 4, 8])
def test_micro_batches_in_flight_are_those_of_megatrons_order(pipeline: int, virtual: int) -> None:
    layout = Layout(pipeline=pipeline, virtual_stages=virtual, global_batch_size=4 * pipeline)
    for rank in range(pipeline):
        order = _interleaved(pipeline, rank, virtual, 4 * pipeline)
        assert sum(in_flight(layout, rank)) == sum(_held_at_most(order, virtual)), rank


def test_one_forward_one_backward_holds_what_lies_behind() -> None:
    assert [in_flight(Layout(pipeline=4), rank) for rank in range(4)] == [[4], [3], [2], [1]]
    assert [in_flight(Layout(pipeline=4, global_batch_size=2), rank) for rank in range(4)] == [[2], [2], [2], [1]]


def test_static_bytes_per_parameter_by_hand() -> None:
    shape = LLAMA_70B.model_copy(update={"vocabulary": 1024})
    number = parameters.total(shape)
    bytes_per_parameter = {
        (framework, sharding): sum(
            memory_of_stages(shape, Layout(data=8, sharding=sharding, framework=framework))[0][:3]
        ) / number
        for framework in ("megatron", "torch")
        for sharding in SHARDINGS
        if (framework, sharding) != ("megatron", "parameters_kept")
    }  # fmt: skip
    assert bytes_per_parameter == pytest.approx({
        ("megatron", "none"): 18, ("megatron", "optimizer"): 6 + 12 / 8, ("megatron", "gradients"): 2 + 16 / 8,
        ("megatron", "parameters"): 18 / 8, ("torch", "none"): 16, ("torch", "optimizer"): 6 + 12 / 8,
        ("torch", "gradients"): 2 + 16 / 8, ("torch", "parameters"): 16 / 8, ("torch", "parameters_kept"): 6 + 12 / 8,
    })  # fmt: skip


@pytest.mark.tier("ci")
def test_autocast_keeps_a_copy_of_each_weight_for_the_backward_pass() -> None:
    layer = nn.Linear(16, 32, bias=False)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    data = torch.ones(4, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        layer(data)
    weights = [one for one in kept if one.numel() == 16 * 32]
    assert {one.dtype for one in weights} == {torch.bfloat16}
    plain = Layout(framework="torch", sharding="none")
    assert memory_of_stages(LLAMA_70B, plain)[0].gathered == 2 * parameters.total(LLAMA_70B)
    assert memory_of_stages(LLAMA_70B, replace(plain, sharding="optimizer"))[0].gathered == 0


def test_a_tied_weight_is_held_twice_only_where_embedding_and_head_are_apart() -> None:
    tied = LLAMA_70B.model_copy(update={"tied": True})
    words = tied.vocabulary * tied.hidden
    whole, whole_tied = (memory_of_stages(shape, Layout())[0].parameters for shape in (LLAMA_70B, tied))
    assert whole - whole_tied == 2 * words
    apart, apart_tied = (
        [stage.parameters for stage in memory_of_stages(shape, Layout(pipeline=2))] for shape in (LLAMA_70B, tied)
    )
    assert apart == apart_tied


def test_experts_are_divided_by_their_own_group_and_states_by_who_shares_them() -> None:
    layout = Layout(tensor=2, data=4, expert=4)
    (stage,) = memory_of_stages(DEEPSEEK_V2, layout)
    rows = 102_400
    layers = [parameters.layer(DEEPSEEK_V2, dense=number == 0) for number in range(4)]
    ends = [parameters.embedding(DEEPSEEK_V2, rows), parameters.head(DEEPSEEK_V2, rows)]
    dense, replicated, expert = (sum(part) for part in zip(*layers, *ends, strict=True))
    others, routed = dense / 2 + replicated, expert / 4
    assert stage.parameters == pytest.approx(2 * (others + routed))
    assert stage.gradients == pytest.approx(4 * (others + routed))
    assert stage.optimizer == pytest.approx(12 * (others / 4 + routed / 2)), "8 GPUs / 4 expert groups hold the same"
