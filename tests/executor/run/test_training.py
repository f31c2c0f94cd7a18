"""Runs of several steps: schedules, evaluation, checkpoints, and going on from them under another plan."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import run_jobs
import torch
from pipelines import Part, averaging_programs_of, periodic_programs_of, programs_of
from rank_pool import SEED, RankPool

from penstock.executor.checkpoints.checkpoint import claim, newest
from penstock.executor.run.chain import Chain
from penstock.executor.stage.stage_module import back_loss
from penstock.schemas.program import Program

TWO = [Part(3, (0,)), Part(3, (1,))]
REPLICATED = [Part(2, (0,)), Part(4, (1, 2))]
ONE = [Part(6, (0,))]
STEPS = 6


def looped(*layers: int) -> list[Part]:
    """Return WPipe's stages on two ranks: stage 2 + i where stage i is."""
    return [Part(count, (s % 2,)) for s, count in enumerate(layers)]


def run(
    pool: RankPool, job: str, parts: list[Part], count: int, steps: int = STEPS, **options: Any
) -> list[dict[str, Any]]:
    """Run; return the last events of the ranks."""
    programs = programs_of(getattr(run_jobs, job), parts, count)
    arguments = {name.removeprefix("of_"): options.pop(name) for name in list(options) if name.startswith("of_")}
    return pool.train(programs, f"run_jobs:{job}", steps=steps, **({"check": False, "options": options} | arguments))


def done(results: list[dict[str, Any]]) -> dict[str, Any]:
    assert [one["kind"] for one in results] == ["done"] * len(results), results
    return results[0]


def events(results: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for one in results for event in one["events"] if event["kind"] == kind]


def evaluations(results: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(results, "evaluation")}


def plain(job: Any, steps: int, evaluate_every: int) -> tuple[list[float], dict[int, float]]:
    """Train a loop without pipelines; return losses, and evaluations by steps done."""
    chain = Chain(job)
    modules = [chain.build_layer(i, SEED) for i in range(len(chain.specs))]
    optimizer = job.optimizer([p for module in modules for p in module.parameters()])
    schedule = job.lr_scheduler(optimizer)

    def loss_of(batch: Any) -> tuple[torch.Tensor, int]:
        inputs, targets = batch
        x = inputs["x"]
        for module in modules:
            x = module(x)
        loss, count = job.loss({"x": x}, targets)
        return loss, count

    losses, evaluated = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss, count = loss_of(job.batch(step, range(job.batch_size)))
        back_loss(loss, count)
        optimizer.step()
        schedule.step()
        losses.append(loss.item() / count)
        if (step + 1) % evaluate_every == 0 or step + 1 == steps:
            with torch.no_grad():
                sums = [loss_of(job.evaluation(n, range(job.batch_size))) for n in range(job.num_evaluation_batches)]
            evaluated[step + 1] = sum(float(loss) for loss, _ in sums) / sum(count for _, count in sums)
    return losses, evaluated


CURVES: dict[str, tuple[list[float], dict[int, float]]] = {}


def curve(job: str) -> tuple[list[float], dict[int, float]]:
    if job not in CURVES:
        CURVES[job] = plain(getattr(run_jobs, job), STEPS, 4)
    return CURVES[job]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("job", "first", "second"),
    [
        pytest.param("momentum", (TWO, 4), (REPLICATED, 3), id="momentum-more-ranks-fewer-micro-batches"),
        pytest.param("adam", (REPLICATED, 4), (TWO, 2), id="adam-fewer-ranks"),
        pytest.param("asgd", (TWO, 3), (ONE, 4), id="asgd-one-rank"),
    ],
)
def test_a_resumed_run_under_another_plan_goes_on_the_same_curve(
    pool: RankPool, tmp_path: Path, job: str, first: Any, second: Any
) -> None:
    """Losses, schedule and evaluations equal a plain loop's without interruption, to 1e-6 (fp32)."""
    where = {"checkpoint_directory": str(tmp_path), "evaluate_every": 4}
    before = run(pool, job, *first, steps=3, checkpoint_every=2, **where)
    after = run(pool, job, *second, resume=True, **where)
    losses, evaluated = curve(job)
    assert done(before)["losses"] + done(after)["losses"] == pytest.approx(losses, rel=1e-6)
    assert done(after)["first_step"] == 3
    assert evaluations(after) == pytest.approx(evaluated, rel=1e-6)
    assert evaluations(before).keys() == {3}
    assert [event["step"] for event in events(before, "checkpoint")] == [2, 3]
    assert sorted(one.name for one in tmp_path.glob("step-*")) == ["step-3", "step-6"]


