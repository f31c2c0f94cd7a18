"""Results of the large neighbourhood search: small requests against the joint optimum, models and large clusters.

Small requests (from ``bench_exact``, 8 micro-batches) are searched from nothing but even stages, in private and
shared networks and with little memory. DAPPLE's models start from the best plan of ``dapple``, ``spp`` and ``relax``,
random chains on 64 and 256 devices from the best plan of ``gpipe`` and ``dp``. CPU time, warm. Prints ``name value unit
target ok|MISSED``, ``-`` where there is no target. ``--quick``: five small requests, two models, 64 devices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace
from statistics import mean

from bench_exact import INSTANCES, instance
from chains import chain, star, unequal
from papers.paper_models import profile

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.request import PlanRequest
from penstock.solvers.improve.neighbourhood.flushed import SECOND, LargeNeighbourhoodSearch, is_movable
from penstock.solvers.model.options import checked
from penstock.solvers.model.problem import NetworkRules, Problem
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.judging import Judge

NEVER = 2**60
SMALL, LARGE = 1.0, 10.0
"""The efforts, about in seconds."""
MEAN_PERCENT, MOST_PERCENT = 0.016, 2.44
MODELS = (("bert-48", 64), ("xlnet-36", 128), ("amoebanet-36", 128), ("vgg-19", 1024), ("gnmt-16", 1024))
CLUSTERS = ("dapple-config-a", "dapple-config-b", "dapple-config-c")


def main() -> None:
    """Run small requests, models, large clusters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five small requests, two models, 64 devices")
    quick = parser.parse_args().quick
    seeds = range(5 if quick else INSTANCES)
    _search(instance(0, 8, True), None, SMALL)
    _small("private half duplex", (instance(seed, 8, False) for seed in seeds))
    _small("shared network", (instance(seed, 8, True) for seed in seeds))
    _small("little memory", (_tightened(instance(seed, 8, False), seed) for seed in seeds))
    _models(MODELS[:1] if quick else MODELS, CLUSTERS[1:] if quick else CLUSTERS)
    for nodes in (8,) if quick else (8, 32):
        _large(nodes, 50)


def _small(name: str, problems: Iterable[Problem]) -> None:
    gaps, seconds = [], []
    for problem in problems:
        exact = solve(problem, "exact").best
        if exact is not None:
            value_ns, spent = _search(problem, None, SMALL)
            gaps.append(100 * (value_ns / exact.value_ns - 1))
            seconds.append(spent)
    label = f"from nothing, 12 layers on 2x2, {name}, {len(gaps)} requests"
    _row(f"{label}: above the optimum, mean", mean(gaps), "%", MEAN_PERCENT)
    _row(f"{label}: above the optimum, most", max(gaps), "%", MOST_PERCENT)
    _row(f"{label}: seconds, mean", mean(seconds), "s", None)


def _tightened(problem: Problem, seed: int) -> Problem:
    """Return the problem with 1.3 even shares of the states and little more memory.

    Every other request may recompute.
    """
    source = problem.measured["gpu"][0]
    states = int(problem.parameter_bytes[-1]) * (1 + problem.memory.gradient_factor + problem.memory.state_factor)
    memory = int(1.3 * states / problem.num_devices) + 150_000_000
    return replace(
        problem,
        measured={"gpu": (replace(source, stash_bytes=60 * source.forward_ns),)},
        devices=tuple(replace(d, memory_bytes=memory) for d in problem.devices),
        recompute="auto" if seed % 2 else "never",
        _costs={},
    )


def _models(models: Iterable[tuple[str, int]], clusters: Iterable[str]) -> None:
    gains = []
    for model, batch in models:
        for topology in clusters:
            problem = to_problem(
                PlanRequest(profile=profile(model), topology=cluster(topology), global_batch_size=batch)
            )
            judge, _ = _started(problem, ("dapple", "spp", "relax"))
            gains.append(_gain(f"{model} on {topology}", problem, judge))
    _row(f"models: improved of {len(gains)}", sum(gain > 0 for gain in gains), "", None)
    _row("models: gain, mean", mean(gains), "%", None)


def _large(nodes: int, layers: int) -> None:
    forward, sent, parameters = unequal(layers, layers + nodes, boundary_spread=0.4)
    problem = chain(
        star((8,) * nodes, 130 * 10**9, 3_125_000_000, full_duplex=False),
        forward,
        sent,
        parameters,
        batch=16 * 8 * nodes,
        sizes=(8 * nodes,),
        rules=NetworkRules(False, "half", "spp", "flat", 25_000_000, False),
    )
    judge, spent = _started(problem, ("dp", "gpipe"))
    print(f"  {8 * nodes} devices: the planners before took {spent:.1f} s", flush=True)
    _gain(f"{layers} layers on {nodes}x8 devices", problem, judge)


def _started(problem: Problem, names: Iterable[str]) -> tuple[Judge, float]:
    judge, began = Judge(Setting(problem)), time.process_time()
    for name in names:
        entry = PLANNERS[name]
        assert entry.proposals is not None
        try:
            judge.judge_all(name, entry.proposals(judge.setting, checked(name, entry.options, {})))
        except UnsupportedRequest as refused:
            print(f"  {name}: {refused}", flush=True)
    return judge, time.process_time() - began


def _gain(label: str, problem: Problem, judge: Judge) -> float:
    assert judge.best is not None
    value_ns, seconds = _search(problem, judge, LARGE)
    gain = 100 * (1 - value_ns / judge.best.value_ns)
    _row(f"{label}: gain", gain, "%", None)
    _row(f"{label}: seconds", seconds, "s", None)
    return gain


def _search(problem: Problem, judge: Judge | None, effort: float) -> tuple[int, float]:
    """Return the best time, and CPU seconds."""
    best = None if judge is None else judge.best
    search = LargeNeighbourhoodSearch(problem, NEVER if best is None else best.value_ns, int(effort * SECOND))
    began = time.process_time()
    movable = best is not None and is_movable(best.allocation)
    for _trial in search.run(*((best.allocation, best.schedule) if best is not None and movable else (None, None))):
        pass
    return search.value_ns, time.process_time() - began


def _row(name: str, value: float, unit: str, target: float | None) -> None:
    verdict = "-" if target is None else f"{target} {'ok' if value <= target else 'MISSED'}"
    print(f"{name} {value:.4g} {unit} {verdict}".replace("  ", " "), flush=True)


if __name__ == "__main__":
    main()
