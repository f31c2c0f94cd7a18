"""AvgPipe's profile of a running pipeline: its parts by hand, and one real run that goes back into the planner."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.calibration.pipeline_profiling import compute_spans, profile_pipeline, transfer_times, utilisation
from penstock.executor.profiling import busy_clock
from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.profiling.busy_clock import BusyClock
from penstock.executor.run.job import load_job
from penstock.planning.judge import judge
from penstock.questions import answer
from penstock.questions.solve import solve
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import PipelineProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.model.timeline import Transfers

JOB = "examples.gpt:tiny"
BATCHES = 3


def plan(stages: int, devices: int = 2, planner: str = "gpipe") -> PlanFile:
    topology = ClusterTopology(
        name="here",
        uniform=UniformCluster(
            nodes=1,
            devices_per_node=devices,
            kind="V100",
            memory_bytes=2**30,
            fabric=Fabric(bandwidth_bytes_per_s=10**9, latency_ns=1000),
        ),
    )
    options = {"stages": stages} if stages else {}
    profile = analytic_profile(load_job(JOB), "V100", (2,))
    fields = {"global_batch_size": 16, "micro_batch_sizes": (2,), "planner": planner, "options": options}
    return answer.plan(profile, topology, **fields).file  # type: ignore[arg-type]


@pytest.mark.tier("ci")
def test_a_run_becomes_a_profile_that_the_planner_takes(tmp_path: Path) -> None:
    file = plan(2)
    lines: list[str] = []
    profile = profile_pipeline(file, JOB, batches=BATCHES, directory=tmp_path, progress=lines.append)
    assert PipelineProfile.parse_json(profile.canonical_json()) == profile
    assert (profile.plan_hash, profile.batches, profile.num_micro_batches) == (file.plan.content_hash(), BATCHES, 8)
    assert len(lines) == BATCHES + 1
    timeline = judge(file).timeline
    assert timeline is not None
    for rank in profile.ranks:
        assert rank.compute_ns > 0
        assert 0 < sum(rank.utilisation) <= len(rank.utilisation)
        assert rank.send_ns > 8 * 1000
    assert profile.ranks[0].send_ns == profile.ranks[1].receive_ns
    assert sum(rank.send_ns for rank in profile.ranks) == int(
        (timeline.transfers.end_ns - timeline.transfers.start_ns).sum()
    )
    parameters = sum(layer.parameter_bytes for layer in file.request.profile.layers)  # type: ignore[union-attr]
    assert sum(rank.model_bytes for rank in profile.ranks) == 2 * parameters
    request = PlanRequest.parse(
        file.request.model_dump(mode="json")
        | {
            "pipeline_profile": profile.model_dump(mode="json"),
            "planner": "avgpipe",
            "schedule": "auto",
            "update_rules": ["elastic_averaging"],
            "options": {"paper": True},
        }
    )
    result = solve(request)
    assert result.plan is not None, result.sentence
    assert len(result.plan.pipelines[0].stages) == 2


@pytest.mark.tier("ci")
def test_plans_that_avgpipe_does_not_profile_are_refused(tmp_path: Path) -> None:
    replicated = plan(0, planner="dp")
    with pytest.raises(UnsupportedRequest, match="stage 0 runs on 2 devices"):
        profile_pipeline(replicated, JOB, directory=tmp_path)
    one = replicated.plan.pipelines[0]
    twice = replicated.model_copy(update={"plan": replicated.plan.model_copy(update={"pipelines": (one, one)})})
    with pytest.raises(UnsupportedRequest, match="2 parallel pipelines"):
        profile_pipeline(twice, JOB, directory=tmp_path)


def test_utilisation_is_taken_over_the_computing_time() -> None:
    spans = [(0, 100), (200, 300)]
    assert utilisation(spans, lambda at: at if at <= 100 else 100 + (at - 200) / 2 if at >= 200 else 100, 4) == [
        1.0,
        1.0,
        0.5,
        0.5,
    ]
    assert utilisation([(0, 10)], lambda at: 3.0 * at, 2) == [1.0, 1.0], "other threads do not make it more than whole"
    assert utilisation([], lambda at: 0.0, 3) == [0.0] * 3


def test_only_computations_count() -> None:
    words = ("1RECV_F0", "1F0", "1SEND_F0", "1B0", "1R3", "1I2", "1W2", "1REDUCE0", "1STEP", "1LOAD0")
    events = [{"instruction": word, "start_ns": k, "end_ns": k + 1} for k, word in enumerate(words)]
    assert compute_spans(events) == (1, [(k, k + 1) for k in (1, 3, 4, 5, 6, 8)])


def test_transfers_count_at_both_ends() -> None:
    stage, direction = np.array([0, 1, 2, 1]), np.array([0, 0, 1, 1])
    start, end = np.array([0, 10, 20, 30]), np.array([1, 12, 24, 38])
    transfers = Transfers(stage, direction, np.zeros(4, dtype=int), start, end)
    assert transfer_times(transfers, 3) == ([1, 10, 4], [8, 5, 2])


def test_the_clock_of_a_process_follows_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between readings by a line, before the first and after the last as these."""
    readings = [(1000, 70), (1010, 75), (1020, 75), (1040, 95)]
    walls, busy = iter([wall for wall, _ in readings]), iter([each for _, each in readings])
    is_read = threading.Event()

    def read(_clock: int) -> int:
        for each in busy:
            return each
        is_read.set()
        raise ProcessLookupError

    monkeypatch.setattr(busy_clock, "time", SimpleNamespace(clock_gettime_ns=read, perf_counter_ns=lambda: next(walls)))
    clock = BusyClock([os.getpid()])
    assert is_read.wait(30)
    clock.stop()
    moments = (0, 1000, 1005, 1015, 1030, 1040, 9999)
    assert [clock.busy_ns(0, moment) for moment in moments] == [70, 70, 72.5, 75, 85, 95, 95]


def test_it_reads_the_processor_time_of_the_process() -> None:
    first = time.process_time_ns()
    clock = BusyClock([os.getpid()])
    while clock.busy_ns(0, time.perf_counter_ns()) <= first:
        pass
    clock.stop()
    assert first < clock.busy_ns(0, time.perf_counter_ns()) <= time.process_time_ns()
