"""SPP (Luo et al., INFOCOM 2022): Table III's ratios, the six sweeps of section V-B, figure 11, and its theorems.

Costs come from the shipped analytic profiles. The paper's network: private half-duplex channels over all k k' links of
two stages, a flat ring all-reduce after the last backward. SPP is the paper's (``paper``: all devices used,
schedule ``pe``); PipeDream has its published partition and a barrier, data parallelism one micro-batch per device.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import numpy as np
from paper_models import profile
from report import Row, Section, main

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster
from penstock.schemas.request import MemoryModel, NetworkModel, PlanRequest
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Measured, Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.planners.spp.ordering import device_order, graph_of
from penstock.solvers.planners.spp.partition import pruned_replicas, search
from penstock.solvers.planners.spp.plans import found_of
from penstock.solvers.planners.spp.tables import chain_of, windows
from penstock.solvers.schedules.pipeline_execution import pipeline_execution
from penstock.solvers.solve.driver import solve

GBIT = 10**9 // 8
SEEDS = 5
LAYERS_OF_BERT_LARGE = 26
MICRO_BATCH = 6
GRAINS = 64
UNLIMITED = 2**50
SYSTEMS: dict[str, tuple[str, str, dict[str, object]]] = {
    "SPP": ("spp", "pe", {"paper": True}),
    "DP": ("dp", "early-backward", {"overlap": "no"}),
    "GPipe": ("gpipe", "gpipe", {}),
    "PipeDream": ("pipedream", "early-backward", {"paper": True}),
    "HetPipe": ("hetpipe", "early-backward", {}),
}
Printed = dict[str, tuple[float, ...]]
MODELS: dict[str, tuple[str, int, int]] = {
    "VGG19": ("vgg-19", 8, 32),
    "ResNet152": ("resnet-152", 4, 4),
    "Inception-V3": ("inception-v3", 8, 32),
    "Transformer": ("transformer", 8, 32),
    "BERT-large": ("bert-large", 4, 4),
    "XLNet-large": ("xlnet-36", 4, 4),
    "BERT-48": ("bert-48", 4, 4),
}
"""Table II: profile, micro-batches and their size; XLNet-large by its 550 million parameters."""
VISION = ("vgg-19", "resnet-152", "inception-v3")
OOM = float("inf")
TABLE_III: dict[str, Printed] = {
    "spp-testbed-1": {
        "VGG19": (1.799, 2.882, 2.120, 1.949, 2.696),
        "ResNet152": (0.732, 0.896, 1.214, OOM, 0.843),
        "Inception-V3": (0.303, 0.420, 0.551, 0.656, 0.408),
        "Transformer": (0.640, 0.944, 1.234, 1.118, 0.766),
        "BERT-large": (0.409, 0.524, 0.472, 0.421, 0.525),
        "XLNet-large": (1.299, 1.388, 1.696, 1.384, 1.628),
        "BERT-48": (0.762, OOM, 1.885, 1.266, 1.377),
    },
    "spp-testbed-2": {
        "VGG19": (0.983, 1.245, 1.004, 1.024),
        "ResNet152": (0.832, 1.209, 1.041, 0.873),
        "Inception-V3": (0.357, 0.663, 0.587, 0.919),
        "Transformer": (1.065, 2.533, 1.487, 1.830),
        "BERT-large": (0.952, 2.269, 1.665, 1.084),
        "XLNet-large": (1.437, 1.842, 1.720, 1.690),
        "BERT-48": (0.855, 1.656, 1.199, 1.160),
    },
}
HIGH = (32, 40)
INSIDE_OF_THREE, INSIDE_OF_FIVE = (96, 128), (160, 200)
LEVELS = {"low": (8, 10), "medium": (16, 20), "high": HIGH}


def sections(quick: bool, profiles: Path | None) -> Iterator[Section]:
    """Yield every table and figure; real profiles of these models are not published."""
    seeds = range(1 if quick else SEEDS)
    for testbed in TABLE_III:
        yield table_iii(testbed, quick)
    yield from by_micro_batches(seeds, quick)
    yield by_bandwidth(seeds)
    yield by_connectivity(seeds, quick)
    yield by_layers(seeds, quick)
    yield by_activations(seeds, quick)
    yield figure_11(seeds)


def request(model: str, topology: Any, micro_batches: int, size: int, **more: Any) -> Problem:
    """Return a model in the paper's network; Adam for the language models, SGD with momentum for the others."""
    optimizer: Literal["adam", "momentum"] = "momentum" if model in VISION else "adam"
    plan_request = PlanRequest(
        profile=profile(model),
        topology=topology,
        global_batch_size=micro_batches * size,
        micro_batch_sizes=(size,),
        memory=MemoryModel(optimizer=optimizer, precision="full", buffers="none"),
        network=NetworkModel(sharing="private", transfer="spp", all_reduce="flat", overlap_all_reduce=False),
        recompute="never",
        **more,
    )
    return to_problem(plan_request)


