"""Sentences on a plan for GPUs of two kinds: who waits for whom, where the peak goes, what would help."""

from __future__ import annotations

import pytest

import penstock
from penstock.questions.answer import Answer
from penstock.schemas.api.explanation import Explanation


@pytest.fixture(scope="module")
def answer() -> Answer:
    """A plan that uses all 16 GPUs, 8 A100s and 8 V100s, in one stage with shared parameters."""
    degrees, sharding = {"tensor": 4}, "parameters"
    return penstock.plan(
        "llama-3-8b", "a100-v100-mixed", global_batch_size=64, degrees=degrees, sharding=sharding, planner="even"
    )


@pytest.fixture(scope="module")
def explanation(answer: Answer) -> Explanation:
    return penstock.explain(answer, what_if=["default"])


def test_a_quicker_kind_waits_and_is_not_the_busiest(explanation: Explanation) -> None:
    assert any(sentence.startswith("The busiest device is v0/0 (stage 0") for sentence in explanation.sentences)
    quick, slow = explanation.idle
    assert (quick.devices[0], slow.devices[0], quick.num_gpus, slow.num_gpus) == ("a0/0", "v0/0", 8, 8)
    assert slow.slower_ns == 0
    assert quick.slower_ns > 0.5 * quick.whole_ns
    assert quick.busy_ns + quick.slower_ns == slow.busy_ns
    share = f"{100 * quick.slower_ns / quick.whole_ns:.1f} % of the time"
    waits = f"In addition, 8 devices of kind A100 wait for slower devices of the same stage {share}."
    assert waits in explanation.sentences


def test_leaving_the_slow_kind_out_is_what_helps_most(explanation: Explanation) -> None:
    tried = {row.name: row for row in explanation.what_ifs}
    assert {"devices=-A100", "devices=-V100"} <= tried.keys()
    assert explanation.helps.startswith("the cluster without its 8 devices of kind V100 (re-planned): ")


def test_the_plan_says_where_the_peak_goes_and_how_bf16_is_computed(answer: Answer) -> None:
    assert (
        "MFU is 4.2 %, and 84 % of the rest is waiting for slower devices of the same stage" in answer.result.sentence
    )
    computed = "V100 has no bf16: computed as fp32, 15.7 TFLOP/s, though its fp16 has 125"
    assert computed in answer.plan.assumptions
    assert all("A100 has no bf16" not in each for each in answer.plan.assumptions)
