"""Exports that are read back as the same layout: random plans over all degrees, in each trainer's forms."""

from __future__ import annotations

from functools import cache

import pytest
from drawn_plans import PLANS, Drawn, plan_of

from penstock.convert.requested_degrees import degrees_of
from penstock.exporting.layouts import layout_text
from penstock.questions.by_name import import_layout
from penstock.schemas.api.layouts import LayoutRequest
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest, Target

FORMS: list[tuple[str, str | None, Target]] = [
    ("megatron", None, "megatron"),
    ("megatron-bridge", None, "megatron"),
    ("torchtitan", "0.2", "torchtitan"),
    ("torchtitan", "0.3", "torchtitan"),
    ("deepspeed", None, "deepspeed"),
]
SAME = ("pipelines", "micro_batch_size", "num_micro_batches", "global_batch_size", "update_rule")
"""Fields of plans that stay the same; of pipelines: layers, devices, recomputation and micro-batches of each stage."""
REFUSED = {"0.2": 3, "0.3": 6}
"""Plans whose experts are on more GPUs than torchtitan has for them; all others are written."""


@cache
def drawn(seed: int, target: Target) -> Drawn:
    return plan_of(seed, target)


def round_trip(one: Drawn, form: str, release: str | None, target: Target) -> list[str]:
    """Return the differences after an export and an import.

    The text alone states degrees, sharding, stages, order and batch.
    """
    text = layout_text(one.file, form, release)
    plain = one.file.request.model_copy(update={"degrees": None, "sharding": None})
    question = LayoutRequest(format=target, layout=text, source="plan", request=plain, compare=False)
    result = import_layout(question, workers=1)
    before, after = one.file.plan, result.plan
    shared = after.sharding == "parameters"
    compared = [(name, getattr(before, name), getattr(after, name)) for name in SAME]
    compared += [
        ("order", rows(before, shared), rows(after, shared)),
        ("degrees", one.degrees, degrees_of(after.degrees)),
        ("gradients", one.file.request.memory.gradient, result.request.memory.gradient),
    ]
    replicas = len(one.world) // one.ranks // (one.degrees.tensor * one.degrees.context)
    if replicas > 1 and release != "0.2":  # which has FSDP in the place of replicas
        compared.append(("sharding", shards(before, one.file.request), shards(after, result.request)))
    if target == "megatron":  # the others always overlap it
        compared.append(("overlap", before.overlap_all_reduce, after.overlap_all_reduce))
    return [f"{name}: {a!r}, read {b!r}" for name, a, b in compared if a != b]


def rows(plan: Plan, shared: bool) -> list[tuple[str, ...]]:
    """Return the order of each row, with its devices unless replicas share parameters and are one row."""
    return [(row.text,) if shared else (row.text, *row.devices) for row in plan.schedule.rows]


def shards(plan: Plan, request: PlanRequest) -> bool:
    """Return whether optimizer states are shared out, by a choice of the plan or by the request."""
    return plan.sharding == "optimizer" or request.memory.optimizer_sharding == "over_replicas"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("form", "release", "target"), FORMS)
def test_an_exported_layout_is_read_back(form: str, release: str | None, target: Target) -> None:
    refused, degrees = 0, set()
    for seed in range(PLANS):
        one = drawn(seed, target)
        try:
            assert round_trip(one, form, release, target) == [], (seed, form, release)
        except UnsupportedRequest:
            refused += 1
            continue
        degrees.add(one.degrees)
    assert refused == REFUSED.get(str(release), 0)
    assert len(degrees) >= (1 if target == "deepspeed" else 10)
