"""The cost of a tied parameter: the simulator's difference of step times, tied minus untied, against two real ranks.

``python benchmarks/bench_ties.py [--iterations N]``: one line per row: name, value, unit, target, ok or MISSED.

A GPT whose embedding is also its head's weight, and the same GPT without that tie, in two stages on two ranks over a
slow link (a token bucket; ``tests/executor/slow_link.py``). Steps of both alternate in the same processes; the
figures are medians. Layer times are measured on both cores at once, before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from runtimes import in_processes

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "executor"))

from slow_link import SlowLink, SlowTransport, slow_all_reduces

from penstock.convert import to_problem
from penstock.examples import gpt
from penstock.executor.profiling.profiler import measure_profile
from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import Job
from penstock.executor.transport import process_groups
from penstock.schemas.profile import ModelProfile, SharedParameter
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.early_backward import early_backward

MICRO_BATCHES, ROWS = 4, 2
BYTES_PER_S = 2_000_000
CONFIG = gpt.Config(blocks=4, width=256, heads=4, length=32, vocabulary=2048)
STAGES = (Stage(0, 3, (0,)), Stage(4, 5, (1,)))
WARMUP = 2
LEAST_SHARE, TOLERANCE = 0.4, 0.25
PROFILE = "BENCH_TIES_PROFILE"
"""The environment variable with the path of the measured profile, for the ranks."""


def job_of(tied: bool) -> Job:
    """Return the GPT with or without its tie."""
    return gpt.make("bench-ties", replace(CONFIG, tied=tied), batch_size=MICRO_BATCHES * ROWS)


def problem_of(profile: ModelProfile, tied: bool) -> Problem:
    """Return a problem of two devices with a channel each way; the tie as it would be profiled."""
    if tied:
        size = CONFIG.vocabulary * CONFIG.width * 4
        layers = list(profile.layers)
        layers[-1] = layers[-1].model_copy(update={"parameter_bytes": layers[-1].parameter_bytes - size})
        tie = SharedParameter(name=gpt.TIED[0], layers=(0, len(layers) - 1), bytes=size)
        profile = profile.model_copy(update={"layers": tuple(layers), "shared_parameters": (tie,)})
    cluster = UniformCluster(
        nodes=1,
        devices_per_node=2,
        kind=profile.device_kinds[0],
        memory_bytes=2**40,
        fabric=Fabric(bandwidth_bytes_per_s=BYTES_PER_S),
    )
    request: dict[str, Any] = {
        "profile": profile,
        "topology": ClusterTopology(name="two", uniform=cluster),
        "global_batch_size": MICRO_BATCHES * ROWS,
        "network": {"sharing": "private", "channel": "full", "transfer": "nic"},
    }
    return to_problem(PlanRequest.model_validate(request))


def plan_of(problem: Problem) -> tuple[Allocation, Orders]:
    allocation = single_pipeline(STAGES, MICRO_BATCHES)
    return allocation, early_backward(problem, allocation, warmup=[2, 1])


def steps(rank: int, world_size: int, iterations: int) -> dict[str, float]:
    """Return median seconds of a step, tied and untied, alternating, and of their difference."""
    assert world_size == len(STAGES)
    link = SlowLink(BYTES_PER_S)
    profile = ModelProfile.model_validate_json(Path(os.environ[PROFILE]).read_text())
    interpreters = {}
    for tied in (False, True):
        problem, chain = problem_of(profile, tied), Chain(job_of(tied))
        programs = lower(problem, *plan_of(problem))
        groups = process_groups(programs[rank].groups)
        shapes = chain.infer_shapes(range(ROWS))
        transport = SlowTransport(link)
        interpreters[tied] = Interpreter(programs[rank], chain, shapes, seed=0, transport=transport, groups=groups)
        interpreters[tied].agree()
    times: dict[bool, list[float]] = {False: [], True: []}
    with slow_all_reduces(link):
        for i in range(-WARMUP, iterations):
            for tied in (False, True) if i % 2 else (True, False):
                dist.monitored_barrier()
                start = time.perf_counter()
                interpreters[tied].step(0)
                dist.monitored_barrier()
                if i >= 0:
                    times[tied].append(time.perf_counter() - start)
    return {
        "untied": statistics.median(times[False]),
        "tied": statistics.median(times[True]),
        "difference": statistics.median(b - a for a, b in zip(times[False], times[True], strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=9)
    iterations = parser.parse_args().iterations
    profile = measure_profile(job_of(False), micro_batch_sizes=(ROWS,), concurrency=2)
    predicted = {}
    for tied in (False, True):
        problem = problem_of(profile, tied)
        predicted[tied] = makespan_ns(problem, *plan_of(problem)) / 1e9
    with TemporaryDirectory() as folder:
        os.environ[PROFILE] = str(Path(folder) / "profile.json")
        Path(os.environ[PROFILE]).write_text(profile.model_dump_json())
        measured = in_processes(steps, len(STAGES), iterations)
    expected = predicted[True] - predicted[False]
    for name, value in (("untied", predicted[False]), ("tied", predicted[True]), ("difference", expected)):
        print(f"predicted {name}\t{value:.3f}\ts\t\t")
        print(f"measured {name}\t{measured[name]:.3f}\ts\t\t")
    share = measured["difference"] / measured["tied"]
    ratio = measured["difference"] / expected
    print(f"share of the tied step\t{share:.2f}\t\t>= {LEAST_SHARE}\t{'ok' if share >= LEAST_SHARE else 'MISSED'}")
    good = abs(ratio - 1) <= TOLERANCE
    print(f"measured / predicted difference\t{ratio:.2f}\t\t1 ± {TOLERANCE}\t{'ok' if good else 'MISSED'}")


if __name__ == "__main__":
    main()
