"""Mixtures of experts: shares of GPUs add up to the whole, routing by brute force, and what modules keep."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.examples.shapes import SHAPES
from penstock.facts.device_table import device_facts
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.transformers.degrees import ALONE
from penstock.schemas.transformers.shape import Experts, TransformerShape
from penstock.shapes.activations import per_token
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of, local_parameters
from penstock.shapes.kernels import Kernels
from penstock.shapes.layout import FULL, Layout
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of
from penstock.shapes.routing import busiest, copies_per_token
from penstock.solvers.model.degrees import modules_of, without_parts

SMALL = TransformerShape(
    name="small", layers=3, hidden=64, heads=4, kv_heads=4, head_width=16, ffn=96, gated=True, vocabulary=128,
    sequence_length=32, experts=Experts(number=8, per_token=2, ffn=48, shared_ffn=80, dense_layers=1),
)  # fmt: skip
DIVIDED = [(1, 1, 1), (1, 4, 1), (2, 2, 1), (2, 8, 1), (2, 4, 2), (4, 2, 2)]
"""Tensor, expert and expert tensor degrees."""


class _Counting(Kernels):
    """FLOPs of products of groups."""

    flops = 0.0

    def grouped_product_ns(
        self, groups: int, rows: float, inner: float, columns: float, *, result_bytes: int | None = None
    ) -> float:
        self.flops += 2 * groups * rows * inner * columns
        return super().grouped_product_ns(groups, rows, inner, columns, result_bytes=result_bytes)


def _layout(degrees: tuple[int, int, int]) -> Layout:
    tensor, expert, expert_tensor = degrees
    return Layout(tensor=tensor, expert=expert, expert_tensor=expert_tensor)


def _with(shape: TransformerShape, **values: object) -> TransformerShape:
    assert shape.experts is not None
    return shape.model_copy(update={"experts": shape.experts.model_copy(update=values)})


@pytest.mark.parametrize("degrees", DIVIDED)
def test_gpus_have_the_experts_between_them(degrees: tuple[int, int, int]) -> None:
    layout, whole = _layout(degrees), local_parameters(SMALL, Layout())["experts"]
    assert whole.experts == 8 * 3 * 64 * 48
    per_gpu = local_parameters(SMALL, layout)["experts"]
    assert per_gpu.experts * layout.expert * layout.expert_tensor == whole.experts
    layer = layers_of(Case(SMALL, layout, device_facts("H100")))["experts"]
    assert layer.expert_bytes == 2 * per_gpu.experts


@pytest.mark.parametrize("degrees", DIVIDED)
def test_gpus_do_the_work_of_the_experts_between_them(degrees: tuple[int, int, int]) -> None:
    """The GPUs of a mesh send as many copies as an expert group gets for its samples."""
    layout = _layout(degrees)
    case = Case(SMALL, layout, device_facts("H100"))
    case.kernels = counting = _Counting(device_facts("H100"), "bf16")
    costs_of(case)
    forward_and_backward = 3 * 2 * (3 * 64 * 48)
    recomputed = 2 * (3 * 64 * 48)  # costs are asked for once more for the modules
    assert counting.flops * layout.tensor == 32 * 2 * (forward_and_backward + recomputed)


@pytest.mark.parametrize("degrees", DIVIDED)
def test_every_copy_of_every_token_is_sent_and_comes_back(degrees: tuple[int, int, int]) -> None:
    layout = _layout(degrees)
    listed = costs_of(Case(SMALL, layout, device_facts("H100")))["experts"].collectives
    tokens = [each for each in listed if each.operation == "all_to_all" and each.count == 2]
    if layout.expert == 1 and layout.expert_tensor == 1:
        assert not tokens
        return
    copies = 32 * 2 * layout.expert_tensor  # each to all GPUs of its expert
    assert [each.phase for each in tokens] == ["forward", "backward"]
    assert {each.bytes_per_sample * layout.tensor for each in tokens} == {2 * copies * 64 * 2}


def _routed(generator: torch.Generator, tokens: int, number: int, chosen: int) -> Tensor:
    """Choose the experts of each token by scores that favour some."""
    scores = torch.rand(tokens, number, generator=generator) + torch.linspace(0, 0.5, number)
    return scores.topk(chosen, dim=1).indices


@pytest.mark.tier("ci")
@pytest.mark.parametrize(("number", "chosen", "degree"), [(8, 2, 4), (6, 3, 2), (12, 4, 12), (8, 2, 1)])
def test_rows_of_the_busiest_gpu_by_brute_force(number: int, chosen: int, degree: int) -> None:
    """A routing's own imbalance gives its rows; the worst one is the bound that no statement exceeds."""
    generator, tokens = torch.Generator().manual_seed(number), 60
    sent = _routed(generator, tokens * degree, number, chosen)
    rows = max(int(((sent // (number // degree)) == gpu).sum()) for gpu in range(degree))
    mean = tokens * chosen
    stated = Experts(number=number, per_token=chosen, ffn=1, routing_imbalance=max(1.0, rows / mean))
    assert float(busiest(stated, degree)) * mean == pytest.approx(rows, rel=1e-9)
    worst = sum(min(chosen, number // degree) for _token in range(tokens * degree))
    assert busiest(stated.model_copy(update={"routing_imbalance": 1000.0}), degree) * mean == worst


@pytest.mark.tier("ci")
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 100.0])
def test_a_capacity_drops_and_pads_by_brute_force(factor: float) -> None:
    tokens, number, chosen = 48, 8, 2
    experts = Experts(number=number, per_token=chosen, ffn=1, capacity_factor=factor, routing_imbalance=3.0)
    sent = _routed(torch.Generator().manual_seed(1), tokens, number, chosen)
    capacity = min(tokens, round(factor * tokens * chosen / number))
    slots = [[token for token in range(tokens) if expert in sent[token]][:capacity] for expert in range(number)]
    padded = sum(len(kept) + (capacity - len(kept)) for kept in slots)
    assert copies_per_token(experts) * tokens == padded
    assert busiest(experts, 4) == 1, "all experts get as many"


@pytest.mark.tier("ci")
def test_eager_experts_keep_what_their_operations_save() -> None:
    """torchtitan's experts by hand, a product per expert: what autograd saves, storage by storage."""
    tokens, hidden, number, chosen, ffn = 64, 32, 4, 2, 24
    torch.manual_seed(0)
    first, third = (torch.randn(number, hidden, ffn, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    second = torch.randn(number, ffn, hidden, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.randn(number, hidden, dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    saved: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = functional.softmax(functional.linear(x.float(), gate.float()), dim=-1)
        ids = scores.topk(chosen, dim=-1).indices
        weights = scores.gather(1, ids)
        order = torch.argsort(ids.view(-1), stable=True)
        sorted_weights, origin = weights.view(-1)[order], order // chosen
        rows = x[origin]
        bounds = [0, *torch.bincount(ids.view(-1), minlength=number).cumsum(0).tolist()]
        parts = []
        for expert in range(number):
            part = rows[bounds[expert] : bounds[expert + 1]]
            inner = functional.silu(part @ first[expert]) * (part @ third[expert])
            parts.append(inner @ second[expert])
        weighed = (torch.cat(parts).float() * sorted_weights.reshape(-1, 1)).bfloat16()
        result = torch.zeros_like(x).scatter_add(0, origin.reshape(-1, 1).expand(-1, hidden), weighed)
    parameters = {each.untyped_storage().data_ptr() for each in (first, second, third, gate)}
    transposed = number * hidden * 4  # the gate's weight in fp32
    kept = sum(size for pointer, (size, _tensor) in saved.items() if pointer not in parameters) - transposed
    assert result.requires_grad

    shape = SMALL.model_copy(update={"hidden": hidden})
    shape = _with(shape, number=number, per_token=chosen, ffn=ffn, shared_ffn=0)
    layout = Layout(framework="torch")
    whole = per_token(shape, layout, dense=False).kept
    without = per_token(shape, Layout(framework="torch", recompute=frozenset({"mlp"})), dense=False).kept
    assert float((whole - without) * tokens) == pytest.approx(kept, rel=0.02)


@pytest.mark.tier("ci")
@pytest.mark.parametrize("framework", ["megatron", "torch"])
@pytest.mark.parametrize("degrees", DIVIDED[:4])
def test_modules_of_experts_are_parts_of_the_feed_forward(framework: str, degrees: tuple[int, int, int]) -> None:
    layout = Layout(framework=framework, tensor=degrees[0], expert=degrees[1])  # type: ignore[arg-type]
    case = Case(_with(SMALL, shared_gate=True), layout, device_facts("H100"))
    cost = costs_of(case)
    costs_of_module = {each.module: each for each in cost["experts"].modules or () if each.module not in ALONE}
    assert list(costs_of_module) == ["attention", "mlp", "norm", "moe_act", "shared_experts"]
    assert [each.module for each in cost["dense"].modules or ()][:3] == ["attention", "mlp", "norm"]
    parts = costs_of_module["moe_act"], costs_of_module["shared_experts"]
    assert sum(each.freed_bytes for each in parts) < costs_of_module["mlp"].freed_bytes
    assert sum(each.forward_ns for each in parts) < costs_of_module["mlp"].forward_ns
    assert not costs_of_module["moe_act"].collectives
    assert all(each.over == "tensor" for each in costs_of_module["shared_experts"].collectives)


def test_a_part_of_what_is_recomputed_frees_nothing_more() -> None:
    both = per_token(SMALL, Layout(recompute=frozenset({"mlp", "moe_act", "shared_experts"})), dense=False)
    assert both == per_token(SMALL, Layout(recompute=frozenset({"mlp"})), dense=False)
    apart = per_token(SMALL, Layout(recompute=frozenset({"moe_act", "shared_experts"})), dense=False)
    assert apart.kept > both.kept
    assert per_token(SMALL, Layout(recompute=FULL), dense=False).kept == 2 * 64
    assert without_parts(modules_of([("moe_act", "norm", "mlp")])) == ("mlp", "norm")


def test_imbalance_is_memory_and_time_of_the_busiest_gpu() -> None:
    even, uneven = SMALL, _with(SMALL, routing_imbalance=1.5)
    facts = device_facts("H100")
    for expert in (1, 4):
        one, two = (costs_of(Case(shape, Layout(expert=expert), facts))["experts"] for shape in (even, uneven))
        assert (one == two) == (expert == 1), "one GPU gets all copies anyway"
        if expert > 1:
            routed = [
                next(each.bytes_per_sample for each in cost.collectives if each.operation == "all_to_all")
                for cost in (one, two)
            ]
            assert routed[1] == Fraction(3, 2) * routed[0]
            assert two.stash_bytes > one.stash_bytes


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-235b-a22b", "gpt-oss-120b"])
@pytest.mark.parametrize("length", [4096, 65_536])
def test_profiles_have_at_most_60_combinations(name: str, length: int) -> None:
    shape = SHAPES[name].model_copy(update={"sequence_length": length})
    variants = profile_of(shape, "megatron", ("H100",), micro_batch_sizes=(1,)).variants
    assert variants is not None
    assert 1 < len(variants) <= 60
    for variant in variants:
        degrees = variant.degrees
        mesh, group = degrees.tensor * degrees.context, degrees.expert * degrees.expert_tensor
        assert mesh % group == 0 or group % mesh == 0
    most = max(variant.degrees.expert for variant in variants)
    assert most == min(64, 8 if name.startswith("mixtral") else 128)


def test_expert_degrees_that_are_asked_for() -> None:
    profile = profile_of(
        SMALL, "megatron", ("H100",), micro_batch_sizes=(1,), degrees=DegreeOptions(tensor=(2,), expert=(4,))
    )
    assert [str(variant.degrees) for variant in profile.variants or ()] == [
        "expert 4",
        "tensor 2",
        "tensor 2, expert 4",
    ]
    assert profile.layers[1].kind == "Block"
    assert profile.layers[2].kind == "ExpertBlock"
    with pytest.raises(UnsupportedRequest, match="expert 3 does not divide 8 experts; nearest: expert 1, 2, 4"):
        profile_of(SMALL, "megatron", ("H100",), degrees=DegreeOptions(expert=(3,)))
    with pytest.raises(UnsupportedRequest, match="experts are whole on a GPU"):
        profile_of(SMALL, "torch", ("H100",), degrees=DegreeOptions(expert_tensor=2))
