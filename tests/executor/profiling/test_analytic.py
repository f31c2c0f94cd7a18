"""Analytic profiles: exact where they say so, and a roofline for the time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.profiling.meta_cost import FusedKernels, Operation, OperationRecorder, SavedStorages
from penstock.executor.run.job import Builder, LayerSpec, SimpleJob, load_job
from penstock.facts.device_table import DEVICES, device_facts
from penstock.schemas.errors import InvalidDocument, ModelMismatch, NotFound

POSITIONS = 128


class VectorJob(SimpleJob):
    def __init__(self, layers: list[LayerSpec | tuple[str, Builder]], width: int) -> None:
        super().__init__("vectors", batch_size=8)
        self._layers = layers
        self._width = width

    def layers(self) -> list[LayerSpec | tuple[str, Builder]]:
        return self._layers

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        return {"x": torch.ones(len(rows), self._width)}, None

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        return outputs["x"].sum(), 1

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


def linears(width: int, count: int) -> VectorJob:
    return VectorJob([(f"fc{i}", partial(nn.Linear, width, width, bias=False)) for i in range(count)], width)


def test_a_linear_layer_costs_what_it_multiplies() -> None:
    width, rows = 4096, 1024
    profile = analytic_profile(linears(width, 3), "V100", (rows,))
    flops_per_s = device_facts("V100").flops_per_s("fp32")
    middle = profile.measurements[0].layers[1]
    product_ns = 2 * rows * width**2 / flops_per_s * 1e9
    assert middle.forward_ns == pytest.approx(product_ns, rel=1e-6)
    accumulated_ns = 3 * 4 * width**2 / device_facts("V100").bytes_per_s() * 1e9
    assert middle.backward_ns == pytest.approx(2 * product_ns + accumulated_ns, rel=1e-6)
    assert middle.stash_bytes == 4 * rows * width
    assert profile.layers[1].parameter_bytes == 4 * width**2
    (crossing,) = profile.boundaries[1]
    assert (crossing.name, crossing.bytes_per_sample, crossing.gradient_bytes_per_sample) == (
        "fc1:x",
        4 * width,
        4 * width,
    )


def test_small_work_is_bound_by_memory_or_by_launches() -> None:
    few = analytic_profile(linears(2048, 2), "A100", (1,)).measurements[0].layers[1]
    reads_ns = (4 * 2048**2 + 2 * 4 * 2048) / device_facts("A100").bytes_per_s() * 1e9
    assert few.forward_ns == pytest.approx(reads_ns + device_facts("A100").launch_ns, rel=0.01)
    tiny = analytic_profile(linears(4, 3), "A100", (1,)).measurements[0].layers[1]
    assert tiny.forward_ns == device_facts("A100").launch_ns


def test_half_the_width_is_half_the_bytes() -> None:
    full = analytic_profile(linears(64, 2), "H100", (4,), "fp32")
    half = analytic_profile(linears(64, 2), "H100", (4,), "bf16")
    assert half.parameter_dtype == "bf16"
    assert [layer.parameter_bytes * 2 for layer in half.layers] == [layer.parameter_bytes for layer in full.layers]
    assert half.boundaries[0][0].bytes_per_sample * 2 == full.boundaries[0][0].bytes_per_sample


def test_the_stash_is_what_autograd_really_keeps() -> None:
    """The same layers on the CPU, with the same hooks but real storages (no attention, whose kernels differ)."""
    widths = (8, 16)
    build: dict[str, Builder] = {
        "a": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16)),
        "b": lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.5)),
    }
    profile = analytic_profile(VectorJob(list(build.items()), widths[0]), "V100", (32,))
    storages, x = SavedStorages(), torch.ones(32, widths[0])
    kept_bytes = []
    for builder in build.values():
        module = builder()
        storages.leave_out(module.parameters())
        with storages.counting() as kept:
            x = module(x)
            kept_bytes.append(kept())
    assert [layer.stash_bytes for layer in profile.measurements[0].layers] == kept_bytes


def test_several_kinds_and_sizes_in_one_profile() -> None:
    profile = analytic_profile(load_job("examples.gpt:tiny"), ("V100", "H100"), (4, 1, 4))
    assert [(m.device_kind, m.micro_batch_size) for m in profile.measurements] == [
        ("V100", 1),
        ("V100", 4),
        ("H100", 1),
        ("H100", 4),
    ]
    assert profile.source.method == "analytic"
    assert 0 < profile.source.expected_error <= 0.5
    assert all(layer.update_ns > 0 for layer in profile.layers)


def test_the_profile_is_the_same_every_time() -> None:
    job = load_job("examples.resnet:tiny")
    assert analytic_profile(job, "A100", (2,)).canonical_json() == analytic_profile(job, "A100", (2,)).canonical_json()


def test_a_residual_crosses_as_a_tensor_of_its_own() -> None:
    profile = analytic_profile(load_job("examples.resnet:tiny"), "V100", (2,))
    assert [tensor.name for tensor in profile.boundaries[1]] == ["stem:x", "section1.0.branch:branch"]
    assert [tensor.name for tensor in profile.boundaries[2]] == ["section1.0.join:x"]


def test_ids_and_masks_cross_nothing_and_need_no_gradient() -> None:
    profile = analytic_profile(load_job("examples.bert:tiny"), "V100", (2,))
    assert all(len(boundary) == 1 for boundary in profile.boundaries)
    assert any("mask, segments, x" in assumption for assumption in profile.assumptions)


@pytest.mark.parametrize(("key_heads", "value_width"), [(4, 16), (2, 16), (1, 16), (4, 8)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_computes_as_many_products_however_many_heads_share_keys(
    key_heads: int, value_width: int, is_causal: bool
) -> None:
    heads, width = 4, 16
    queries, keys = (torch.empty(2, n, POSITIONS, width, device="meta", requires_grad=True) for n in (heads, key_heads))
    values = torch.empty(2, key_heads, POSITIONS, value_width, device="meta", requires_grad=True)
    recorder = OperationRecorder()
    with FusedKernels(), recorder:
        attended = nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=is_causal, enable_gqa=key_heads < heads
        )
        forward = sum(op.flops for op in recorder.operations)
        torch.autograd.grad(attended, (queries, keys, values), attended.detach())
    backward = sum(op.flops for op in recorder.operations) - forward
    square = 2 * 2 * heads * POSITIONS**2
    assert forward == square * (width + value_width)
    assert backward == square * (3 * width + 2 * value_width)


def test_attention_keeps_no_matrix_of_positions() -> None:
    heads, width = 2, 16
    query = torch.empty(1, heads, POSITIONS, width, device="meta", requires_grad=True)
    storages = SavedStorages()
    with storages.counting() as kept, FusedKernels(), OperationRecorder() as recorder:
        nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert kept() < 4 * heads * POSITIONS**2
    assert sum(op.flops for op in recorder.operations) == 2 * 2 * heads * POSITIONS**2 * width


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_costs_its_products(layers: int, bidirectional: bool) -> None:
    with torch.device("meta"):
        lstm = nn.LSTM(24, 32, num_layers=layers, bidirectional=bidirectional, batch_first=True)
        x = torch.empty(3, 10, 24)
    with FusedKernels(), OperationRecorder() as recorder:
        out, _ = lstm(x)
    assert out.shape == (3, 10, 32 * (1 + bidirectional))
    matrices = sum(weight.numel() for weight in lstm.parameters() if weight.dim() == 2)
    assert sum(op.flops for op in recorder.operations) == 2 * 3 * 10 * matrices


def test_views_cost_nothing() -> None:
    x = torch.empty(8, 8, device="meta")
    with OperationRecorder() as recorder:
        x.t().reshape(4, 16)[:2].unsqueeze(0)
    assert recorder.operations == [Operation(flops=0, bytes=2 * 4 * 64)]  # reshape of a transposed matrix copies it


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


def test_a_model_that_looks_at_its_numbers_is_named() -> None:
    with pytest.raises(ModelMismatch) as caught:
        analytic_profile(VectorJob([("looks", Looks), ("fc", partial(nn.Linear, 4, 4))], 4), "V100", (1,))
    assert "'looks'" in str(caught.value)
    assert "measure" in (caught.value.remedy or "")


class MeanJob(VectorJob):
    def loss(self, outputs: dict[str, Tensor], targets: Any) -> Any:
        return outputs["x"].mean()


FC = ("fc", partial(nn.Linear, 4, 4))
REMEDIES = [
    (VectorJob([FC, ("act", partial(nn.ReLU, inplace=True)), ("end", FC[1])], 4), "'act'", "inplace=False"),
    (
        VectorJob([FC, ("norm", partial(nn.BatchNorm1d, 4)), ("end", FC[1])], 4),
        "'norm'",
        "--micro-batch-size 2",
    ),
    (VectorJob([FC, ("wide", partial(nn.Linear, 8, 4))], 4), "'wide'", ""),
    (MeanJob([FC], 4), "loss() of job 'vectors' has to return (sum over samples, number of terms)", "reduction='sum'"),
]


@pytest.mark.parametrize(("job", "sentence", "remedy"), REMEDIES)
def test_measuring_is_advised_only_where_it_would_help(job: VectorJob, sentence: str, remedy: str) -> None:
    """Neither a layer that works in place, nor batch norm of one sample, nor wrong shapes, nor a mean as the loss."""
    with pytest.raises(ModelMismatch) as caught:
        analytic_profile(job, "V100", (1,))
    assert sentence in str(caught.value)
    advice = caught.value.remedy or ""
    assert remedy in advice
    assert bool(advice) == bool(remedy)
    assert "measure" not in advice


@pytest.mark.parametrize("sizes", [(), (0,), (-1, 2)])
def test_sizes_that_make_no_sense_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InvalidDocument):
        analytic_profile(linears(4, 1), "V100", sizes)


def test_an_unknown_kind_names_those_that_exist() -> None:
    with pytest.raises(NotFound) as caught:
        analytic_profile(linears(4, 1), "TPUv4", (1,))
    assert all(kind in str(caught.value) for kind in DEVICES)


@pytest.mark.tier("quick")
def test_no_kind_is_faster_than_its_peak() -> None:
    for facts in DEVICES.values():
        for dtype, peak in facts.peak_flops_per_s.items():
            assert 0 < facts.flops_per_s(dtype) <= peak
        assert 0 < facts.bytes_per_s() <= facts.memory_bandwidth_bytes_per_s
