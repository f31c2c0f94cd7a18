"""PipeDream (Narayanan et al., SOSP 2019), and DAPPLE's comparisons with it: Table VII and figure 13 of DAPPLE.

Costs come from the shipped analytic profiles on V100, in DAPPLE's network (``dapple.problem_of``). With
``--profiles DIR`` Table VII is planned from DAPPLE's profile texts, and the released optimizer's numbers are computed
from PipeDream's: the script searches for files anywhere below DIR.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from dapple import SLICES, TEXTS, family, problem_of
from paper_models import profile
from report import Row, Section, main

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster
from penstock.importers.pipedream import read_profile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import batch_of, candidates
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.pipedream.hierarchy import Chain, Level, Plan, Rules, allocated, chain_of, partition
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.schedules.early_backward import early_backward, policy_b
from penstock.solvers.solve.driver import judged, solve

BATCHES = {"vgg-19": 1024, "amoebanet-36": 128, "bert-large": 128, "xlnet-36": 128}
TABLE_VII = {
    "vgg-19": ("14:2, layers 17:9", "8:6:1:1, layers 12:6:2:6"),
    "amoebanet-36": ("8:8, layers 31:13", "straight"),
    "bert-large": ("8:8, layers 14:13", "2:6:2:2:2:2, layers 4:9:3:3:3:5"),
    "xlnet-36": ("8:8, layers 23:19", "straight"),
}
SLICE = SLICES | {"bert-large": 2}
RELEASED_BANDWIDTHS = (4_294_967_296, 2_147_483_648)
"""The bandwidths inside and between 8 x 2 machines, as in issue 37 of the released optimizer's repository."""
RELEASED_TABLE = {
    (0, 1): 0.005865730156898499,
    (0, 2): 0.007115605156898499,
    (0, 3): 0.027072026604413987,
    (0, 38): 0.09235717243739539,
    (0, 40): 0.09235717243739539,
    (1, 2): 0.0012498750000000001,
    (1, 3): 0.02120629644751549,
    (1, 40): 0.0856534978594099,
    (2, 3): 0.01995642144751549,
    (2, 40): 0.08422506928798132,
}
"""A^1(i -> j - 1, 8) for VGG-16 as issue 37 prints it, in seconds."""
PROFILED = 128
"""The samples per micro-batch of PipeDream's VGG-16 profile."""
SHIPPED = {16: "15:1", 8: "7:1", 4: "3:1"}
"""The replicas of VGG-16's stages in the runtime configurations of the released repository."""
FORMULAS = {
    "paper": Rules(),
    "released": Rules(released=True),
    "with transfers": Rules(released=True, compression=1.0),
}
CAUSE_OF_VII = (
    "profile and bandwidths are not the paper's, and the micro-batch that it gave PipeDream's planner is not stated"
)
TEN_GBIT = 10**10 // 8
INSTANCES = 200
SECOND = 1e9
INFINITE = float("inf")


def sections(quick: bool, profiles: Path | None) -> Iterator[Section]:
    """Yield every table and figure."""
    yield table_vii(quick, profiles)
    yield figure_13(quick, profiles)
    yield random_instances(quick)
    if profiles is not None:
        yield released(profiles)


def planned(model: str, shape: str, profiles: Path | None = None) -> Problem:
    """Return a model of Table VII at the micro-batch at which it was profiled."""
    source: str | ModelProfile = model
    if profiles is not None and model in TEXTS:
        file, rows = TEXTS[model]
        source = read_profile(find(profiles, file).read_text(), name=model, micro_batch_size=rows)
    return problem_of(source, shape, BATCHES[model], SLICE[model])


def find(folder: Path, file: str) -> Path:
    """Return a file by its name from anywhere below the folder."""
    matches = sorted(folder.rglob(file))
    if not matches:
        raise FileNotFoundError(f"no {file} below {folder}")
    return matches[0]


