"""DAPPLE's search: how long it takes, whether pruning keeps its value, and Table V of the paper.

Prints ``name value unit target ok|MISSED`` for each row. With ``--profiles DIR`` (DAPPLE's five profile texts, as its
repository ships them under ``profiling_results``) also one line for each cell of Table V that they cover: the plan
found, and the paper's. Reported, not gated: the shipped GNMT file is a GNMT-32, the paper's cell a GNMT-16, and the
released planner knows only common replication factors (ALGORITHMS 2.9).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster
from penstock.importers.pipedream import read_profile
from penstock.schemas.request import MemoryModel, NetworkModel, PlanRequest
from penstock.solvers.allocation import Allocation
from penstock.solvers.allocators.dapple.placement import POLICIES
from penstock.solvers.allocators.dapple.search import Rules, search
from penstock.solvers.allocators.dapple.tables import shape
from penstock.solvers.batches import Batch, batch_of
from penstock.solvers.network import Cable, Inside, Network
from penstock.solvers.problem import Device, Measured, MemoryRules, NetworkRules, Problem
from penstock.solvers.registry import PLANNERS

REPETITIONS = 3


class Model(NamedTuple):
    """A profile text of DAPPLE's repository, and Table V's row: plan and split for configurations A, B, C."""

    file: str
    batch: int
    profiled: int
    paper: tuple[str, str, str]


MODELS = (
    Model("vgg-19-pbs-32.txt", 2048, 32, ("DP", "DP", "15:1 13:6")),
    Model("gnmt-32-pbs-64-simplified.txt", 1024, 64, ("8:8 9:7", "8:8 9:7", "straight")),
    Model("bert-48-pbs-2.txt", 64, 2, ("8:8 23:25", "straight", "straight")),
    Model("xlnet-36-pbs-1.txt", 128, 1, ("8:8 18:18", "8:8 18:18", "straight")),
    Model("amoeba-36-pbs-1.txt", 128, 1, ("8:8 24:12", "11:5 27:9", "11:5 27:9")),
)


def main() -> None:
    """Speed first, then the same value without pruning, then Table V when the profiles are at hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, help="folder with DAPPLE's profile texts")
    arguments = parser.parse_args()
    _speed("search 60 layers x 16 devices (2x8)", _instance(60, (8, 8), 128), 8)
    _speed("search 60 layers x 16 devices (16x1)", _instance(60, (1,) * 16, 128), 8)
    _speed("search 50 layers x 32 devices (4x8)", _instance(50, (8,) * 4, 256), 8)
    _speed("search 50 layers x 32 devices (32x1)", _instance(50, (1,) * 32, 256), 8)
    for seed in range(4):
        _same_value(f"pruned = unpruned, 24 layers x 16 devices, seed {seed}", _instance(24, (8, 8), 64, seed))
    if arguments.profiles is not None:
        for model in MODELS:
            for column, name in enumerate("abc"):
                _cell(arguments.profiles, model, name, model.paper[column])


