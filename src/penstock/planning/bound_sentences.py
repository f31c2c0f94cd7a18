"""Sentences about what is proven of a plan; the same on the terminal, in explanations, on pages and in reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.schemas.amounts import duration, percent
from penstock.schemas.coverage import CLASS_SCOPE, REQUEST_SCOPE, claim

if TYPE_CHECKING:
    from penstock.schemas.plan import Certificate, Plan


def widest(certificates: Sequence[Certificate]) -> Certificate | None:
    """Return the bound on every plan of the request, whose gap is the plan's headline, or None."""
    return next((c for c in certificates if c.scope == REQUEST_SCOPE), None)


def bound_sentences(plan: Plan) -> Iterator[str]:
    """Return one sentence for each bound: which plans it covers, and what could be saved at most."""
    if plan.prediction is None:
        return
    total = plan.prediction.time_per_global_batch_ns
    for c in plan.certificates:
        yield bound_sentence(c, total)
    if plan.certificates and widest(plan.certificates) is None:
        yield "No bound is stated for every plan of this request."


def bound_sentence(c: Certificate, value_ns: int) -> str:
    """Return the bound of one certificate as a sentence, for a plan that takes ``value_ns``."""
    least = min(value_ns, c.bound_ns + c.tolerance_ns)
    if value_ns <= least:
        consequence = "so none of them is faster than this plan"
    else:
        consequence = f"so none of them saves more than {percent(1 - c.bound_ns / value_ns)} of the time"
    beyond = "; of other plans this says nothing" if c.scope == CLASS_SCOPE else ""
    no_plan = claim(c.scope, c.covers.covers())
    return f"{no_plan} takes less than {duration(c.bound_ns)} ({c.method}), {consequence}{beyond}."
