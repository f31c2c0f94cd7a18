"""GPUs that share sequences: what they send by hand, what all of them do together, and what torch's own code sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_context
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

from penstock.examples.shapes import SHAPES
from penstock.facts.device_table import device_facts
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.profile import DividedCost
from penstock.schemas.transformers.degrees import Collective, ContextKind, Framework
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes.activations import context_buffers, per_token
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of
from penstock.shapes.flops import flops_per_sample
from penstock.shapes.gpu_memory import memory_of_stages
from penstock.shapes.kernels import Kernels
from penstock.shapes.layout import Layout
from penstock.shapes.profiled_degrees import DegreeOptions, usual_context
from penstock.shapes.profiles import profile_of

H100 = device_facts("H100")
LLAMA = SHAPES["llama-3-8b"].model_copy(update={"sequence_length": 32_768})
SHORT = LLAMA.model_copy(update={"sequence_length": 1024})
KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)


def _block(shape: TransformerShape = LLAMA, **layout: Any) -> DividedCost:
    return costs_of(Case(shape, Layout(**layout), H100))["dense"]


def _over_context(cost: DividedCost) -> list[Collective]:
    return [each for each in cost.collectives if each.over == "context"]


def _moved(cost: DividedCost) -> dict[tuple[str, str], int]:
    sizes: Counter[tuple[str, str]] = Counter()
    for each in _over_context(cost):
        sizes[each.phase, each.operation] += each.bytes_per_sample
    return dict(sizes)


# ---- by hand: s tokens, a heads of width e, k of keys, c GPUs of t each ----------------------------------------------


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("c", [2, 4, 8])
def test_bytes_by_hand(c: int, t: int) -> None:
    s, a, k, e = LLAMA.sequence_length, LLAMA.heads, LLAMA.kv_heads, LLAMA.head_width
    block = 2 * k * e * 2 * (s // c) // t
    ring = _moved(_block(tensor=t, context=c, context_kind="ring"))
    assert ring == {("forward", "send"): (c - 1) * block, ("backward", "send"): 2 * (c - 1) * block}
    gathered = _moved(_block(tensor=t, context=c, context_kind="all_gather"))
    whole = 4 * k * e * s // t
    assert gathered == {
        ("forward", "all_gather"): whole, ("backward", "all_gather"): whole, ("backward", "reduce_scatter"): whole,
    }  # fmt: skip
    if t * c <= k:
        exchanged = _moved(_block(tensor=t, context=c, context_kind="all_to_all"))
        exchanged_bytes = 2 * (2 * a * e + 2 * k * e) * (s // c) // t
        assert exchanged == {("forward", "all_to_all"): exchanged_bytes, ("backward", "all_to_all"): exchanged_bytes}


def test_a_ring_of_transformer_engine_step_by_step() -> None:
    """Each step sends what the next GPU needs: keys and values until it had all, their gradients one step later."""
    c = 8
    block = 2 * LLAMA.kv_heads * LLAMA.head_width * 2 * LLAMA.sequence_length // c
    steps = [(step < c - 1) + (step > 0) for step in range(c)]
    listed = [each for each in _over_context(_block(context=c)) if each.phase == "backward"]
    sizes = Counter({each.bytes_per_sample // each.count: each.count for each in listed})
    assert sizes == Counter(step * block for step in steps)
    assert sum(each.count for each in _over_context(_block(context=c)) if each.phase == "forward") == c - 1


@pytest.mark.tier("ci")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_attention_of_other_blocks_hides_the_sends_of_a_ring_and_nothing_else(
    framework: Framework, kind: ContextKind
) -> None:
    c, heads = 4, LLAMA.heads * LLAMA.head_width
    tokens = LLAMA.sequence_length // c
    flops = 2 * tokens * LLAMA.sequence_length * heads / c
    kernels = Kernels(H100, "bf16")
    step = {
        "forward": int(kernels.attention_ns(flops, tokens * LLAMA.heads, backward=False)),
        "backward": int(kernels.attention_ns(2.5 * flops, tokens * LLAMA.heads, backward=True)),
    }
    block = _block(context=c, context_kind=kind, framework=framework)
    for phase, steps in (("forward", c - 1), ("backward", c)):
        hidden = sum(each.hidden_ns for each in _over_context(block) if each.phase == phase)
        assert hidden == (steps * step[phase] if kind == "ring" else 0)
    assert all(each.hidden_ns == 0 for each in block.collectives if each.over == "tensor")


# ---- all GPUs together are the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [1, 2, 3, 8])
def test_every_gpu_has_as_many_pairs_of_tokens_to_attend(c: int) -> None:
    """By enumeration of a causal mask: part i and part 2c - 1 - i of 2c."""
    s = 24 * c
    part = s // (2 * c)
    pairs = [
        sum(token + 1 for i in (gpu, 2 * c - 1 - gpu) for token in range(i * part, (i + 1) * part)) for gpu in range(c)
    ]
    assert len(set(pairs)) == 1
    assert c * pairs[0] == s * (s + 1) // 2


class _Counted(Kernels):
    """Times that are FLOPs, of products and attention alone."""

    def product_ns(self, rows: float, inner: float, columns: float, *, result_bytes: int | None = None) -> float:
        return 2 * rows * inner * columns

    def attention_ns(self, flops: float, rows: float, *, backward: bool, latent: bool = False) -> float:
        return flops if not backward else flops * 2 / 2.5

    def moved_ns(self, size_bytes: float) -> float:
        return 0


@pytest.mark.parametrize(("t", "c", "kind"), [(1, 1, None), (1, 4, "ring"), (2, 4, "all_to_all"), (8, 8, "all_gather")])
def test_flops_of_all_gpus_are_the_models(t: int, c: int, kind: ContextKind | None) -> None:
    shape = LLAMA.model_copy(update={"padded_vocabulary": LLAMA.vocabulary})
    case = Case(shape, Layout(tensor=t, context=c, context_kind=kind), H100)
    case.kernels = _Counted(H100, "bf16")
    costs = costs_of(case)
    one = sum(
        (cost.forward_ns + cost.backward_ns) * (shape.layers if role == "dense" else 1) for role, cost in costs.items()
    )
    assert one * t * c == pytest.approx(flops_per_sample(shape), rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_gpus_keep_is_what_one_would(kind: ContextKind) -> None:
    alone, shared = (_block(context=c, context_kind=kind) for c in (1, 4))
    assert 4 * shared.stash_bytes == alone.stash_bytes
    dense_layers = [layers_of(Case(LLAMA, Layout(context=c), H100))["dense"] for c in (1, 4)]
    assert dense_layers[0] == dense_layers[1], "weights are whole on every GPU"


def test_torch_keeps_the_keys_and_values_that_it_gathered() -> None:
    c, tokens = 4, LLAMA.sequence_length // 4
    gathered, ring = (_block(context=c, framework="torch", context_kind=kind) for kind in ("all_gather", "ring"))
    keys = 2 * 2 * LLAMA.kv_heads * LLAMA.head_width
    assert gathered.stash_bytes - ring.stash_bytes == (c - 1) * tokens * keys


def test_buffers_by_hand() -> None:
    a, k, e, c = LLAMA.heads, LLAMA.kv_heads, LLAMA.head_width, 4
    sizes = {kind: context_buffers(LLAMA, Layout(context=c, context_kind=kind)) for kind in KINDS}
    assert sizes["ring"] == 2 * c * (2 * k * e + a * e)
    assert sizes["all_gather"] == 2 * 2 * c * 2 * k * e
    assert sizes["all_to_all"] == 2 * (2 * a * e + 2 * k * e)
    assert context_buffers(LLAMA, Layout()) == 0


def test_memory_of_stages_has_the_buffers_where_no_scores_are_larger() -> None:
    layout = Layout(context=4, pipeline=4)
    stages = memory_of_stages(LLAMA, layout)
    tokens = LLAMA.sequence_length // 4
    kept = per_token(LLAMA, layout, dense=True).kept
    buffers = context_buffers(LLAMA, layout)
    assert stages[0].activations == tokens * (kept * LLAMA.layers + buffers)
    assert stages[-1].logits > tokens * buffers
    assert stages[-1].activations == tokens * kept * LLAMA.layers // 4


# ---- torch's own code with ranks that do not exist -------------------------------------------------------------------


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of ranks."""
    dist.init_process_group("fake", rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that one rank puts into torch's functional collectives, by their name."""
    sizes: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sizes[name] += tensor.numel() * tensor.element_size()
            return call(tensor, *args, **kwargs)

        return called

    for name in ("all_gather_single", "reduce_scatter_single", "permute_tensor"):
        monkeypatch.setattr(functional, name, counted(name, getattr(functional, name)))
    return sizes


def _local(ranks: int, device: str) -> list[Tensor]:
    """Return queries, keys and values of one rank."""
    length = SHORT.sequence_length // ranks
    return [
        torch.zeros(1, heads, length, SHORT.head_width, device=device, dtype=torch.bfloat16)
        for heads in (SHORT.heads, SHORT.kv_heads, SHORT.kv_heads)
    ]


@pytest.mark.tier("ci")
def test_gathering_is_as_torchs(ranks: int, sent: Counter[str]) -> None:
    _queries, keys, values = _local(ranks, "cpu")
    group = dist.distributed_c10d._get_default_group().group_name
    whole = flex_cp_allgather(keys.requires_grad_(), values.requires_grad_(), 2, group)
    assert sum(each.nbytes for each in whole) == ranks * sent["all_gather_single"]
    torch.autograd.backward(whole, [torch.zeros_like(each) for each in whole])
    assert keys.grad is not None
    predicted = _moved(_block(SHORT, context=ranks, framework="torch", context_kind="all_gather"))
    assert predicted == {
        ("forward", "all_gather"): ranks * sent["all_gather_single"],
        ("backward", "reduce_scatter"): sent["reduce_scatter_single"],
    }


@pytest.mark.tier("ci")
def test_a_ring_is_as_torchs(ranks: int, sent: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_context._cp_options, "rotate_method", torch_context._RotateMethod.ALL_TO_ALL)
    group = dist.distributed_c10d._get_default_group()
    queries, keys, values = _local(ranks, "meta")

    def attend(query: Tensor, *_args: Any, **_more: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)

    def back(query: Tensor, key: Tensor, value: Tensor, **_more: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)

    out, lse = torch_context._templated_ring_attention(group, 2, attend, queries, keys, values, is_causal=True)
    forward = sent.pop("permute_tensor")
    torch_context._templated_ring_attention_backward(
        group, 2, back, out, "grad_out", queries, keys, values, out, lse, is_causal=True
    )
    predicted = _moved(_block(SHORT, context=ranks, framework="torch", context_kind="ring"))
    assert predicted == {("forward", "send"): forward, ("backward", "send"): sent.pop("permute_tensor")}
    assert not sent


# ---- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.tier("ci")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("length", [2**power for power in range(12, 19)])
def test_profiles_of_every_length_have_variants_that_gain(framework: Framework, length: int) -> None:
    """Twice as many GPUs take less time and memory each, and more than half of it."""
    shape = LLAMA.model_copy(update={"sequence_length": length, "layers": 2})
    profile = profile_of(shape, framework, ("H100",), micro_batch_sizes=(1,))
    blocks = {
        (each.degrees.tensor, each.degrees.context): each.measurements[0].layers[1] for each in profile.variants or ()
    }
    contexts = {c for _t, c in blocks}
    assert contexts == {1, *usual_context(shape)}
    assert all(length // c >= 4096 for c in contexts)
    for (t, c), block in blocks.items():
        half = blocks.get((t, 2 * c))
        if half is not None:
            assert block.forward_ns / 2 < half.forward_ns < block.forward_ns
            assert block.backward_ns / 2 < half.backward_ns < block.backward_ns
            assert block.stash_bytes / 2 <= half.stash_bytes < block.stash_bytes
    assert any("context degrees" in each for each in profile.assumptions) == (length >= 2 * 4096)


def test_degrees_that_were_asked_for_are_there_or_refused() -> None:
    profile = profile_of(
        SHORT, "megatron", ("H100",), degrees=DegreeOptions(tensor=(2,), context=(2, 4)), micro_batch_sizes=(1,)
    )
    assert [str(each.degrees) for each in profile.variants or ()] == [
        "context 2", "context 4", "tensor 2", "tensor 2, context 2", "tensor 2, context 4",
    ]  # fmt: skip
    with pytest.raises(UnsupportedRequest, match=r"2 × context 3 does not divide a sequence of 1024 tokens"):
        profile_of(SHORT, "megatron", ("H100",), degrees=DegreeOptions(context=(3,)))
    with pytest.raises(UnsupportedRequest, match=r"all-to-all: tensor 1 × context 16 = 16 does not divide 8 key"):
        profile_of(SHORT, "megatron", ("H100",), degrees=DegreeOptions(context=(16,)), context_kind="all_to_all")
    assert (
        profile_of(SHORT, "megatron", ("H100",), degrees=DegreeOptions(context="auto")).variants
        == profile_of(SHORT, "megatron", ("H100",)).variants
    )
