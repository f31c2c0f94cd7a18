"""The joint optimum of small requests, and how near ``auto`` comes to it without planner ``exact``.

50 random instances of 12 layers on 2 nodes x 2 devices, each with 4, 8 and 16 micro-batches (SOLVERS F), in private
half-duplex channels and in the shared network. Then the gain of local search on models of realistic size, against the
other contained planners alone. CPU time, warm. Prints ``name value unit target ok|MISSED``, ``-`` where there is no
target.
``--quick``: five instances, no models.
"""

from __future__ import annotations

import argparse
import time
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from chains import NO_BUCKETS, chain, star
from papers.paper_models import profile

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster
from penstock.schemas.request import PlanRequest
from penstock.solvers.model.problem import MemoryRules, NetworkRules, Problem
from penstock.solvers.model.result import Result, Status
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.warm import warm

INSTANCES = 50
NUMBERS = (4, 8, 16)
LAYERS = 12
OTHER_KINDS = "hetpipe,zero-bubble,chimera"
"""Planners of several pipelines or split backwards, which ``exact`` does not cover."""
SECONDS, MEAN_PERCENT, MOST_PERCENT = 0.5, 0.5, 3.0
MODELS = (
    ("bert-48", "dapple-config-a", 64),
    ("bert-48", "dapple-config-b", 64),
    ("bert-48", "dapple-config-c", 64),
    ("vgg-19", "dapple-config-c", 2048),
    ("gnmt-16", "dapple-config-c", 1024),
)


class Run(NamedTuple):
    """One instance: the optimum, ``auto`` without it, and without local search too; seconds of the first two."""

    exact: Result
    auto: int
    plain: int
    seconds: float
    auto_seconds: float


def main() -> None:
    """Run both networks, then the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five instances, no models")
    quick = parser.parse_args().quick
    warm()
    solve(instance(0, 4, False), "exact")
    for shared in (False, True):
        runs = [_run(instance(seed, number, shared)) for seed in range(5 if quick else INSTANCES) for number in NUMBERS]
        _report("shared network" if shared else "private half duplex", runs)
    if not quick:
        for model, topology, batch in MODELS:
            _local_search_gain(model, topology, batch)


def _run(problem: Problem) -> Run:
    exact, seconds = _solve(problem, "exact", {})
    auto, auto_seconds = _solve(problem, "auto", {"exclude": f"exact,interleaved,{OTHER_KINDS}"})
    plain, _ = _solve(problem, "auto", {"exclude": f"exact,polish,interleaved,{OTHER_KINDS}"})
    return Run(exact, _value(auto), _value(plain), seconds, auto_seconds)


def _solve(problem: Problem, planner: str, options: dict[str, Any]) -> tuple[Result, float]:
    began = time.process_time()
    result = solve(problem, planner, options=options)
    return result, time.process_time() - began


def _value(result: Result) -> int:
    assert result.best is not None
    return result.best.value_ns


def _report(network: str, runs: list[Run]) -> None:
    name = f"exact, {LAYERS} layers on 2x2, {network}, {len(runs)} requests"
    proven = sum(run.exact.status is Status.OPTIMAL for run in runs)
    _row(f"{name}: proven", proven, "", len(runs), proven == len(runs))
    quick = sum(run.seconds <= SECONDS for run in runs)
    _row(f"{name}: within {SECONDS} s", quick, "", len(runs), quick == len(runs))
    _row(f"{name}: seconds, mean", mean(run.seconds for run in runs), "s", None, True)
    longest = max(run.seconds for run in runs)
    _row(f"{name}: seconds, most", longest, "s", SECONDS, longest <= SECONDS)
    gaps = [100 * (run.auto / _value(run.exact) - 1) for run in runs]
    name = f"auto without exact, {network}"
    _row(f"{name}: above the optimum, mean", mean(gaps), "%", MEAN_PERCENT, mean(gaps) <= MEAN_PERCENT)
    _row(f"{name}: above the optimum, most", max(gaps), "%", MOST_PERCENT, max(gaps) <= MOST_PERCENT)
    _row(f"{name}: at the optimum", sum(gap <= 0 for gap in gaps), "", None, True)
    plain = [100 * (run.plain / _value(run.exact) - 1) for run in runs]
    _row(f"{name}, without local search: mean", mean(plain), "%", None, True)
    _row(f"{name}, without local search: most", max(plain), "%", None, True)
    _row(f"{name}: seconds, mean", mean(run.auto_seconds for run in runs), "s", None, True)


def _local_search_gain(model: str, topology: str, batch: int) -> None:
    problem = to_problem(PlanRequest(profile=profile(model), topology=cluster(topology), global_batch_size=batch))
    plain, before = _solve(problem, "auto", {"exclude": f"exact,polish,interleaved,{OTHER_KINDS}"})
    improved, after = _solve(problem, "auto", {"exclude": f"exact,interleaved,{OTHER_KINDS}"})
    gain = 100 * (1 - _value(improved) / _value(plain))
    name = f"local search on {model} on {topology}"
    _row(f"{name}: gain", gain, "%", None, True)
    _row(f"{name}: seconds added to {before:.1f}", after - before, "s", None, True)


def _row(name: str, value: float, unit: str, target: float | None, good: bool) -> None:
    shown = str(value) if isinstance(value, int) else f"{value:.3f}"
    verdict = "" if target is None else " ok" if good else " MISSED"
    print(f"{name} {shown} {unit} {'-' if target is None else target}{verdict}".replace("  ", " "), flush=True)


def instance(seed: int, number: int, shared: bool) -> Problem:
    """Build an instance of unequal layers.

    Transfers, all-reduces and the network between the nodes have different weight.
    """
    draw = np.random.default_rng(seed)
    forward = (np.exp(draw.normal(0, 0.5, LAYERS)) * 25_000).astype(np.int64)
    weight = float(draw.choice([200, 1000, 4000])) * 1000
    parameters = (np.exp(draw.normal(0, 0.8, LAYERS)) * np.linspace(0.3, 2, LAYERS) * weight).astype(np.int64)
    size = float(draw.choice([500, 2000, 6000])) * 1000 / 12
    sent = (np.exp(draw.normal(0, 0.4, LAYERS - 1)) * np.linspace(2, 0.5, LAYERS - 1) * size).astype(np.int64)
    between = int(draw.choice([1, 3, 10])) * 10**9
    return chain(
        star((2, 2), 10**10, between),
        forward,
        sent,
        parameters,
        batch=12 * number,
        sizes=(12,),
        rules=NetworkRules(shared, "half", "nic" if shared else "spp", "flat", NO_BUCKETS, False),
        weight_ns=np.zeros(LAYERS, dtype=np.int64),
        memory_bytes=2**45,
        memory=MemoryRules(1, 0, False, 0, True),
    )


if __name__ == "__main__":
    main()
