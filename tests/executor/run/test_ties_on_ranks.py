"""A tied parameter on ranks behind a slow link: what they send of it is what the judge charges, and nothing changes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import rule_jobs
import torch
from pipelines import Part, problem_of, programs_of, stages_of
from rank_pool import RankPool
from slow_link import SlowLink, sleep_until

from penstock.solvers.costs.ties import tied_sums
from penstock.solvers.model.allocation import single_pipeline

STEPS, MICRO_BATCHES, TOTALS = 2, 2, 16


@pytest.mark.tier("quick")
def test_a_link_passes_so_many_bytes_per_second() -> None:
    link = SlowLink(1e6)
    first = link.passed_at(1000, "messages")
    assert link.passed_at(2000, "all-reduces") == pytest.approx(first + 0.002)
    assert link.bytes_sent == {"messages": 1000, "all-reduces": 2000}
    sleep_until(first)
    assert time.perf_counter() >= first


@pytest.mark.parametrize("first", [1, 2])
def test_ranks_send_of_a_tie_what_the_judge_charges(pool: RankPool, tmp_path: Path, first: int) -> None:
    job = rule_jobs.tied
    parts = [Part(first, (0,)), Part(len(job.layers()) - first, (1,))]
    programs = programs_of(job, parts, MICRO_BATCHES)
    (tie,) = tied_sums(problem_of(job, 2), single_pipeline(stages_of(parts), MICRO_BATCHES))
    assert tie.devices == (0, 1)
    quick = pool.record([programs], "tied", tmp_path, uses=(0,) * STEPS)
    slow = pool.record([programs], "tied", tmp_path, uses=(0,) * STEPS, bytes_per_s=1e6)
    for fast, delayed in zip(quick, slow, strict=True):
        # a ring of two sends each byte once from each rank; beside ties only the totals of losses are added up
        assert delayed["sent"]["all-reduces"] == STEPS * (tie.bytes + TOTALS)
        assert delayed["losses"] == fast["losses"]
        for stage, weights in fast["weights"].items():
            for one, other in zip(weights, delayed["weights"][stage], strict=True):
                assert all(torch.equal(one[name], other[name]) for name in one)