def table_vii(quick: bool, profiles: Path | None) -> Section:
    """Compare the plans of both planners for two servers of eight."""
    rows = []
    for model in ("bert-large", "vgg-19") if quick else tuple(TABLE_VII):
        problem = planned(model, "dapple-config-a", profiles)
        ours = solve(problem, "dapple").best
        for system, wanted in zip(("DAPPLE", "PipeDream"), TABLE_VII[model], strict=True):
            if system == "DAPPLE":
                plans = {"": None if ours is None else ours.allocation}
            else:
                plans = {name: partitioned(problem, SLICE[model], rules) for name, rules in FORMULAS.items()}
            shown = {name: "does not fit" if plan is None else described(plan) for name, plan in plans.items()}
            same = any(text.split(",")[0] == wanted.split(",")[0] for text in shown.values())
            text = "; ".join(f"{name}: {text}" if name else text for name, text in shown.items())
            note = "" if same else CAUSE_OF_VII
            if system == "DAPPLE" and not same and ours is not None:
                note = (
                    f"its best {wanted.split(',')[0]} takes {best_of_two(problem, wanted) / ours.value_ns:.2f} of that"
                )
            rows.append(Row(f"{model} ({BATCHES[model]}), {system}", wanted, text, same, note))
    setup = (
        "Replicas, and layers, of the stages on two servers of configuration A, compared by their replicas. DAPPLE's "
    )
    setup += (
        "planner uses all devices. PipeDream's partition of a micro-batch of Table II, by the paper's formula and by "
    )
    setup += (
        "the released optimizer's, without and with the boundaries' transfers (`--activation_compression_ratio 1`); "
    )
    setup += "a row holds where one of them does."
    return Section("DAPPLE's Table VII: plans of DAPPLE and PipeDream", setup, rows)


def best_of_two(problem: Problem, wanted: str) -> float:
    """Return the time of the quickest plan of two stages with these replicas, over all cuts and micro-batches."""
    first, second = (int(count) for count in wanted.split(",")[0].split(":"))
    devices = tuple(range(first + second))
    best = INFINITE
    for batch in candidates(problem, (first, second)):
        if batch.replicas_fed(problem.min_slice) < max(first, second):
            continue
        for cut in (np.flatnonzero(problem.cuttable) + 1).tolist():
            stages = (Stage(0, cut - 1, devices[:first]), Stage(cut, problem.num_layers - 1, devices[first:]))
            allocation = single_pipeline(stages, batch.num_micro_batches)
            orders = early_backward(problem, allocation, warmup=policy_b(problem, allocation))
            best = min(best, makespan_ns(problem, allocation, orders))
    return best


def partitioned(problem: Problem, slice_rows: int, rules: Rules) -> Allocation | None:
    """Return PipeDream's partition of one profiled micro-batch."""
    rated = allocated(problem, batch_of(problem, slice_rows), rules)
    return None if rated is None else rated.allocation


def flushed(problem: Problem, slice_rows: int, rules: Rules) -> float:
    """Return the simulated time of PipeDream's partition of one profiled micro-batch under P_A."""
    allocation = partitioned(problem, slice_rows, rules)
    if allocation is None:
        return INFINITE
    overlaps = (problem.rules.overlap_all_reduce,)
    best = judged(problem, "pipedream", [Proposal(allocation, ("early-backward",), "A", overlaps)]).best
    return INFINITE if best is None else float(best.value_ns)


def described(allocation: Allocation) -> str:
    """Return a text such as ``8:8, layers 14:13``, ``DP`` or ``straight``."""
    replicas = family(allocation)
    if replicas in ("DP", "straight"):
        return replicas
    return f"{replicas}, layers {':'.join(str(stage.last - stage.first + 1) for stage in allocation.stages)}"