def _speed(name: str, problem: Problem, micro_batches: int) -> None:
    """Best of some runs of the search with its tables, warm, for one number of micro-batches and for a whole solve."""
    batch = batch_of(problem, problem.global_batch_size // micro_batches)
    base = shape(problem, POLICIES, False)
    search(problem, batch, None, base)
    best = min(_seconds(problem, batch) for _ in range(REPETITIONS))
    print(f"{name}, M = {batch.num_micro_batches} {best:.3f} s 1.0 {'ok' if best <= 1 else 'MISSED'}", flush=True)
    began = time.process_time()
    PLANNERS["dapple"].solve(problem)
    whole = time.process_time() - began
    print(f"{name}, planner dapple, every M {whole:.3f} s", flush=True)


def _seconds(problem: Problem, batch: Batch) -> float:
    began = time.process_time()
    search(problem, batch)
    return time.process_time() - began


def _same_value(name: str, problem: Problem) -> None:
    for micro_batches in (2, 8, 32):
        batch = batch_of(problem, problem.global_batch_size // micro_batches)
        base = shape(problem, POLICIES, False)
        values = [search(problem, batch, Rules(prune=prune), base).plans[0].latency_ns for prune in (True, False)]
        verdict = "ok" if values[0] == values[1] else "MISSED"
        print(f"{name}, M = {micro_batches} {values[0]} ns {values[1]} {verdict}", flush=True)


def _cell(folder: Path, model: Model, configuration: str, paper: str) -> None:
    """Plan one cell under the paper's rules (private network, its transfer and all-reduce times) and print it."""
    text = (folder / model.file).read_text()
    profile = read_profile(text, name=Path(model.file).stem, micro_batch_size=model.profiled)
    request = PlanRequest(
        profile=profile,
        topology=cluster(f"dapple-config-{configuration}"),
        global_batch_size=model.batch,
        min_slice=model.profiled,
        memory=MemoryModel(optimizer="adam", precision="full", buffers="none"),
        network=NetworkModel(sharing="private", transfer="dapple", all_reduce="flat"),
    )
    problem = to_problem(request)
    began = time.process_time()
    result = PLANNERS["dapple"].solve(problem, options={"allow_unused": False})
    seconds = time.process_time() - began
    cell = f"Table V {profile.name} config {configuration.upper()}"
    if result.best is None:
        print(f"{cell}: {result.why}", flush=True)
        return
    found = _family(result.best.allocation)
    same = found.split(" ")[0] == paper.split(" ")[0]
    bound = result.bounds[0].bound_ns
    print(
        f"{cell}: found {found} M={result.best.allocation.num_micro_batches}, paper {paper}: "
        f"{'same family' if same else 'differs'}; {result.best.value_ns / 1e6:.1f} ms, "
        f"{100 * (result.best.value_ns / bound - 1):.2f} % above the bound, {seconds:.2f} s",
        flush=True,
    )


def _family(allocation: Allocation) -> str:
    stages = allocation.stages
    if len(stages) == 1:
        return "DP"
    split = ":".join(str(stage.last - stage.first + 1) for stage in stages)
    if all(stage.replicas == 1 for stage in stages):
        return f"straight {split}"
    return f"{':'.join(str(stage.replicas) for stage in stages)} {split}"


def _instance(layers: int, nodes: tuple[int, ...], batch: int, seed: int = 0) -> Problem:
    """A chain of unequal layers on servers of 25 GB/s inside and 3 GB/s between."""
    draw = np.random.default_rng(seed)
    forward = np.exp(draw.normal(14.5, 0.4, layers)).astype(np.int64)
    parameters = np.exp(draw.normal(16.5, 0.6, layers)).astype(np.int64)
    boundary = np.exp(draw.normal(13.5, 0.3, layers - 1)).astype(np.int64)
    measured = Measured(1, forward, 2 * forward, forward, boundary.max() + 0 * forward, 0 * forward)
    names = tuple(f"n{i}/{j}" for i, size in enumerate(nodes) for j in range(size))
    hosts = tuple(f"n{i}" for i in range(len(nodes)))
    node_of = tuple(i for i, size in enumerate(nodes) for _ in range(size))
    network = Network(
        names,
        hosts,
        node_of,
        (Inside("pairs", 25 * 10**9, 0, True),) * len(nodes),
        tuple(Cable(host, "switch", 3 * 10**9, 0, True) for host in hosts),
    )
    prefix = np.concatenate(([0], np.cumsum(parameters)))
    return Problem(
        layer_names=tuple(f"layer{i}" for i in range(layers)),
        parameter_bytes=prefix,
        trainable_bytes=prefix,
        update_ns=np.zeros(layers + 1, dtype=np.int64),
        forward_bytes=boundary,
        backward_bytes=boundary,
        boundary_tensors=tuple((("x", int(b), int(b)),) for b in boundary),
        cuttable=np.ones(layers - 1, dtype=bool),
        shared_parameters=(),
        measured={"V100": (measured,)},
        linear=True,
        kind_source={"V100": ("V100", 1.0)},
        devices=tuple(Device(n, node_of[d], "V100", 16 * 10**9, 0, None) for d, n in enumerate(names)),
        network=network,
        global_batch_size=batch,
        micro_batch_sizes=(),
        min_slice=1,
        memory=MemoryRules(1, 2, False, 0, True),
        rules=NetworkRules(False, "half", "nic", "hierarchical", 25_000_000, True),
        recompute="auto",
        expected_error=0.0,
    )


if __name__ == "__main__":
    main()
