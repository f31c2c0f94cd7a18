"""Plans with sharded gradients and parameters in other trainers' words, and back."""

from __future__ import annotations

import pytest

from penstock.examples import catalogue
from penstock.exporting.layouts import layout_text
from penstock.layouts.plain import written_layout
from penstock.questions.by_name import import_layout
from penstock.questions.layouts import plan_file
from penstock.schemas.api.layouts import LayoutRequest
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import MemoryModel, PlanRequest

FSDP = "--use-megatron-fsdp"
WORDS = {
    ("torchtitan", "gradients"): 'fsdp_reshard_after_forward = "never"',
    ("torchtitan", "parameters"): 'fsdp_reshard_after_forward = "always"',
    ("deepspeed", "gradients"): '"stage": 2',
    ("deepspeed", "parameters"): '"stage": 3',
    ("megatron", "gradients"): "--data-parallel-sharding-strategy optim_grads",
    ("megatron", "parameters"): "--data-parallel-sharding-strategy optim_grads_params",
}


def a_request() -> PlanRequest:
    return PlanRequest(
        profile=catalogue.profile("gpt2-small"),
        topology=catalogue.cluster("1x4xA100"),
        global_batch_size=16,
        memory=MemoryModel(gradient="fp32"),
    )


def planned(words: str) -> PlanFile:
    return written_layout(a_request(), words).layout.file


@pytest.mark.parametrize(("trainer", "sharding"), WORDS)
def test_a_plan_is_written_and_read_back(trainer: str, sharding: str) -> None:
    file = planned(f"sharding={sharding},micro-batch=2")
    text = layout_text(file, trainer, "0.2" if trainer == "torchtitan" else None)
    assert WORDS[trainer, sharding] in text
    assert (FSDP in text) == (trainer == "megatron")
    request = a_request()
    back = import_layout(LayoutRequest(format=trainer, layout=text, request=request, compare=False), workers=1)
    assert back.plan.sharding == sharding
    assert back.plan.pipelines == file.plan.pipelines
    assert (back.plan.micro_batch_size, back.plan.num_micro_batches) == (8, 2)
    assert plan_file(back).plan.prediction == file.plan.prediction
    assert "per global batch of 16 samples" in back.sentences[0]


def test_what_a_trainer_has_no_word_for_is_refused() -> None:
    kept = planned("sharding=parameters_kept,pipeline=2")
    assert 'fsdp_reshard_after_forward = "never"' in layout_text(kept, "torchtitan", "0.2")
    with pytest.raises(UnsupportedRequest, match="ZeRO 3 gathers parameters again"):
        layout_text(kept, "deepspeed")
    with pytest.raises(UnsupportedRequest, match="parameters_kept is a sharding of torch's FSDP2"):
        layout_text(kept, "megatron")


@pytest.mark.parametrize(
    ("sharding", "nearest"), [("parameters", "sharding parameters_kept"), ("gradients", "sharding optimizer")]
)
def test_several_stages_are_refused_with_what_is_nearest(sharding: str, nearest: str) -> None:
    with pytest.raises(UnsupportedRequest, match=f"sharding {sharding} needs one stage, not 2") as refused:
        planned(f"sharding={sharding},pipeline=2")
    assert nearest in str(refused.value)