def figure_13(quick: bool, profiles: Path | None) -> Section:
    """Compare speed-ups over data parallelism with a flush."""
    rows, gains = [], []
    for model in ("bert-large", "vgg-19") if quick else tuple(TABLE_VII):
        for servers in (2,) if quick else (2, 4):
            problem = planned(model, f"{servers}x8xV100", profiles)
            parallel = value(problem, "dp")
            ours = value(problem, "dapple")
            fixed = replace(problem, micro_batch_sizes=(SLICE[model],))
            theirs = {name: flushed(fixed, SLICE[model], rules) for name, rules in FORMULAS.items()}
            slowest = max(each for each in theirs.values() if each < INFINITE)
            gains.append(slowest / ours)
            text = f"DAPPLE {times(parallel, ours)}; PipeDream " + ", ".join(
                f"{name} {times(parallel, each)}" for name, each in theirs.items()
            )
            best = min(theirs.values())
            rows.append(Row(f"{model}, {servers}x8", "DAPPLE faster", text, ours <= best))
    rows.append(Row("largest gain over a plan of PipeDream's", "3.23", f"{max(gains):.2f}"))
    setup = (
        "Speed-up over data parallelism with overlap of DAPPLE's plan and of PipeDream's partitions (as in Table VII), "
    )
    setup += (
        "all flushed; PipeDream's micro-batches are those that it was profiled with, under P_A. The paper's figure has "
    )
    setup += "no readable values but the largest gain. `-` where data parallelism does not fit."
    return Section("DAPPLE's figure 13: speed-up over data parallelism", setup, rows)


def times(parallel: float, other: float) -> str:
    """Return a speed-up as text, "-" where data parallelism does not fit."""
    if other >= INFINITE:
        return "does not fit"
    return "-" if parallel >= INFINITE else f"{parallel / other:.2f}"


def value(problem: Problem, planner: str, **options: object) -> float:
    """Return the simulated time per global batch."""
    best = solve(problem, planner, options=options).best
    return INFINITE if best is None else float(best.value_ns)


def random_instances(quick: bool) -> Section:
    """Check that DAPPLE's value is not above PipeDream's plan."""
    count = INSTANCES // 10 if quick else INSTANCES
    misses, gains = [], []
    for seed in range(count):
        problem = drawn(seed)
        ours, theirs = value(problem, "dapple"), value(problem, "pipedream", paper=True)
        if theirs < INFINITE:
            gains.append(theirs / ours)
        if ours > theirs:
            misses.append(f"instance {seed}: {100 * (ours / theirs - 1):.2f} %")
    rows = [
        Row(
            f"DAPPLE ≤ PipeDream, {count} instances",
            "every one",
            f"{count - len(misses)}",
            not misses,
            "; ".join(misses),
        ),
        Row("PipeDream's time over DAPPLE's, mean and largest", "", f"{np.mean(gains):.3f}, {max(gains):.2f}"),
    ]
    setup = (
        "Chains of 4 to 12 layers on two to four nodes, 16 to 64 samples, both flushed, in a shared network; PipeDream "
    )
    setup += "by its formula under P_A, every number of micro-batches."
    return Section("DAPPLE against PipeDream on random instances", setup, rows)


def drawn(seed: int) -> Problem:
    """Return a random chain on random nodes."""
    draw = np.random.default_rng(seed)
    layers = int(draw.integers(4, 13))
    base = profile("bert-large").model_dump(mode="json")
    layer, cost = base["layers"][1], base["measurements"][0]["layers"][1]
    sizes = draw.integers(10**5, 4 * 10**7, layers).tolist()
    forward = draw.integers(10**5, 5 * 10**6, layers).tolist()
    model_profile = ModelProfile.parse(
        base
        | {
            "name": f"instance {seed}",
            "layers": [layer | {"name": f"layer.{i}", "parameter_bytes": size} for i, size in enumerate(sizes)],
            "boundaries": [
                [{"name": "x", "bytes_per_sample": size, "gradient_bytes_per_sample": size}]
                for size in draw.integers(10**4, 10**6, layers - 1).tolist()
            ],
            "shared_parameters": [],
            "variants": [],
            "classes": None,
            "measurements": [
                {
                    "device_kind": "V100",
                    "micro_batch_size": 1,
                    "layers": [
                        cost | {"forward_ns": f, "backward_ns": 2 * f, "backward_weight_ns": None} for f in forward
                    ],
                }
            ],
        }
    )
    shape = ("2x2xV100", "4x1xV100", "2x4xV100", "3x2xV100")[int(draw.integers(4))]
    batch = int(draw.choice([16, 32, 64]))
    return to_problem(PlanRequest(profile=model_profile, topology=cluster(shape), global_batch_size=batch))