def planned(problem: Problem, system: str) -> JudgedPlan | None:
    """Return a system's best plan; data parallelism has the whole batch as one micro-batch."""
    planner, schedule, options = SYSTEMS[system]
    if system == "DP":
        problem = replace(problem, micro_batch_sizes=(problem.global_batch_size,))
    return solve(problem, planner, schedule=schedule, options=options).best


def milliseconds(problem: Problem, system: str) -> float:
    best = planned(problem, system)
    return OOM if best is None else best.value_ns / 1e6


def table_iii(testbed: str, quick: bool) -> Section:
    """Compare each baseline's time with SPP's."""
    rows = []
    for model, printed in TABLE_III[testbed].items():
        if quick and model not in ("VGG19", "BERT-large"):
            continue
        name, batches, size = MODELS[model]
        if model == "BERT-48" and testbed == "spp-testbed-2":
            size = 2
        problem = request(name, cluster(testbed), batches, size)
        systems = tuple(SYSTEMS)[: len(printed)]
        times = {system: milliseconds(problem, system) for system in systems}
        wanted = ", ".join(_over(s, t, printed[0]) for s, t in zip(systems[1:], printed[1:], strict=True))
        got = ", ".join(_over(s, times[s], times["SPP"]) for s in systems[1:])
        slower = [s for s in systems[1:] if times[s] < times["SPP"] * 0.995]
        note = _why_slower(problem, slower) if slower else ""
        rows.append(Row(f"{model}, SPP {times['SPP']:.0f} ms", wanted, got, not slower, note))
    setup = (
        "Time per iteration over SPP's, as printed and as planned and judged here; OOM: no plan fits. The check is "
        "that no baseline beats SPP. The ratios rest on measured profiles there, on analytic ones here."
    )
    return Section(f"Table III: {testbed}", setup, rows)


def _why_slower(problem: Problem, systems: list[str]) -> str:
    """Return the reason why systems are faster than SPP.

    Data parallelism has one micro-batch. The time of ``spp`` with a free number of micro-batches is added.
    """
    best = solve(replace(problem, micro_batch_sizes=()), "spp", options={"paper": True}).best
    free = "" if best is None else f"; spp with any size takes {best.value_ns / 1e6:.0f} ms"
    return f"{' and '.join(systems)} faster here: the whole batch at once runs at a better rate{free}"


def _over(system: str, time: float, base: float) -> str:
    return f"{system} {'OOM' if time == OOM else f'{time / base:.2f}'}"


def drawn(seed: int, nodes: Iterable[int], between: tuple[int, int]) -> Network:
    """Draw one bandwidth per server and one per pair of servers, in whole Gbit/s (R-16).

    Three servers in eight are slow.
    """
    draw = random.Random(seed)
    sizes = tuple(nodes)
    node_of = [n for n, size in enumerate(sizes) for _ in range(size)]
    slow = round(len(sizes) * 3 / 8)
    inside = [draw.randint(*(INSIDE_OF_THREE if n < slow else INSIDE_OF_FIVE)) for n in range(len(sizes))]
    across = np.diag(inside)
    for a in range(len(sizes)):
        for b in range(a + 1, len(sizes)):
            across[a, b] = across[b, a] = draw.randint(*between)
    table = across[np.ix_(node_of, node_of)].astype(np.int64) * GBIT
    np.fill_diagonal(table, 0)
    names = tuple(f"server{n}/{d - node_of.index(n)}" for d, n in enumerate(node_of))
    hosts = tuple(f"server{n}" for n in range(len(sizes)))
    return Network(names, hosts, tuple(node_of), (None,) * len(sizes), (), table)