def test_what_is_written_of_a_run(pool: RankPool, tmp_path: Path) -> None:
    """JSON lines and event files, appended to by the run that resumes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    where = {
        "checkpoint_directory": str(tmp_path / "checkpoints"),
        "metrics_path": str(tmp_path / "run.jsonl"),
        "tensorboard_directory": str(tmp_path / "board"),
        "evaluate_every": 2,
    }
    first = done(run(pool, "momentum", TWO, 4, steps=2, **where))
    second = done(run(pool, "momentum", TWO, 4, steps=4, resume="auto", **where))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert [line["loss"] for line in steps] == first["losses"] + second["losses"]
    assert [line["learning_rate"] for line in steps] == pytest.approx([0.02 * run_jobs.falling(n) for n in range(4)])
    assert all(line["samples_per_s"] == pytest.approx(12e9 / line["time_ns"]) for line in steps)
    evaluated = {line["step"]: line["evaluation"] for line in lines if "evaluation" in line}
    assert evaluated.keys() == {2, 4}
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [
        (line["step"] + 1, pytest.approx(line["loss"], rel=1e-6)) for line in steps
    ]
    assert {event.step: event.value for event in board.Scalars("evaluation")} == pytest.approx(evaluated, rel=1e-6)


def test_a_full_disk_is_told_and_training_goes_on(pool: RankPool, tmp_path: Path) -> None:
    """Steps 1 and 2 cannot be saved; the checkpoint before them stays, the ones after them are written."""
    results = run(pool, "full_disk", TWO, 4, steps=4, checkpoint_directory=str(tmp_path), checkpoint_every=1)
    assert len(done(results)["losses"]) == 4
    warned = events(results, "warning")
    assert [event["step"] for event in warned] == [2, 3]
    assert all("could not be written" in event["text"] and "File too large" in event["text"] for event in warned)
    assert [event["step"] for event in events(results, "checkpoint")] == [1, 4]
    assert sorted(one.name for one in tmp_path.iterdir() if not one.name.startswith(".owner")) == ["step-1", "step-4"]


def test_a_checkpoint_is_written_where_an_older_one_cannot_be_removed(pool: RankPool, tmp_path: Path) -> None:
    """It is complete, and what should have gone goes after the next one for which that works."""
    options = {"checkpoint_directory": str(tmp_path), "checkpoint_every": 1, "keep_checkpoints": 1}
    results = run(pool, "unremovable", TWO, 4, steps=4, **options)
    assert events(results, "warning") == []
    assert [event["step"] for event in events(results, "checkpoint")] == [1, 2, 3, 4]
    assert sorted(one.name for one in tmp_path.iterdir() if not one.name.startswith(".owner")) == ["step-4"]


@pytest.mark.tier("nightly")
def test_a_late_checkpoint_of_an_old_generation_is_fenced(pool: RankPool, tmp_path: Path) -> None:
    """Ranks that nobody could end go on to train while the next generation has begun: nothing of theirs counts."""
    claimed: list[str] = []

    def take_over() -> None:
        while newest(tmp_path) is None:
            time.sleep(0.001)
        claim(tmp_path, "run/2")
        claimed.extend(sorted(one.name for one in tmp_path.glob("step-*")))

    later = threading.Thread(target=take_over)
    later.start()
    results = run(pool, "momentum", TWO, 4, steps=100, checkpoint_directory=str(tmp_path), checkpoint_every=1)
    later.join()
    assert all(one["kind"] == "failed" for one in results)
    assert "'run/2' owns the checkpoints here" in results[0]["reason"]
    assert "training goes on" in events(results, "warning")[0]["text"]
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.about.step < 100
    assert f"step-{checkpoint.about.step}" in claimed


def test_running_statistics_go_along(pool: RankPool, tmp_path: Path) -> None:
    """Evaluation uses them: right after going on it has to give what the uninterrupted run gives."""
    parts = [Part(3, (0,)), Part(2, (1,))]
    whole = run(pool, "normalised", parts, 3, steps=3, evaluate_every=3)
    run(pool, "normalised", parts, 3, steps=2, checkpoint_directory=str(tmp_path))
    after = run(
        pool, "normalised", [Part(1, (0,)), Part(4, (1,))], 3, steps=3, resume=True, checkpoint_directory=str(tmp_path),
        evaluate_every=3,
    )  # fmt: skip
    assert evaluations(after) == pytest.approx(evaluations(whole), rel=1e-6)


def lowered(rule: Any, parts: list[Part], lengths: list[int]) -> list[list[Program]]:
    if rule == "elastic_averaging":
        return [averaging_programs_of(run_jobs.momentum, parts, 2, 2)]
    return periodic_programs_of(run_jobs.momentum, parts, 4, rule, lengths)


def of_rule(pool: RankPool, rule: Any, parts: list[Part], steps: int, halts: int, **options: Any) -> dict[str, Any]:
    """Run an update rule that halts every so many steps; return the last event."""
    lists = lowered(rule, parts, [halts])
    programs: dict[str, Any] = {
        "programs_of_rank": [[one[rank].to_json() for one in lists] for rank in range(len(lists[0]))]
    }
    if rule != "elastic_averaging":
        programs["segments"] = [0] * (steps // halts)
    options = {"evaluate_every": halts, **options}
    return done(pool.train(lists[0], "run_jobs:momentum", steps=steps, check=False, options=options, **programs))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [
        pytest.param("double_buffered", TWO, [Part(1, (0,)), Part(2, (1,)), Part(3, (2,))], id="2bw-other-stages"),
        pytest.param("double_grouped", looped(1, 2, 2, 1), looped(2, 1, 1, 2), id="wpipe-other-stages-same-groups"),
        pytest.param("elastic_averaging", TWO, [Part(2, (0,)), Part(4, (1,))], id="elastic-averaging-other-stages"),
    ],
)
def test_older_versions_and_the_reference_model_go_along(
    pool: RankPool, tmp_path: Path, rule: str, first: list[Part], second: list[Part]
) -> None:
    """A flush, a checkpoint and a resume under another partition leave no trace in the losses."""
    whole = of_rule(pool, rule, first, STEPS, STEPS)
    of_rule(pool, rule, first, 3, 3, checkpoint_directory=str(tmp_path), checkpoint_every=3)
    after = of_rule(pool, rule, second, STEPS, 3, checkpoint_directory=str(tmp_path), resume=True)
    assert after["first_step"] == 3
    assert after["losses"] == pytest.approx(whole["losses"][3:], rel=1e-6)


def test_the_reference_model_goes_on_as_one_pipeline(pool: RankPool, tmp_path: Path) -> None:
    """Three iterations of two pipelines are six global batches; a synchronous run goes on with the seventh."""
    of_rule(pool, "elastic_averaging", TWO, 3, 3, checkpoint_directory=str(tmp_path))
    after = run(pool, "momentum", TWO, 4, steps=7, resume=True, checkpoint_directory=str(tmp_path))
    assert done(after)["first_step"] == 6
    assert len(after[0]["losses"]) == 1


def test_the_ladder_is_climbed_on_equal_numbers(pool: RankPool) -> None:
    """Rungs differ in their orders alone, so the losses equal one program's."""
    rungs = [programs_of(run_jobs.momentum, TWO, 4, warmup=warmup) for warmup in ((2, 1), (3, 1))]
    assignments = [[rung[rank].to_json() for rung in rungs] for rank in range(2)]
    results = run(pool, "momentum", TWO, 4, steps=10, advance_forward=True, of_programs_of_rank=assignments)
    losses = done(results)["losses"]
    assert losses[:STEPS] == pytest.approx(curve("momentum")[0], rel=1e-6)
    assert next(event["index"] for event in events(results, "rung")) == 1
