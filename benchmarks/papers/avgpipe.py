"""AvgPipe (Chen et al., PPoPP 2023): figures 7, 11, 15, 17, 18 and 19.

Costs come from the shipped analytic profiles on V100 and the paper's cluster, 3 nodes of 2 (2 for AWD), 1 Gbit/s. The
simulator shares a processor by utilisation, which is taken from the profile's scaling: the best time per sample over
the time per sample at the size of the micro-batches. Every pipeline has PipeDream's straight partition, recomputation
is off, and the pipelines before AvgPipe have as many micro-batches as stages, as the paper says of Dapple.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from paper_models import profile
from report import Row, Section, main

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster
from penstock.schemas.request import MemoryModel, PlanRequest
from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.judge.shared_processor import simulate_sharing
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch, batch_of, candidates
from penstock.solvers.model.problem import PipelineRun, Problem, RankRun
from penstock.solvers.model.schedule import Schedule
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.avgpipe.partition import Stages, partitions
from penstock.solvers.planners.avgpipe.planner import orders_of
from penstock.solvers.planners.avgpipe.predictor import Degrees, Mode
from penstock.solvers.planners.avgpipe.tuning import Tuner, best_partitions
from penstock.solvers.planners.simple.dp import data_parallel
from penstock.solvers.schedules.advance_forward import advance_forward, climb
from penstock.solvers.schedules.early_backward import early_backward, policy_a
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.periodic.eager import eager

MODELS = {"gnmt-16": (128, 3, "adam"), "bert-large": (32, 3, "adam"), "awd-lstm": (40, 2, "sgd")}
"""The set-up of section 7: batch, nodes and optimizer."""
MOST_PIPELINES = 8
BATCHES_PER_SETTING, BATCHES_OF_THE_PROFILE = 10, 20
SPEEDUPS = {
    "gnmt-16": {"GPipe": 1.3, "PipeDream": 1.6, "2BW": 1.6},
    "bert-large": {"PyTorch": 1.3, "GPipe": 1.1, "2BW": 1.8},
    "awd-lstm": {"PyTorch": 7.0, "GPipe": 1.8, "2BW": 1.8, "PipeDream": 3.0},
}
"""The speed-ups of figure 11, section 7.1.1.

They are of training time to the target, so with the epochs that each system needs.
"""

FILLED = "the second pipeline fills the stalls of the first, so that forwards in advance have nothing left to gain"
LINKS = "the gain ends where the links are full: GPipe's time per sample hardly changes with the batch, as printed"
BUBBLE = "with K stages a bubble costs at most a factor of K = 6, whatever printed 23 had in it"
RING = "at 1 Gbit/s a ring over all gradients takes {:.1f} s, so data parallelism cannot be as fast as printed"
STEADY = "judged in a steady state without a flush, which loses nothing but what its links are loaded with"
STARTS = "the start of the processes, which is part of the paper's minutes, is not simulated"
SMALL = "an analytic micro-batch of one sample loses at most half of a processor, which other pipelines win back"


class Case(NamedTuple):
    """A model on its cluster: the request, and the partition of its pipelines."""

    problem: Problem
    stages: Stages
    batches: tuple[Batch, ...]


def sections(quick: bool, _profiles: Path | None) -> Iterator[Section]:
    """Yield every figure that prediction and simulation can check."""
    models = ["awd-lstm"] if quick else list(MODELS)
    yield figure_7()
    yield averaging()
    yield forwards_in_advance()
    yield figure_17(models)
    yield figure_11(models)
    if not quick:
        yield figure_15()
    yield figures_18_and_19(models)


@cache
def case(model: str, batch: int = 0) -> Case:
    """Return the paper's set-up of a model, with a measured run of its pipelines at the smallest micro-batches."""
    usual, nodes, optimizer = MODELS[model]
    topology = cluster("avgpipe-3x2")
    assert topology.uniform is not None
    request = PlanRequest(
        profile=profile(model),
        topology=topology.model_copy(update={"uniform": topology.uniform.model_copy(update={"nodes": nodes})}),
        global_batch_size=batch or usual,
        memory=MemoryModel(optimizer=optimizer),
        update_rules=("elastic_averaging",),
        recompute="never",
    )
    problem = to_problem(request)
    batches = candidates(problem)
    stages = best_partitions(problem, batches, partitions(problem, batches, problem.num_devices))[0][0]
    return Case(replace(problem, pipeline_run=measured_run(problem, stages, batches)), stages, batches)