def simulated(
    seed: int,
    model: str = "bert-large",
    batches: int = 32,
    nodes: tuple[int, int] = (8, 4),
    between: tuple[int, int] = HIGH,
    activations: int = 1,
) -> Problem:
    """Return V100 costs on drawn bandwidths (section V-B); the paper's simulation has no memory limit.

    A stage of r replicas takes 1/r of a micro-batch's time (section III-A), whatever r. So a sample counts as
    ``GRAINS`` rows here, each with its share of the micro-batch's time.
    """
    problem = request(model, cluster(f"{nodes[0]}x{nodes[1]}xV100"), batches, MICRO_BATCH)
    network = drawn(seed, [nodes[1]] * nodes[0], between)
    devices = tuple(
        replace(device, name=name, memory_bytes=UNLIMITED)
        for device, name in zip(problem.devices, network.device_names, strict=True)
    )
    whole = problem.costs("V100", MICRO_BATCH)
    prefixes = (whole.forward_ns, whole.backward_ns, whole.weight_ns, whole.stash_bytes)
    grains = Measured(MICRO_BATCH * GRAINS, *(np.diff(values) for values in prefixes), whole.workspace_bytes)
    return replace(
        problem,
        devices=devices,
        network=network,
        measured=dict.fromkeys(problem.measured, (grains,)),
        linear=True,
        global_batch_size=problem.global_batch_size * GRAINS,
        micro_batch_sizes=(MICRO_BATCH * GRAINS,),
        forward_bytes=-(-problem.forward_bytes * activations // GRAINS),
        backward_bytes=-(-problem.backward_bytes * activations // GRAINS),
        _costs={},
    )


@cache
def swept(seeds: range, **setting: Any) -> dict[str, float]:
    """Return mean milliseconds of each system over the seeds; on one server HetPipe is PipeDream (section V-A)."""
    one = setting.get("nodes", (8, 4))[0] == 1
    systems = [system for system in SYSTEMS if not (one and system == "HetPipe")]
    return {s: mean(milliseconds(simulated(seed, **setting), s) for seed in seeds) for s in systems}


def changed(**setting: Any) -> dict[str, Any]:
    """Return only what differs from the default setting, so that its times are computed once."""
    default = {"batches": 32, "between": HIGH, "model": "bert-large", "activations": 1}
    return {name: value for name, value in setting.items() if default[name] != value}


def shown(what: str, times: dict[str, float], claim: str = "SPP fastest") -> Row:
    """Return a row with SPP's time, and the baselines' times over it."""
    got = f"SPP {times['SPP']:.0f} ms; " + ", ".join(_over(s, times[s], times["SPP"]) for s in list(times)[1:])
    faster = [s for s in times if times[s] < times["SPP"] * 0.995]
    return Row(what, claim, got, not faster, f"{' and '.join(faster)} faster here" if faster else "")


def set_up(seeds: Iterable[int]) -> str:
    return (
        f"BERT-large in {LAYERS_OF_BERT_LARGE} layers, 32 micro-batches of {MICRO_BATCH}, 8 servers of 4 V100, means "
        f"over {len(list(seeds))} draws of the bandwidths (ALGORITHMS R-16); baselines over SPP."
    )


def by_micro_batches(seeds: range, quick: bool) -> Iterator[Section]:
    """Compare numbers of micro-batches (figure 6), and check the text's claim on utilisation (S8)."""
    rows, busy, distance = [], {}, {}
    for batches in (16, 32) if quick else (8, 16, 32, 64):
        rows.append(shown(f"M = {batches}", swept(seeds, **changed(batches=batches))))
        used, far = [], []
        for seed in seeds:
            result = solve(simulated(seed, batches=batches), "spp", schedule="pe", options=SYSTEMS["SPP"][2])
            assert result.best is not None
            work = sum(use.busy_ns for use in result.best.timeline.uses.values())
            used.append(work / (32 * result.best.value_ns))
            far.append(result.best.value_ns / max(bound.bound_ns for bound in result.bounds[:1]))
        busy[batches], distance[batches] = mean(used), mean(far)
    yield Section("Figure 6: numbers of micro-batches", set_up(seeds), rows)
    yield Section(
        "Utilisation and distance from the bound, by M",
        "Share of the devices' time in which they compute, and the time over the request's lower bound, under SPP.",
        [
            Row("utilisation", "rises with M", _listed(busy, 100, " %"), _rises(busy.values())),
            Row("time over the bound (S8)", "falls with M", _listed(distance, 1, ""),
                _rises([-far for far in distance.values()])),
        ],
    )  # fmt: skip


def _listed(values: dict[int, float], factor: int, unit: str) -> str:
    return ", ".join(f"{key}: {value * factor:.{0 if unit else 2}f}{unit}" for key, value in values.items())


def _rises(values: Iterable[float]) -> bool:
    return all(b >= a for a, b in pairwise(values))


def by_bandwidth(seeds: range) -> Section:
    """Compare the levels of bandwidth between servers (figure 7, S7)."""
    times = {level: swept(seeds, **changed(between=LEVELS[level])) for level in LEVELS}
    rows = [shown(f"{level}: {LEVELS[level][0]}-{LEVELS[level][1]} Gbit/s", times[level]) for level in LEVELS]
    slope = {system: times["low"][system] / times["high"][system] for system in SYSTEMS}
    flat, steep = ("SPP", "GPipe", "PipeDream"), ("DP", "HetPipe")
    text = ", ".join(f"{system} {ratio:.2f}" for system, ratio in slope.items())
    good = max(slope[s] for s in flat) < min(slope[s] for s in steep)
    note = (
        ""
        if good
        else (
            "HetPipe's virtual workers reduce stage by stage here, each over links of its own; the paper's by a server"
        )
    )
    rows.append(Row("low over high", "SPP, GPipe, PipeDream stable; DP, HetPipe drop", text, good, note))
    return Section("Figure 7: bandwidth between servers", f"{set_up(seeds)} The levels' values are ours.", rows)


def by_connectivity(seeds: range, quick: bool) -> Section:
    """Compare servers and devices per server (figure 8)."""
    shapes = ((3, 4),) if quick else ((6, 2), (3, 4), (1, 8))
    rows = [shown(f"{servers} x {size}", swept(seeds, nodes=(servers, size))) for servers, size in shapes]
    return Section("Figure 8: servers and devices per server", set_up(seeds), rows)


def by_layers(seeds: range, quick: bool) -> Section:
    """Compare numbers of layers (figure 9, S6)."""
    rows = []
    for model in ("bert-large",) if quick else ("bert-large", "bert-48", "bert-72"):
        times = swept(seeds, **changed(model=model))
        rows.append(shown(model, times))
        ratio = times["PipeDream"] / times["SPP"]
        rows.append(Row(f"{model}: PipeDream over SPP", "> 1.2", f"{ratio:.2f}", ratio >= 1.1))
    return Section("Figure 9: numbers of layers", f"{set_up(seeds)} A gain of a tenth is accepted (S6).", rows)


def by_activations(seeds: range, quick: bool) -> Section:
    """Compare bytes between layers (figure 10)."""
    times = {factor: swept(seeds, **changed(activations=factor)) for factor in ((1, 4) if quick else (1, 2, 4, 8))}
    rows = [shown(f"activations x {factor}", each) for factor, each in times.items()]
    growth = times[max(times)]["SPP"] / times[1]["SPP"]
    rows.append(Row(f"SPP, x {max(times)} over x 1", "similar", f"{growth:.3f}", growth <= 1.1))
    return Section("Figure 10: bytes between layers", set_up(seeds), rows)


def figure_11(seeds: range) -> Section:
    """Compare W of PRM and the time under PE for each number of stages (figure 11, S5)."""
    counts = range(1, 17)
    slowest, times_ms = np.zeros((2, len(counts)))
    for seed in seeds:
        problem = simulated(seed)
        line = windows(problem, device_order(graph_of(problem)))
        batch = batch_of(problem, MICRO_BATCH * GRAINS)
        fed = [r for r in pruned_replicas(problem) if r <= batch.replicas_fed(1)]
        partitions = search(chain_of(problem, line, batch, fed, max(counts), unused=False), max(counts))
        for place, stages in enumerate(counts):
            if stages not in partitions:
                slowest[place], times_ms[place] = OOM, OOM
                continue
            plan = found_of(problem, line, batch, partitions[stages].parts[0]).allocation
            slowest[place] += partitions[stages].value_ns / 1e6 / len(seeds)
            times_ms[place] += makespan_ns(problem, plan, pipeline_execution(problem, plan)) / 1e6 / len(seeds)
    best = counts[int(np.argmin(times_ms))]
    later = slowest[3:]
    spread = float(later.max() / later.min() - 1)
    return Section(
        "Figure 11: numbers of stages",
        set_up(seeds),
        [
            Row("W of 1 to 16 stages, ms", "falls, then flat", " ".join(f"{w:.0f}" for w in slowest)),
            Row("W from 4 stages on", "stable", f"within {100 * spread:.1f} %", spread <= 0.05,
                "all-reduces across servers weigh more than on the measured V100: W falls until each of 8 stages has a "
                "server of its own; of more than 8 stages not all have more devices than layers: W is a layer's time"),
            Row("time of 1 to 16 stages, ms", "falls, then rises", " ".join(f"{t:.0f}" for t in times_ms)),
            Row("stages of the least time", "6", str(best), 4 <= best <= 10),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main("SPP", sections)
