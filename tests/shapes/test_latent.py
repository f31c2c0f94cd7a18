"""Latent attention: against the modules of `transformers` on the meta device, Megatron's collectives by hand, sums."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.examples.shapes import SHAPES
from penstock.executor.profiling.meta_cost import OperationRecorder
from penstock.facts.device_table import device_facts
from penstock.schemas.profile import DividedCost
from penstock.schemas.transformers.degrees import ContextKind, Framework
from penstock.schemas.transformers.shape import LatentAttention, TransformerShape
from penstock.shapes import parameters
from penstock.shapes.activations import per_token
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of, local_parameters
from penstock.shapes.flops import flops_per_sample
from penstock.shapes.gpu_memory import memory_of_stages
from penstock.shapes.kernels import Kernels
from penstock.shapes.layout import Layout
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of

H100 = device_facts("H100")
DEEPSEEK = TransformerShape(
    name="dense-deepseek", layers=4, hidden=7168, heads=128, kv_heads=128, head_width=192, ffn=18_432, gated=True,
    vocabulary=129_280, padded_vocabulary=129_280, sequence_length=1024,
    latent=LatentAttention(query_rank=1536, key_value_rank=512, plain_width=128, rotary_width=64, value_width=128),
)  # fmt: skip
assert DEEPSEEK.latent is not None
DIRECT = DEEPSEEK.model_copy(update={"latent": DEEPSEEK.latent.model_copy(update={"query_rank": None})})


def _block(shape: TransformerShape = DEEPSEEK, **layout: Any) -> DividedCost:
    return costs_of(Case(shape, Layout(**layout), H100))["dense"]


# ---- the modules of transformers -------------------------------------------------------------------------------------


class _Attend(torch.autograd.Function):
    """The tensors that a flash kernel keeps where values are narrower than keys."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return a result of shape (samples, tokens, heads, width), as the projection reads it."""
        samples, heads, tokens, _width = query.shape
        out = query.new_empty(samples, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(samples, heads, tokens, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_gradient: Tensor) -> tuple[Tensor, ...]:
        """Return gradients as wide as their tensors."""
        query, key, value, _out, _lse = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _layer(shape: TransformerShape, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Build a dense layer of DeepSeek-V3 in bf16 with torch's norms; its own keep 2 bytes less of each element."""
    modelling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    latent = shape.latent
    assert latent is not None
    config = modelling.DeepseekV3Config(
        hidden_size=shape.hidden, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        q_lora_rank=latent.query_rank, kv_lora_rank=latent.key_value_rank, qk_nope_head_dim=latent.plain_width,
        qk_rope_head_dim=latent.rotary_width, v_head_dim=latent.value_width, intermediate_size=shape.ffn,
        first_k_dense_replace=1, num_hidden_layers=1,
    )  # fmt: skip
    config._attn_implementation = "sdpa"

    def attend(_module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_more: Any) -> Any:
        return _Attend.apply(query, key, value), None  # type: ignore[no-untyped-call]

    monkeypatch.setattr(modelling.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_args: attend)
    with torch.device("meta"):
        layer = modelling.DeepseekV3DecoderLayer(config, 0)
        for name, module in [*layer.named_modules()]:
            if isinstance(module, modelling.DeepseekV3RMSNorm):
                layer.set_submodule(name, nn.RMSNorm(module.weight.shape))
        return layer.to(torch.bfloat16)


@pytest.mark.tier("ci")
@pytest.mark.parametrize("shape", [DEEPSEEK, DIRECT], ids=["ranks", "direct"])
def test_a_layer_is_that_of_transformers(shape: TransformerShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, FLOPs of products, and what is kept, of which rotary tables are apart."""
    layer = _layer(shape, monkeypatch)
    latent = shape.latent
    assert latent is not None
    assert sum(each.numel() for each in layer.parameters()) == parameters.layer(shape, dense=True).total
    tables = torch.empty(2, 1, shape.sequence_length, latent.rotary_width, device="meta", dtype=torch.bfloat16)
    data = torch.empty(1, shape.sequence_length, shape.hidden, device="meta", dtype=torch.bfloat16, requires_grad=True)
    parameter_storages = {each.untyped_storage()._cdata for each in (*layer.parameters(), tables)}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.update({} if storage._cdata in parameter_storages else {storage._cdata: storage})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), OperationRecorder() as forward:
        result = layer(data, position_embeddings=tuple(tables))
    with OperationRecorder() as backward:
        result.backward(torch.empty_like(result))
    weights = sum(rows * columns for rows, columns in parameters.matrices(shape, dense=True))
    flops = [sum(each.flops for each in recorder.operations) for recorder in (forward, backward)]
    assert flops == [2 * weights * shape.sequence_length, 4 * weights * shape.sequence_length]
    predicted = per_token(shape, Layout(framework="torch"), dense=True).kept * shape.sequence_length
    assert float(predicted) == pytest.approx(sum(each.nbytes() for each in kept.values()), rel=1e-3)


# ---- all GPUs together are the model ---------------------------------------------------------------------------------


class _Counted(Kernels):
    """Times that are FLOPs of forwards."""

    def product_ns(self, rows: float, inner: float, columns: float, *, result_bytes: int | None = None) -> float:
        return 2 * rows * inner * columns

    def attention_ns(self, flops: float, rows: float, *, backward: bool, latent: bool = False) -> float:
        return flops

    def moved_ns(self, size_bytes: float) -> float:
        return 0


@pytest.mark.parametrize("shape", [DEEPSEEK, DIRECT], ids=["ranks", "direct"])
@pytest.mark.parametrize(("t", "c"), [(1, 1), (8, 1), (2, 4)])
def test_flops_and_parameters_of_all_gpus_are_the_models(t: int, c: int, shape: TransformerShape) -> None:
    layout = Layout(tensor=t, context=c)
    case = Case(shape, layout, H100)
    case.kernels = _Counted(H100, "bf16")
    costs = costs_of(case)
    forward = sum(cost.forward_ns * (shape.layers if role == "dense" else 1) for role, cost in costs.items())
    assert 3 * forward * t * c == pytest.approx(flops_per_sample(shape), rel=1e-9)
    whole = parameters.layer(shape, dense=True)
    assert t * local_parameters(shape, layout)["dense"].total == whole.total + (t - 1) * whole.replicated


def test_torch_multiplies_all_tokens_with_the_narrow_weights_on_every_gpu() -> None:
    def forward(framework: Framework) -> int:
        case = Case(DEEPSEEK, Layout(tensor=8, framework=framework), H100)
        case.kernels = _Counted(H100, "bf16")
        return costs_of(case)["dense"].forward_ns

    narrow = DEEPSEEK.hidden * (1536 + 512 + 64)
    assert forward("torch") - forward("megatron") == 2 * DEEPSEEK.sequence_length * narrow * 7 // 8


def test_narrow_weights_are_whole_on_every_gpu() -> None:
    narrow = DEEPSEEK.hidden * (1536 + 512 + 64)
    norms = 2 * DEEPSEEK.hidden + 1536 + 512
    assert parameters.layer(DEEPSEEK, dense=True).replicated == narrow + norms
    assert ("step", "all_reduce", 4 * (narrow + norms), 1) in _listed(_block(tensor=8))


# ---- Megatron's collectives and modules by hand ----------------------------------------------------------------------


def _listed(cost: DividedCost) -> list[tuple[str, str, int, int]]:
    return [(each.phase, each.operation, each.bytes_per_sample, each.count) for each in cost.collectives]


def test_megatron_gathers_what_is_narrow() -> None:
    s = 2 * DEEPSEEK.sequence_length
    sizes: Counter[tuple[str, str]] = Counter()
    for phase, operation, size, _count in _listed(_block(tensor=8)):
        sizes[phase, operation] += size
    hidden, narrow, rotary = DEEPSEEK.hidden, 1536 + 512, 64
    assert sizes["forward", "all_gather"] == s * (narrow + rotary + hidden)
    assert sizes["forward", "reduce_scatter"] == s * 2 * hidden
    assert sizes["backward", "all_gather"] == s * (2 * hidden + narrow + hidden), "results, and inputs for the weights"
    assert sizes["backward", "reduce_scatter"] == s * (narrow + rotary + hidden)
    direct = [each for each in _listed(_block(DIRECT, tensor=8)) if each[:2] == ("forward", "all_gather")]
    assert sum(size for *_names, size, _count in direct) == s * (hidden + 512 + 64 + hidden)


def test_in_torch_collectives_are_those_of_other_attention() -> None:
    usual = DEEPSEEK.model_copy(update={"latent": None})
    one, other = ([each for each in _listed(_block(shape, tensor=8, framework="torch")) if each[0] != "step"]
                  for shape in (DEEPSEEK, usual))  # fmt: skip
    assert one == other


@pytest.mark.parametrize("t", [1, 8])
def test_recomputed_projections_are_a_part_of_attention(t: int) -> None:
    modules = {each.module: each for each in _block(tensor=t).modules or ()}
    assert list(modules) == ["attention", "mlp", "norm", "mla_up_proj"]
    up = modules["mla_up_proj"]
    heads = 2 * (128 + 64) + 128
    assert up.freed_bytes == 2 * DEEPSEEK.heads * heads * DEEPSEEK.sequence_length // t
    assert up.freed_bytes < modules["attention"].freed_bytes
    assert 0 < up.forward_ns < modules["attention"].forward_ns
    gathered = [(each.operation, each.bytes_per_sample) for each in up.collectives]
    assert sorted(gathered) == (
        [] if t == 1 else sorted(("all_gather", 2 * DEEPSEEK.sequence_length * rank) for rank in (1536, 512))
    )
    layout = Layout(tensor=t, recompute=frozenset(("mla_up_proj",)))
    kept, again = per_token(DEEPSEEK, layout, dense=True)
    assert again * DEEPSEEK.sequence_length == up.freed_bytes
    both = Layout(tensor=t, recompute=frozenset(("attention", "mla_up_proj")))
    assert per_token(DEEPSEEK, both, dense=True).again * DEEPSEEK.sequence_length == modules["attention"].freed_bytes
    stages = memory_of_stages(DEEPSEEK, layout)
    assert stages[0].activations == DEEPSEEK.sequence_length * (kept * DEEPSEEK.layers + again)


@pytest.mark.parametrize(("kind", "freed"), [("ring", 192), ("all_gather", 192 + 192 + 128), ("all_to_all", None)])
def test_recomputed_projections_free_what_no_other_gpu_sent(kind: ContextKind, freed: int | None) -> None:
    """Transformer Engine keeps the keys and values that came last, those it gathers again, or all that it exchanged."""
    modules = {each.module: each.freed_bytes for each in _block(context=4, context_kind=kind).modules or ()}
    expected = None if freed is None else 2 * freed * DEEPSEEK.heads * DEEPSEEK.sequence_length // 4
    assert modules.get("mla_up_proj") == expected


def test_a_ring_moves_every_heads_keys_and_values() -> None:
    c = 4
    sent = [each for each in _block(context=c).collectives if (each.phase, each.operation) == ("forward", "send")]
    assert [each.bytes_per_sample for each in sent] == [
        (c - 1) * 2 * DEEPSEEK.heads * (128 + 64 + 128) * DEEPSEEK.sequence_length // c
    ]


# ---- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.tier("ci")
@pytest.mark.parametrize("framework", ["megatron", "torch"])
def test_profiles_know_latent_attention(framework: Framework) -> None:
    profile = profile_of(DEEPSEEK, framework, ("H100",), micro_batch_sizes=(1,), degrees=DegreeOptions(context=(2,)))
    degrees = {(each.degrees.tensor, each.degrees.context): each for each in profile.variants or ()}
    assert degrees.keys() == {(t, c) for t in (1, 2, 4, 8) for c in (1, 2)} - {(1, 1)}
    facts = device_facts("H100", framework=framework)
    layer = layers_of(Case(DEEPSEEK, Layout(tensor=8, framework=framework), facts))["dense"]
    assert degrees[8, 1].layers[1] == layer
    one, eight = profile.measurements[0].layers[1], degrees[8, 1].measurements[0].layers[1]
    assert one.forward_ns / 8 < eight.forward_ns < one.forward_ns / 4
    assert one.stash_bytes / 8 <= eight.stash_bytes < one.stash_bytes / 3


def test_other_attention_is_not_latent() -> None:
    modules = [each.module for each in _block(SHAPES["llama-3-8b"]).modules or ()]
    assert modules == ["attention", "mlp", "norm"]
