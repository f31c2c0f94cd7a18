"""Each rule holds where it should, breaks where it should, and names legal values that are near."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from penstock.examples.shapes import SHAPES
from penstock.schemas.transformers.shape import Experts, TransformerShape
from penstock.shapes.layout import Layout, layers_of_stages
from penstock.shapes.legality import RULES, broken

LLAMA = SHAPES["llama-3-70b"]
MIXTRAL = LLAMA.model_copy(update={"experts": Experts(number=12, per_token=2, ffn=14_336), "layers": 32})

CASES: list[tuple[str, TransformerShape, dict[str, Any], int, str]] = [
    ("product", LLAMA, {"tensor": 8, "pipeline": 4}, 48, "tensor 8 × pipeline 4 = 32 does not divide 48 GPUs"),
    ("heads", SHAPES["gpt2-xl"], {"tensor": 2}, 8, "tensor 2 does not divide 25 attention heads; nearest: tensor 1, 5"),
    ("key_value_heads", LLAMA, {"tensor": 16, "framework": "torch"}, 16,
     "tensor 16 does not divide 8 key and value heads; nearest: tensor 2, 4, 8"),
    ("feed_forward", LLAMA.model_copy(update={"ffn": 28_676}), {"tensor": 8}, 8, "feed-forward width 28676"),
    ("vocabulary", LLAMA.model_copy(update={"padded_vocabulary": 128_257}), {"tensor": 2}, 8, "128257 rows"),
    ("context", LLAMA.model_copy(update={"sequence_length": 8200}), {"context": 8}, 8,
     "2 × context 8 does not divide a sequence of 8200 tokens; nearest: context 4, 5, 10"),
    ("context_heads", LLAMA, {"tensor": 2, "context": 8, "context_kind": "all_to_all"}, 16,
     "all-to-all: tensor 2 × context 8 = 16 does not divide 8 key and value heads; nearest: context 1, 2, 4"),
    ("context_heads", LLAMA, {"tensor": 16, "context": 2, "context_kind": "all_to_all"}, 32, "16 key and value heads"),
    ("context_sinks", LLAMA.model_copy(update={"sinks": True}), {"context": 2}, 2,
     "llama-3-70b has attention sinks, which Megatron has with context 2 by all-to-all only"),
    ("sequence_parallel", LLAMA.model_copy(update={"sequence_length": 8188}), {"tensor": 8}, 8,
     "tensor 8 does not divide 8188 tokens of a GPU"),
    ("layers", LLAMA, {"pipeline": 3}, 3, "pipeline 3 divides neither 80 layers nor 82"),
    ("layers", LLAMA, {"pipeline": 128}, 128, "80 layers are fewer than 128 stages; nearest: pipeline 41, 80, 82"),
    ("layers", LLAMA, {"pipeline": 8, "virtual_stages": 3}, 8, "nearest: virtual stages 1, 2, 5"),
    ("interleaving", LLAMA, {"virtual_stages": 2}, 8, "virtual stages 2 need a pipeline of at least 2 stages"),
    ("batch", LLAMA, {"data": 6, "micro_batch_size": 2, "global_batch_size": 64}, 6, "nearest: 60 or 72"),
    ("experts", MIXTRAL, {"expert": 8, "data": 8}, 8, "expert 8 does not divide 12 experts; nearest: expert 4, 6, 12"),
    ("experts", LLAMA, {"expert": 2, "data": 8}, 8, "llama-3-70b has no experts; nearest: 1"),
    ("experts", LLAMA, {"expert_tensor": 2, "data": 8}, 8, "expert tensor 2: llama-3-70b has no experts"),
    ("expert_groups", MIXTRAL, {"expert": 12, "data": 8}, 8, "= 12 does not divide 8 GPUs; nearest: expert 1, 2, 4"),
    ("expert_width", MIXTRAL, {"expert_tensor": 5, "data": 5}, 5, "expert tensor 5 does not divide the expert width"),
    ("expert_tensor", MIXTRAL, {"expert_tensor": 2, "data": 2, "framework": "torch"}, 2, "experts are whole on a GPU"),
    ("expert_sequence_parallel", MIXTRAL, {"tensor": 2, "data": 4, "sequence_parallel": False}, 8, "leave it on"),
    ("cells", MIXTRAL, {"tensor": 4, "expert": 6, "data": 6}, 24, "neither divides the other"),
    ("sharding", LLAMA, {"sharding": "parameters", "pipeline": 2, "data": 4}, 8, "nearest: optimizer"),
    ("sharding", LLAMA, {"sharding": "parameters", "pipeline": 2, "data": 4, "framework": "torch"}, 8,
     "nearest: parameters_kept"),
    ("sharding", LLAMA, {"sharding": "gradients", "pipeline": 2, "data": 4}, 8, "reduced again for every micro-batch"),
    ("sharding", LLAMA, {"sharding": "parameters_kept", "data": 8}, 8, "FSDP2"),
]  # fmt: skip


def _layout(degrees: dict[str, Any], gpus: int) -> Layout:
    layout = Layout(**degrees)
    return layout if "data" in degrees else replace(layout, data=gpus // (layout.gpus or 1))


@pytest.mark.parametrize(("rule", "shape", "degrees", "gpus", "words"), CASES)
def test_a_broken_rule_is_the_only_one_and_says_so(
    rule: str, shape: TransformerShape, degrees: dict[str, Any], gpus: int, words: str
) -> None:
    (problem,) = broken(shape, _layout(degrees, gpus), gpus)
    assert problem.rule == rule
    assert words in re.sub(r" \(Megatron's checks at the start [^)]*\)", "", problem.sentence)


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule in RULES} == {case[0] for case in CASES}


@pytest.mark.parametrize(("rule", "shape", "degrees", "gpus", "words"), CASES)
def test_the_nearest_values_keep_the_rule(
    rule: str, shape: TransformerShape, degrees: dict[str, Any], gpus: int, words: str
) -> None:
    (problem,) = broken(shape, _layout(degrees, gpus), gpus)
    near = re.search(r"nearest: (?:[a-z ]+ )?([\d, or]+)$", problem.sentence)
    for value in map(int, re.findall(r"\d+", near[1])) if near else ():
        changed = _layout({**degrees, problem.degree: value}, gpus)
        assert rule not in {one.rule for one in broken(shape, changed, gpus)}, (value, words)


@pytest.mark.parametrize(
    ("shape", "degrees", "gpus"),
    [
        (LLAMA, {"tensor": 8, "pipeline": 4}, 64),
        (LLAMA, {"tensor": 16, "data": 4}, 64),  # Megatron copies key and value heads
        (LLAMA, {"pipeline": 41}, 41),  # embedding and head count as layers
        (SHAPES["llama-3.1-405b"], {"tensor": 8, "pipeline": 16, "virtual_stages": 8, "context": 2}, 8192),
        (LLAMA, {"pipeline": 3, "framework": "torch"}, 3),
        (MIXTRAL, {"tensor": 2, "expert": 4, "data": 4}, 8),
        (LLAMA, {"sharding": "parameters", "data": 8}, 8),
    ],
)
def test_what_trainers_run_is_legal(shape: TransformerShape, degrees: dict[str, Any], gpus: int) -> None:
    assert broken(shape, _layout(degrees, gpus), gpus) == []


def test_layers_are_split_as_the_frameworks_do() -> None:
    """With embedding and head 126 layers are 128, which 128 stages share evenly: the ends hold no layer."""
    llama = SHAPES["llama-3.1-405b"]
    split = layers_of_stages(llama.layers, Layout(pipeline=16, virtual_stages=8))
    assert split == (0, *[1] * 126, 0)
    assert layers_of_stages(llama.layers, Layout(pipeline=4)) == (31, 32, 32, 31)
    assert layers_of_stages(llama.layers, Layout(pipeline=5)) is None
    assert layers_of_stages(llama.layers, Layout(pipeline=5, framework="torch")) == (26, 25, 25, 25, 25)
