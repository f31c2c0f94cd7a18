"""Traces of the examples, against processes that really share their layers: results, and each collective."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from peers import printed_by_ranks

from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.run.job import load_job

WORLD = 2
JOBS = {
    **{name: f"examples.{name}:tiny" for name in ("gpt", "llama", "bert", "transformer", "xlnet")},
    "experts": "expert_jobs:balanced",
    **{f"{name}-context": f"examples.{name}:tiny/context" for name in ("gpt", "llama")},
}
ROWS = 2
WHOLE = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1, "all_reduce": 1, "all_to_all_single": 1}
"""The argument with the whole tensor's bytes in a rank's notes; for an all-to-all, with the bytes that it sends."""
MOST_ADDENDS = 10**6
"""More than any sum here has. Another order changes a sum by 2⁻⁵³ of the largest number, at most, for each addend."""


pytestmark = pytest.mark.tier("nightly")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the first rank's results for each job."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    script = Path(__file__).with_name("divided_rank.py")
    lines = printed_by_ranks(script, WORLD, store, *JOBS.values())
    return dict(zip(JOBS, map(json.loads, lines[0]), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_a_divided_example_computes_what_the_whole_one_does(ran: dict[str, dict[str, Any]], name: str) -> None:
    assert ran[name]["apart"] < MOST_ADDENDS * 2**-53


@pytest.mark.parametrize("name", JOBS)
def test_the_collectives_that_run_are_those_that_were_traced(ran: dict[str, dict[str, Any]], name: str) -> None:
    reference, _, shared = JOBS[name].partition("/")
    degrees = {f"{shared or 'tensor'}_degrees": (WORLD,)} | ({"expert_degrees": (WORLD,)} if name == "experts" else {})
    profile = analytic_profile(load_job(reference), "H100", (ROWS,), **degrees)  # type: ignore[arg-type]
    assert profile.classes is not None
    assert profile.variants is not None
    (measured,) = profile.variants[-1].measurements
    for phase in ("forward", "backward"):
        traced = Counter[str]()
        for each in profile.classes:
            for one in measured.layers[each].collectives:
                if one.phase == phase:
                    traced.update({one.operation: one.count, f"{one.operation} bytes": one.bytes_per_sample * ROWS})
        seen = Counter[str]()
        for call in ran[name][phase]:
            operation = call[0].removesuffix("_tensor").removesuffix("_into").removesuffix("_single")
            seen.update({operation: 1, f"{operation} bytes": call[WHOLE[call[0]]]})
        assert seen == traced
