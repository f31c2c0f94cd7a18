"""Assumptions of computed profiles on kernels that are smaller than any measured kernel."""

from __future__ import annotations

import pytest

from penstock.examples.shapes import SHAPES
from penstock.facts.device_table import ANALYTIC_EXPECTED_ERROR, EXTRAPOLATED_EXPECTED_ERROR, device_facts
from penstock.shapes.primitives import rule_of
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of

GPT2, LLAMA = SHAPES["gpt2-small"], SHAPES["llama-3-70b"]


def test_large_layers_of_a_measured_kind_extrapolate_nothing() -> None:
    profile = profile_of(LLAMA, "megatron", ["B200"])
    assert profile.source.expected_error == ANALYTIC_EXPECTED_ERROR
    assert not [sentence for sentence in profile.assumptions if "measured" in sentence]


def test_small_products_are_named_with_the_nearest_that_were_measured() -> None:
    profile = profile_of(GPT2, "megatron", ["H100"])
    assert profile.source.expected_error == EXTRAPOLATED_EXPECTED_ERROR
    tensor = max(variant.degrees.tensor for variant in profile.variants or ())
    least = 2 * GPT2.sequence_length * GPT2.hidden * (GPT2.heads * GPT2.head_width // tensor)
    assert f"products of {least:.2g} FLOP are timed by the rule of those from 6.7e+09 on" in " ".join(
        profile.assumptions
    )
    rows = GPT2.sequence_length * GPT2.heads // tensor
    assert f"attention of {rows:,} rows" in " ".join(profile.assumptions)


def test_only_the_degrees_that_a_profile_has_count() -> None:
    assert GPT2.sequence_length * GPT2.heads < 16_384
    short = profile_of(GPT2, "megatron", ["H100"], micro_batch_sizes=[16], degrees=DegreeOptions(tensor=[]))
    assert not [sentence for sentence in short.assumptions if "timed by the rule" in sentence]


def test_a_router_is_too_quick_to_be_named() -> None:
    mixtral = SHAPES["mixtral-8x7b"]
    assert mixtral.experts is not None
    assert 2 * mixtral.sequence_length * mixtral.hidden * mixtral.experts.number < 6.7e9
    profile = profile_of(mixtral, "megatron", ["B200"], micro_batch_sizes=[1])
    assert not [sentence for sentence in profile.assumptions if "timed by the rule" in sentence]


@pytest.mark.parametrize(("kind", "like"), [("GB200", "B200"), ("GB300", "B200"), ("B300", "B200"), ("H20", "H100")])
def test_a_kind_without_measurements_says_whose_numbers_it_has(kind: str, like: str) -> None:
    profile = profile_of(LLAMA, "megatron", [kind], micro_batch_sizes=[1])
    assert profile.source.expected_error == EXTRAPOLATED_EXPECTED_ERROR
    assert f"kernels of {kind} reach as much of its peaks as those of {like} do" in " ".join(profile.assumptions)
    assert device_facts(kind).compute_efficiency == device_facts(like).compute_efficiency
    assert rule_of(device_facts(kind)) == rule_of(device_facts(like))
