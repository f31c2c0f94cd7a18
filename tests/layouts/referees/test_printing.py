"""Configurations as torchtitan and DeepSpeed print them themselves: a log is read as the file of the same run."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from installed import RELEASES, under
from layout_texts import parsed

from penstock.examples import catalogue
from penstock.questions.by_name import import_layout
from penstock.schemas.api.layouts import LayoutImported, LayoutJob, LayoutRequest

pytestmark = pytest.mark.tier("nightly")

CASES = 12
OLD = [release for release in RELEASES["torchtitan"] if release.startswith("0.2")]
"""Releases whose configuration is one class; later ones print the fields of a trainer that is running."""


def drawn_for_torchtitan(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    ranks, tensor = draw.choice((1, 2, 4)), draw.choice((1, 2))
    rows = draw.choice((1, 2))
    return {
        "parallelism": {
            "pipeline_parallel_degree": ranks,
            "tensor_parallel_degree": tensor,
            "pipeline_parallel_schedule": draw.choice(("1F1B", "GPipe", "Interleaved1F1B")),
            "pipeline_parallel_microbatch_size": rows,
        },
        "training": {"local_batch_size": 8 * rows, "global_batch_size": 64},
        "activation_checkpoint": {"mode": draw.choice(("none", "full"))},
        "model": {"name": "llama3", "flavor": draw.choice(("debugmodel", "1B", "8B"))},
    }


def drawn_for_deepspeed(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    stages = draw.choice((1, 2, 4))
    return {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": draw.choice((1, 2, 4)),
        "pipeline": {"stages": stages, "partition": draw.choice(("uniform", "parameters"))},
        "zero_optimization": {"stage": draw.choice((0, 1) if stages > 1 else (0, 1, 2, 3))},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "eps": 1e-8}},
    }


def imported(text: str) -> LayoutImported:
    """Judge a layout of DeepSpeed's, whose batch is its own."""
    job = LayoutJob(profile=catalogue.profile("gpt2-small"), topology=catalogue.cluster("1x8xV100"))
    return import_layout(LayoutRequest(format="deepspeed", layout=text, request=job, compare=False), workers=1)


@pytest.mark.parametrize("release", OLD)
def test_torchtitans_log_says_what_its_file_says(release: str, pytestconfig: pytest.Config) -> None:
    drawn = [drawn_for_torchtitan(seed) for seed in range(CASES)]
    task = {"trainer": "torchtitan", "configurations": drawn}
    logs = under(f"torchtitan-{release}", "printing_referee.py", task, pytestconfig.getoption("tier"))
    for configuration, log in zip(drawn, logs, strict=True):
        assert "[rank0]:" in log
        mine, theirs = parsed("torchtitan", log), parsed("torchtitan", json.dumps(configuration))
        assert mine.degrees() == theirs.degrees()
        assert mine.batch(16) == theirs.batch(16) == 64
        assert mine.shape().layers == theirs.shape().layers


@pytest.mark.parametrize("release", RELEASES["deepspeed"])
def test_deepspeeds_log_says_what_its_file_says(release: str, pytestconfig: pytest.Config) -> None:
    drawn = [drawn_for_deepspeed(seed) for seed in range(CASES)]
    task = {"trainer": "deepspeed", "configurations": drawn}
    logs = under(f"deepspeed-{release}", "printing_referee.py", task, pytestconfig.getoption("tier"))
    for configuration, log in zip(drawn, logs, strict=True):
        assert "json = " in log
        mine, theirs = imported(log), imported(json.dumps(configuration))
        assert mine.plan.pipelines == theirs.plan.pipelines
        assert mine.plan.sharding == theirs.plan.sharding
        assert mine.assumptions == theirs.assumptions
        assert parsed("deepspeed", log).batch() == 32