def released(profiles: Path) -> Section:
    """Compare with the released optimizer's output on its VGG-16 profile, and the plans that its repository ships."""
    chain = vgg_16(profiles)
    inside, between = (Level(m, b) for m, b in zip((8, 2), RELEASED_BANDWIDTHS, strict=True))
    rows = []
    worst = 0.0
    for (i, j), seconds in RELEASED_TABLE.items():
        plan = partition(between_places(chain, i, j), (inside,), Rules(released=True, compression=1.0))
        worst = max(worst, INFINITE if plan is None else abs(plan.value_ns / SECOND - seconds))
    rows.append(
        Row(
            "A^1 on 8 machines, ten entries of issue 37: largest difference",
            "0",
            f"{worst * SECOND:.1f} ns",
            worst < 2 / SECOND,
        )
    )
    both = partition(chain, (inside, between), Rules(released=True, compression=1.0))
    rows.append(Row("8 x 2 machines of issue 37", "", "none" if both is None else split(both)))
    for machines, wanted in SHIPPED.items():
        plans = {name: partition(chain, (Level(machines, TEN_GBIT),), rules) for name, rules in FORMULAS.items()}
        text = "; ".join(f"{name}: {'none' if plan is None else split(plan)}" for name, plan in plans.items())
        same = any(plan is not None and split(plan).split(",")[0] == wanted for plan in plans.values())
        rows.append(Row(f"VGG-16, {machines} machines in a row, 10 Gbit/s", wanted, text, same))
    setup = (
        "PipeDream's VGG-16 profile (128 samples). The first row compares with what the released optimizer printed, "
    )
    setup += "rounded up to whole nanoseconds here; the plans are those of its repository's runtime for VGG-16, whose "
    setup += "bandwidths are not stated. Memory is not limited, as by its default."
    return Section("The released optimizer on its own profile", setup, rows)


def vgg_16(profiles: Path) -> Chain:
    """Return PipeDream's VGG-16 as the formula's chain."""
    model_profile = read_profile(find(profiles, "vgg16.txt").read_text(), name="vgg-16", micro_batch_size=PROFILED)
    request = PlanRequest(profile=model_profile, topology=cluster("2x8xV100"), global_batch_size=16 * PROFILED)
    problem = to_problem(request)
    return replace(chain_of(problem, batch_of(problem, PROFILED)), room_bytes=2**60)


def between_places(chain: Chain, i: int, j: int) -> Chain:
    """Return a part of a chain, including what leaves it.

    A(i -> j - 1) counts the transfer after its last layer.
    """
    part = slice(i, j + 1)
    return Chain(
        chain.places[part] - i,
        chain.work_ns[part, part],
        chain.weight_bytes[part, part],
        chain.stashed_bytes[part, part],
        chain.boundary_bytes[part],
        chain.room_bytes,
    )


def split(plan: Plan) -> str:
    """Return a text such as ``15:1, layers 24:16``."""
    replicas = ":".join(str(len(part.positions)) for part in plan.parts)
    return f"{replicas}, layers {':'.join(str(part.stop - part.first) for part in plan.parts)}"


if __name__ == "__main__":
    main("PipeDream", sections)
