"""The first lines of an answer: a plan in the words of trainers, its speed, and what is proven of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING

from penstock.planning.bound_sentences import widest
from penstock.planning.sentences import recomputation
from penstock.schemas.amounts import duration, percent
from penstock.schemas.api.words import chosen_words
from penstock.schemas.coverage import EVEN, OVER_ALL, limits_of
from penstock.schemas.transformers.degrees import Degrees, Sharding

if TYPE_CHECKING:
    from penstock.schemas.plan import Certificate, Plan

SHARDED: dict[Sharding | None, str] = {
    "optimizer": "ZeRO-1",
    "gradients": "ZeRO-2",
    "parameters": "FSDP (reshard)",
    "parameters_kept": "FSDP",
}
"""Names that trainers have for what replicas share out."""
ORDERS = {"early-backward": "1F1B", "gpipe": "GPipe", "interleaved": "interleaved 1F1B", "zb-v": "ZB-V"}

LIMITS = {EVEN: "even samples", OVER_ALL: "gradients sharded over all GPUs or none"}


def headline(plan: Plan) -> str:
    """Return the layout: ``TP 4 · PP 1 · DP 16 · FSDP (reshard) · 4 micro-batches of 1``."""
    return " · ".join(_layout(plan))


def _layout(plan: Plan) -> Iterator[str]:
    degrees = plan.degrees or Degrees()
    for name, degree in zip(("TP", "CP", "EP", "ETP"), degrees.model_dump().values(), strict=True):
        if degree > 1 or name == "TP":
            yield f"{name} {degree}"
    pipelines = [pipeline.stages for pipeline in plan.pipelines]
    ranks = [len({stage.devices for stage in stages}) for stages in pipelines]
    yield f"PP {_between(ranks)}"
    turns = max(len(stages) // number for stages, number in zip(pipelines, ranks, strict=True))
    if turns > 1 and max(ranks) > 1:
        yield f"VP {turns}"
    mesh = degrees.tensor * degrees.context
    counts = [len(stage.devices) // mesh for stages in pipelines for stage in stages]
    yield f"DP {_between(counts)}"
    if len(pipelines) > 1:
        yield f"{len(pipelines)} pipelines"
    if plan.sharding in SHARDED:
        yield SHARDED[plan.sharding]
    rows = ceil(plan.micro_batch_size / counts[0])
    yield f"{plan.num_micro_batches} micro-batch{'' if plan.num_micro_batches == 1 else 'es'} of {rows}"
    if max(ranks) > 1:
        yield ORDERS.get(plan.schedule.name, plan.schedule.name)
    if plan.update_rule != "synchronous":
        yield f"{plan.update_rule.replace('_', ' ')} updates"
    if (again := recomputation(plan)) is not None:
        yield f"recompute {_in_short(again)}"
    yield from chosen_words(plan.chosen)


def _in_short(recomputed: str) -> str:
    """Return ``full (10 stages)`` for ``all layers on 10 of 16 stages``; the table of stages has the rest."""
    shorter = recomputed.replace("all layers", "full").replace(" on every stage", "")
    return re.sub(r" on (\d+) of \d+ stages", r" (\1 stages)", shorter)


def _between(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low}–{high}"


def speed(plan: Plan) -> str:
    """Return time with its stated error and speed: ``11.5 s/step ± 35 % (…) · 710 tokens/s/GPU · MFU 32.3 %``."""
    p = plan.prediction
    if p is None:
        return "not simulated"
    total = p.time_per_global_batch_ns
    parts = [f"{duration(total)}/step ± {percent(p.expected_error)} ({p.basis} costs)"]
    if p.tokens_per_s_per_gpu is not None:
        parts.append(f"{p.tokens_per_s_per_gpu:,.0f} tokens/s/GPU")
    else:
        parts.append(f"{plan.global_batch_size / total * 1e9:,.1f} samples/s")
    if p.model_flops_utilisation is not None:
        parts.append(f"MFU {percent(p.model_flops_utilisation)}")
    parts.append(f"bubble {percent(p.bubble)}")
    return " · ".join(parts)


def proof(plan: Plan) -> str:
    """Return what is proven of all plans: ``at most 8.8 % better is possible: lower bound over all plans 10.5 s``.

    In brackets is what the bound takes for granted of plans: ``planning.bound_sentences`` says it in full.
    """
    p, bound = plan.prediction, widest(plan.certificates)
    if p is None or bound is None:
        return "no lower bound is proven over all plans of this request"
    share = most_better(bound, p.time_per_global_batch_ns)
    better = f"at most {percent(share)} better" if share else "no plan is faster"
    if limits := taken_for_granted(bound):
        return f"{better}: lower bound {duration(bound.bound_ns)} ({limits})"
    return f"{better}{' is possible' if share else ''}: lower bound over all plans {duration(bound.bound_ns)}"


def most_better(bound: Certificate, time_ns: int) -> float:
    """Return by which share of its time a plan can be beaten at most; 0 where its time is proven the least."""
    return 0.0 if time_ns <= bound.bound_ns + bound.tolerance_ns else 1 - bound.bound_ns / time_ns


def taken_for_granted(bound: Certificate) -> str:
    """Return what a bound takes for granted of the request's plans, such as ``even samples``; empty for nothing."""
    return ", ".join(LIMITS[limit] for limit in limits_of(bound.covers.covers()))