def measured_run(problem: Problem, stages: Stages, batches: tuple[Batch, ...]) -> PipelineRun:
    """Return one pipeline with the smallest micro-batches.

    Times are the simulator's, utilisation comes from the profile's scaling.
    """
    number = batches[-1].num_micro_batches
    measured = Tuner(problem, batches, stages, 1).measured(batches[-1])
    ranks = []
    for stage, rank in zip(stages, measured.ranks, strict=True):
        per_sample = {batch.most_rows: _per_sample(problem, stage, batch.most_rows) for batch in batches}
        share = min(per_sample.values()) / per_sample[batches[-1].most_rows]
        flying = min(len(stages) - stages.index(stage), number)
        ranks.append(
            RankRun(
                rank.compute_ns,
                rank.transfer_ns,
                (round(share * 1_000_000),),
                rank.reference_bytes,
                rank.parallel_bytes - rank.reference_bytes,
                rank.data_bytes // flying,
            )
        )
    return PipelineRun(number, 1, tuple(ranks))


def _per_sample(problem: Problem, stage: Stage, rows: int) -> float:
    cost = stage_costs(problem, stage, rows)
    return (cost.forward_ns + cost.backward_ns) / rows


def figure_7() -> Section:
    """Check claims A1, A2: two stages, eight micro-batches, a full-duplex channel."""
    problem, allocation = _uniform(2, 8, 4, 4, 1)
    orders_of_name = {
        "AFAB": advance_forward(problem, allocation, afab=True),
        "1F1B": advance_forward(problem, allocation),
        "AFP": advance_forward(problem, allocation, delta=1),
    }
    judged = {name: simulate(problem, allocation, orders) for name, orders in orders_of_name.items()}
    times = {name: timeline.time_per_global_batch_ns / 4 for name, timeline in judged.items()}
    peaks = {name: timeline.uses[0].memory.activations for name, timeline in judged.items()}
    stalls = {name: _stalls(timeline) for name, timeline in judged.items()}
    rows = [
        Row("AFAB, 1F1B: communication blocks", "2, 9", f"{stalls['AFAB']}, {stalls['1F1B']}",
            (stalls["AFAB"], stalls["1F1B"]) == (2, 9)),
        Row("AFP against AFAB: time", "the same", f"{times['AFP']:g} = {times['AFAB']:g}",
            times["AFP"] == times["AFAB"] == 18.5),
        Row("AFP against AFAB: peak memory of activations", "3/8", f"{peaks['AFP']}/{peaks['AFAB']}",
            (peaks["AFP"], peaks["AFAB"]) == (3, 8)),
        Row("1F1B: time, micro-batches in flight on GPU 1", "longer, 2", f"{times['1F1B']:g}, {peaks['1F1B']}",
            times["1F1B"] > times["AFAB"] and peaks["1F1B"] == 2),
    ]  # fmt: skip
    setup = "K = 2, M = 8; forward = backward = 1, a transfer 0.25 (the picture is lost; the counts fix the ratio)."
    return Section("Figure 7: schedules on one batch", setup, rows)


def forwards_in_advance() -> Section:
    """Check claim A3, and where the tapered δ reaches the time of all forwards first (ALGORITHMS 6.2)."""
    rows = []
    for transfer in (1, 3, 6, 10):
        problem, allocation = _uniform(6, 32, 10, 20, transfer)
        afab = simulate(problem, allocation, advance_forward(problem, allocation, afab=True)).time_per_global_batch_ns
        times = [
            simulate(problem, allocation, advance_forward(problem, allocation, delta=delta)).time_per_global_batch_ns
            for delta in range(6)
        ]
        reached = times.index(afab) if afab in times else -1
        got = f"{times[0] / 10:g} → {afab / 10:g} at δ = {reached}, peak {6 + reached} of 32"
        rows.append(Row(f"transfer {transfer / 10:g}: 1F1B → AFAB", "AFAB's time, little memory", got, reached >= 0))
    problem, allocation = _uniform(6, 32, 10, 20, 0)
    equal = {
        simulate(problem, allocation, advance_forward(problem, allocation, delta=d)).time_per_global_batch_ns
        for d in range(6)
    }
    rows.append(Row("no transfers: δ = 0 … 5", "δ = 0 suffices (4.2)", f"{len(equal)} distinct time", len(equal) == 1))
    return Section(
        "Section 4.2: advance forward propagation", "K = 6, M = 32; forward 1, backward 2, full duplex.", rows
    )


def averaging() -> Section:
    """Check claim A4: the equations of section 3.2 in the order of ALGORITHMS 6.1.

    They are replayed on quadratic losses.
    """
    drift, trained = {}, {}
    for diluted_first in (True, False):
        for pipelines in (1, 4):
            models, reference, mean = _averaged(pipelines, diluted_first)
            drift[pipelines, diluted_first] = float(np.abs(reference - mean).max())
            trained[pipelines, diluted_first] = models
    plain = float(np.abs(trained[1, True] - _plain()).max())
    far = drift[4, True]
    rows = [
        Row("distance of the reference from the average of 4 models", "stays the average", f"{far:.0e}", far <= 1e-12),
        Row("one pipeline against plain training", "–", f"{plain:.0e}", plain <= 1e-12),
        Row("the average if updated weights were diluted", "–", f"{drift[4, False]:.0e}", None, "it drifts: R-28"),
    ]
    return Section("Section 3.2: elastic averaging", "20 iterations of gradient descent with momentum, fp64.", rows)


def _averaged(pipelines: int, diluted_first: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the models, the reference and the models' average after 20 iterations."""
    draw = np.random.default_rng(0)
    targets = draw.normal(size=(pipelines, 20, 50))
    models, momentum, reference = np.zeros((pipelines, 50)), np.zeros((pipelines, 50)), np.zeros(50)
    for step in range(20):
        momentum = 0.9 * momentum + (models - targets[:, step])
        update = -0.1 * momentum
        old = models if diluted_first else models + update
        models = (1 - 1 / pipelines) * old + reference / pipelines + (update if diluted_first else 0.0)
        reference = reference + update.mean(axis=0)
    return models, reference, models.mean(axis=0)


def _plain() -> np.ndarray:
    """Return one model trained alone on the same targets."""
    targets = np.random.default_rng(0).normal(size=(1, 20, 50))
    model, momentum = np.zeros((1, 50)), np.zeros((1, 50))
    for step in range(20):
        momentum = 0.9 * momentum + (model - targets[:, step])
        model = model - 0.1 * momentum
    return model


def figure_17(models: list[str]) -> Section:
    """Compare three schedules at the paper's settings, and with one pipeline alone."""
    settings = {"gnmt-16": Degrees(64, 2), "bert-large": Degrees(16, 2), "awd-lstm": Degrees(1, 2)}
    printed = {
        "gnmt-16": ("1.15, +20.8 %", "1.12, +2.2 %"),
        "bert-large": ("1.20, +172.0 %", "1.14, +30.0 %"),
        "awd-lstm": ("1.00, +0.0 %", "1.00, +0.0 %"),
    }
    rows = []
    for model in models:
        problem, stages, batches = case(model)
        tuner = Tuner(problem, batches, stages, MOST_PIPELINES)
        for pipelines in (1, settings[model].num_pipelines):
            allocation = tuner.allocation(settings[model]._replace(num_pipelines=pipelines))
            judged = [
                simulate_sharing(problem, allocation, advance_forward(problem, allocation, delta=delta))
                for delta in range(len(stages))
            ]
            afab = simulate_sharing(problem, allocation, advance_forward(problem, allocation, afab=True))
            best = min(judged, key=lambda timeline: timeline.time_per_global_batch_ns)
            delta, climbed = judged.index(best), _climbed(tuner, allocation)
            name = f"{model}, M = {settings[model][0]}, N = {pipelines}"
            alone, note = pipelines == 1, "" if model == "awd-lstm" else FILLED
            holds = afab.time_per_global_batch_ns <= judged[0].time_per_global_batch_ns if alone else None
            what = f"{name}: AFAB over 1F1B, memory"
            rows.append(Row(what, printed[model][0], _against(afab, judged[0]), holds, "" if alone else note))
            holds = _whole_memory(best) <= _whole_memory(afab) and (delta > 0 or model == "awd-lstm") if alone else None
            what = f"{name}: AFP (δ = {delta}; algorithm 1 stops at {climbed}) over 1F1B, memory"
            rows.append(Row(what, printed[model][1], _against(best, judged[0]), holds))
    setup = "Speedup over 1F1B and growth of the memory of all GPUs; BERT's +30.0 % is 2.72 × (1 - 0.522) - 1."
    return Section("Figure 17: schedules under elastic averaging", setup, rows)


def figure_11(models: list[str]) -> Section:
    """Compare AvgPipe with each system before it, within that system's memory."""
    rows = []
    for model in models:
        problem, stages, batches = case(model)
        for name, (timeline, capacity) in before_avgpipe(problem, stages).items():
            printed = SPEEDUPS[model].get(name)
            text = "–" if printed is None else f"{printed}"
            if timeline.peak_memory_bytes > capacity:
                need = f"{timeline.peak_memory_bytes / 1e9:.1f} of {capacity / 1e9:.0f} GB"
                rows.append(Row(f"{model}, {name}", text, f"does not fit: {need}"))
                continue
            setting = tuned(_capped(problem, timeline.peak_memory_bytes), stages, batches, "traverse")
            if setting is None:
                got = "no pipeline fits next to the reference model and its accumulator"
                rows.append(Row(f"{model}, AvgPipe({name})", text, got, None if printed is None else False))
                continue
            ratio = timeline.time_per_global_batch_ns / setting.time_ns
            got = f"{ratio:.2f} (M = {setting.degrees[0]}, N = {setting.degrees[1]})"
            memory = f"{timeline.peak_memory_bytes / 1e9:.2f} GB"
            what = f"{model}, AvgPipe({name}) over {name}, in {memory}"
            note = _why(problem, name) if printed is not None and abs(ratio / printed - 1) > 0.25 else ""
            rows.append(Row(what, text, got, None if printed is None else ratio > 1.0, note))
    setup = (
        "Time per global batch of each system over AvgPipe's, whose GPUs have the memory of that system's fullest one; "
        "PipeDream takes a batch as one micro-batch. A check holds where AvgPipe is faster, as printed."
    )
    return Section("Figures 11, 12: training time in the same memory", setup, rows)


def _why(problem: Problem, name: str) -> str:
    """Return the reason why a system is that much slower or faster than the paper's."""
    if name == "PyTorch":
        devices = tuple(range(problem.num_devices))
        return RING.format(all_reduce_ns(problem, int(problem.trainable_bytes[-1]), devices) / 1e9)
    return STEADY if name in ("PipeDream", "2BW") else ""


def figure_15() -> Section:
    """Compare GNMT with batches from 64 to 256: GPipe, and AvgPipe in GPipe's memory."""
    rows, ratios = [], []
    for batch, printed in ((64, "1.3"), (128, "1.3"), (256, "2.6")):
        problem, stages, batches = case("gnmt-16", batch)
        timeline, _capacity = before_avgpipe(problem, stages)["GPipe"]
        setting = tuned(_capped(problem, timeline.peak_memory_bytes), stages, batches, "traverse")
        assert setting is not None
        per_sample = timeline.time_per_global_batch_ns / batch / 1e6
        ratios.append(timeline.time_per_global_batch_ns / setting.time_ns)
        got = f"{ratios[-1]:.2f} (M = {setting.degrees[0]}, N = {setting.degrees[1]})"
        what = f"batch {batch}: GPipe {per_sample:.2f} ms a sample; AvgPipe(G) faster by"
        rows.append(Row(what, printed, got, ratios[-1] > 1.0, LINKS if batch == 256 else ""))
    grows = ratios == sorted(ratios)
    rows.append(Row("the gain grows with the batch", "yes", "yes" if grows else "no", grows))
    return Section("Figure 15: GNMT with other batches", "Time per sample is the paper's time per epoch.", rows)


def figures_18_and_19(models: list[str]) -> Section:
    """Compare tunings: their results and their costs, all on the paper's GPUs of 32 GB (claims A5, A6)."""
    slower = {"gnmt-16": ("1.5", "23"), "bert-large": ("1.5", "23"), "awd-lstm": ("15", "1.0")}
    cost = {"gnmt-16": "> 50", "bert-large": "> 50", "awd-lstm": "13.5"}
    rows = []
    for model in models:
        problem, stages, batches = case(model)
        best = tuned(problem, stages, batches, "traverse")
        assert best is not None
        checks: list[tuple[str, Mode, str, float, float]] = [
            ("profile", "wall", "nearly 1.0", 0.0, 1.1),
            ("profile", "paper", "nearly 1.0", 0.0, 1.2),
            ("max_num", "wall", slower[model][0], 1.0, np.inf),
            ("max_size", "wall", slower[model][1], 0.0 if model == "awd-lstm" else 1.0, np.inf),
        ]
        for tuning, mode, printed, low, high in checks:
            setting = tuned(problem, stages, batches, tuning, mode)
            assert setting is not None
            ratio = setting.time_ns / best.time_ns
            name = f"profile, formulas {'as printed' if mode == 'paper' else 'of wall time'}"
            what = f"{model}: {name if tuning == 'profile' else tuning} over traverse"
            got = f"{ratio:.2f} (M = {setting.degrees[0]}, N = {setting.degrees[1]})"
            holds = low < ratio <= high
            note = {"max_num": SMALL, "max_size": "" if model == "awd-lstm" else BUBBLE}.get(tuning, "")
            rows.append(Row(what, printed, got, holds, note))
        traversed_ns, profiled_ns = tuning_cost_ns(problem, stages, batches)
        times = traversed_ns / profiled_ns
        what = f"{model}: time of traverse over the profile's run"
        rows.append(Row(what, cost[model], f"{times:.0f}", times > 10, STARTS if model == "awd-lstm" else ""))
        got = f"M = {best.degrees[0]}, N = {best.degrees[1]}"
        rows.append(Row(f"{model}: the best setting", "64, 2 / 16, 2–3 / 1, 2", got))
    setup = (
        f"Every setting with up to {MOST_PIPELINES} pipelines, advance forward propagation at its best δ. Time spent, "
        f"simulated: {BATCHES_PER_SETTING} iterations of every setting, {BATCHES_OF_THE_PROFILE} of the profiled one."
    )
    return Section("Figures 18, 19: tuning the degrees", setup, rows)


class TunedSetting(NamedTuple):
    """A setting with its best order: time per global batch."""

    degrees: Degrees
    time_ns: int


def settings(tuner: Tuner, tuning: str) -> list[Degrees]:
    """Return the settings of a tuning.

    The two guidelines have the most micro-batches, or the largest, and then as many pipelines as fit.
    """
    if tuning == "traverse":
        return tuner.settings()
    if tuning == "profile":
        return [tuner.predicted()]
    number = tuner.batches[-1 if tuning == "max_num" else 0].num_micro_batches
    return [tuner.first_that_fits(Degrees(number, n) for n in range(tuner.most_pipelines, 0, -1))]


@cache
def tuned(
    problem: Problem, stages: Stages, batches: tuple[Batch, ...], tuning: str, mode: Mode = "wall"
) -> TunedSetting | None:
    """Return the result of a tuning, with the best number of forwards in advance that fits."""
    tuner = Tuner(problem, batches, stages, MOST_PIPELINES, mode)
    candidates = []
    for degrees in settings(tuner, tuning):
        allocation = tuner.allocation(degrees)
        times = [tuner.time_ns(allocation, orders) for orders in orders_of(tuner, allocation)]
        candidates += [TunedSetting(degrees, time) for time in times if time is not None]
    return min(candidates, key=lambda each: (each.time_ns, each.degrees[::-1]), default=None)


def tuning_cost_ns(problem: Problem, stages: Stages, batches: tuple[Batch, ...]) -> tuple[int, int]:
    """Return the time of trying every setting, and the time of the profile, on the simulated GPUs."""
    tuner = Tuner(problem, batches, stages, MOST_PIPELINES)
    spent = 0
    for degrees in tuner.settings():
        allocation = tuner.allocation(degrees)
        timeline = simulate_sharing(problem, allocation, advance_forward(problem, allocation))
        spent += BATCHES_PER_SETTING * timeline.window_ns[1]
    profiled = tuner.allocation(Degrees(batches[-1].num_micro_batches, 1))
    timeline = simulate_sharing(problem, profiled, advance_forward(problem, profiled))
    return spent, BATCHES_OF_THE_PROFILE * timeline.window_ns[1]


@cache
def before_avgpipe(problem: Problem, stages: Stages) -> dict[str, tuple[Timeline, int]]:
    """Return the five systems: their timelines, and the memory of a GPU."""
    pipeline = single_pipeline(stages, min(len(stages), problem.global_batch_size))
    whole = single_pipeline(stages, 1)
    everywhere = data_parallel(problem, batch_of(problem, problem.global_batch_size))
    plans: dict[str, tuple[Allocation, Schedule, UpdateRule]] = {
        "PyTorch": (everywhere, early_backward(problem, everywhere, warmup=(1,)), "synchronous"),
        "GPipe": (pipeline, gpipe(problem, pipeline), "synchronous"),
        "PipeDream": (
            whole,
            eager(problem, whole, update_rule="weight_stashing", depth=_depth(stages)),
            "weight_stashing",
        ),
        "2BW": (
            pipeline,
            eager(problem, pipeline, update_rule="double_buffered", depth=_depth(stages)),
            "double_buffered",
        ),
        "Dapple": (pipeline, early_backward(problem, pipeline, warmup=policy_a(problem, pipeline)), "synchronous"),
    }
    capacity = min(problem.capacity_bytes(d) for d in range(problem.num_devices))
    return {
        name: (simulate(problem, allocation, schedule, update_rule=rule), capacity)
        for name, (allocation, schedule, rule) in plans.items()
    }


def _depth(stages: Stages) -> tuple[int, ...]:
    return tuple(range(len(stages), 0, -1))


def _climbed(tuner: Tuner, allocation: Allocation) -> int:
    def judged_ns(delta: int) -> int | None:
        return tuner.time_ns(allocation, advance_forward(tuner.problem, allocation, delta=delta))

    return climb(judged_ns)[0]


def _capped(problem: Problem, memory_bytes: int) -> Problem:
    """Return the problem with so much memory on every GPU."""
    return replace(problem, devices=tuple(replace(each, memory_bytes=memory_bytes) for each in problem.devices))


def _against(timeline: Timeline, plain: Timeline) -> str:
    """Return the speed-up over 1F1B, and the growth of the memory of all GPUs."""
    speedup = plain.time_per_global_batch_ns / timeline.time_per_global_batch_ns
    growth = _whole_memory(timeline) / _whole_memory(plain) - 1
    return f"{speedup:.2f}, {growth:+.1%}"


def _whole_memory(timeline: Timeline) -> int:
    return sum(use.memory.total for use in timeline.uses.values())


def _stalls(timeline: Timeline) -> int:
    """Count the gaps between the operations of a GPU, and its wait before the first one."""
    times = [[(0, 0), *zip(track.start_ns.tolist(), track.end_ns.tolist(), strict=True)] for track in timeline.tracks]
    return sum(after[0] > before[1] for intervals in times for before, after in pairwise(intervals))


def _uniform(stages: int, batches: int, forward: int, backward: int, transfer: int) -> tuple[Problem, Allocation]:
    """Return equal stages and a plan.

    Each stage is one layer that keeps one byte; between them are channels of one byte per nanosecond.
    """
    layer = {"forward_ns": forward, "backward_ns": backward, "stash_bytes": 1}
    cut = [{"name": "x", "bytes_per_sample": transfer, "gradient_bytes_per_sample": transfer}]
    request = PlanRequest.parse(
        {
            "profile": {
                "name": "uniform",
                "layers": [{"name": f"layer{i}", "parameter_bytes": 0} for i in range(stages)],
                "boundaries": [cut] * (stages - 1),
                "measurements": [{"device_kind": "toy", "micro_batch_size": 1, "layers": [layer] * stages}],
                "source": {"method": "analytic", "expected_error": 0.0},
            },
            "topology": {
                "name": "toy",
                "uniform": {
                    "nodes": 1,
                    "devices_per_node": stages,
                    "kind": "toy",
                    "memory_bytes": 10**9,
                    "fabric": {"form": "pairs", "bandwidth_bytes_per_s": 10**9},
                    "nic": {"bandwidth_bytes_per_s": 10**9},
                },
            },
            "global_batch_size": batches,
            "network": {"sharing": "private", "channel": "full", "transfer": "madpipe"},
            "memory": {"buffers": "none"},
        }
    )
    straight = tuple(Stage(i, i, (i,)) for i in range(stages))
    return to_problem(request), single_pipeline(straight, batches)


if __name__ == "__main__":
    main("AvgPipe (Chen et al., PPoPP 2023)", sections)
