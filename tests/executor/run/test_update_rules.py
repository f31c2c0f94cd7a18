"""Every update rule on real ranks, step by step: losses and weights equal the plain trainers'."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import rule_jobs
import torch
from pipelines import Part, averaging_programs_of, periodic_programs_of, programs_of
from rank_pool import SEED, RankPool

from penstock.executor.run.chain import Chain
from penstock.executor.run.check import counted_versions
from penstock.executor.run.plain_training import Recipe, ReferenceTrainer
from penstock.schemas.program import Program

OPTIMIZERS = tuple(rule_jobs.OPTIMIZERS)
THREE = [Part(2, (0,)), Part(2, (1,)), Part(2, (2,))]
TWO_GROUPS = [Part(2, (0,)), Part(1, (1,)), Part(2, (0,)), Part(1, (1,))]
"""WPipe on two devices: partitions 0 and 2 on the first, 1 and 3 on the second."""


class Trajectory:
    """The plain trainer's losses, and weights and gradients of every update, by the stage's number."""

    def __init__(self, job: Any, program: Program, parts: Sequence[Part], expected: float, **more: Any) -> None:
        averaged = program.update_rule == "elastic_averaging"
        self.recipe = Recipe(
            program.update_rule,
            tuple(ranges(parts)),
            program.row_classes,
            pipelines=program.pipelines if averaged else 1,
            staleness=program.staleness,
            update_every=more.pop("update_every", None),
        )
        self.weights: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.gradients: dict[int, list[dict[str, torch.Tensor]]] = {}
        self.losses: list[float] = []
        self.trainer = ReferenceTrainer(
            Chain(job), self.recipe, seed=SEED, expected_count=expected, on_update=self._on_update, **more
        )

    def _on_update(self, stage: int, number: int, gradients: dict[str, torch.Tensor]) -> None:
        self.gradients.setdefault(stage, []).append(gradients)
        lane, place = divmod(stage, len(self.recipe.stages))
        at = self.trainer.stages[lane][place]
        self.weights.setdefault(stage, []).append(dict(zip(at.parameters, at.versions[number], strict=True)))

    def train(self, steps: int) -> None:
        self.losses += [self.trainer.train(step) for step in range(steps)]
        for lane, stages in enumerate(self.trainer.stages):
            for place, stage in enumerate(stages):
                newest = {name: p.detach() for name, p in zip(stage.parameters, stage.newest, strict=True)}
                self.weights[len(stages) * lane + place].append(newest)


def assert_follows(records: Sequence[dict[str, Any]], wanted: Trajectory) -> None:
    """Compare all losses, and every rank's weights and gradients at each of its updates and at the end."""
    for record in records:
        assert [step for step, _, _ in record["losses"]] == list(range(len(wanted.losses)))
        assert [loss for _, loss, _ in record["losses"]] == pytest.approx(wanted.losses, rel=1e-10)
        for kind in ("weights", "gradients"):
            for stage, updates in record[kind].items():
                expected = getattr(wanted, kind)[stage]
                assert len(updates) == len(expected)
                for actual, other in zip(updates, expected, strict=True):
                    assert actual.keys() == other.keys()
                    for name in actual:
                        torch.testing.assert_close(actual[name], other[name], rtol=1e-8, atol=1e-10)


def ranges(parts: Sequence[Part]) -> list[tuple[int, int]]:
    bounds = list(accumulate((part.layers for part in parts), initial=0))
    return [(first, end - 1) for first, end in pairwise(bounds)]


def flushed_versions(recipe: Recipe, lengths: Sequence[int]) -> Any:
    """Return versions of weight stashing over programs that end flushed: the lag restarts with each."""
    starts = [sum(lengths[:k]) * recipe.num_micro_batches for k in range(len(lengths))]

    def version(stage: int, micro_batch: int) -> int:
        start = max(one for one in starts if one <= micro_batch)
        return start // recipe.every[stage] + recipe.version(stage, micro_batch - start)

    return version


def messages_per_micro_batch(records: Sequence[dict[str, Any]], micro_batches: int) -> float:
    return sum(count for record in records for count in record["messages"].values()) / micro_batches


@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", ["weight_stashing", "double_buffered", "double_grouped"])
def test_periodic_rules_train_their_equations(pool: RankPool, tmp_path: Path, rule: Any, optimizer: str) -> None:
    """Fourteen global batches by a program with a loop, two by one without, fourteen again: flushed between them.

    Versions, messages and receive buffers are counted. There are N - i versions under weight stashing, 2 under 2BW, 2
    and 1 under 2GW. A micro-batch has 2 (2N - 1) messages for WPipe's N devices, otherwise 2 (N - 1). Buffers are
    limited by the micro-batches in flight.
    """
    job = getattr(rule_jobs, optimizer)
    parts = TWO_GROUPS if rule == "double_grouped" else THREE
    programs = periodic_programs_of(job, parts, 3, rule, (14, 2))
    assert any(program.repeat for program in programs[0])
    records = pool.record(programs, optimizer, tmp_path, uses=(0, 1, 0))
    more: dict[str, Any] = {}
    if rule == "weight_stashing":
        recipe = Recipe(rule, tuple(ranges(parts)), programs[0][0].row_classes)
        more["versions"] = flushed_versions(recipe, (14, 2, 14))
    wanted = Trajectory(job, programs[0][0], parts, records[0]["expected_count"], **more)
    wanted.train(30)
    assert_follows(records, wanted)
    versions = {stage: count for record in records for stage, count in record["peak_versions"].items()}
    assert versions == VERSIONS[rule]
    assert versions == {entry.stage: entry.versions for program in programs[0] for entry in program.stages}
    devices = len(records)
    assert messages_per_micro_batch(records, 30 * 3) == 2 * (
        2 * devices - 1 if rule == "double_grouped" else devices - 1
    )
    for record, program in zip(records, programs[0], strict=True):
        assert record["peak_buffers"]["inputs"] <= 2 + sum(1 for entry in program.stages if entry.stage) * devices
        assert record["peak_buffers"]["gradients"] <= 2 * len(program.stages)


VERSIONS = {
    "weight_stashing": {0: 3, 1: 2, 2: 1},
    "double_buffered": {0: 2, 1: 2, 2: 2},
    "double_grouped": {0: 2, 1: 2, 2: 1, 3: 1},
}


IN_TURN = [Part(3, (0, 1), "round_robin"), Part(3, (2,))]
BY_ROWS = [Part(3, (0,)), Part(3, (1, 2))]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("rule", "job", "parts", "count"),
    [
        pytest.param("double_buffered", "masked", BY_ROWS, 3, id="2bw-rows-terms-differ"),
        pytest.param("double_buffered", "uneven", IN_TURN, 5, id="2bw-in-turn-uneven"),
        pytest.param(
            "double_buffered",
            "dropped",
            [Part(3, (0,), recompute=((1, 2),)), *THREE[1:2], Part(1, (2,))],
            4,
            id="2bw-recompute-dropout",
        ),
        pytest.param("weight_stashing", "masked", BY_ROWS, 3, id="stashing-rows-terms-differ"),
        pytest.param(
            "weight_stashing",
            "uneven",
            [Part(3, (0,), recompute=((0, 1),)), Part(3, (1,))],
            5,
            id="stashing-recompute-uneven",
        ),
        pytest.param(
            "weight_stashing", "recurrent", [Part(2, (0,)), Part(1, (1,)), Part(1, (2,))], 4, id="stashing-lstm"
        ),
        pytest.param(
            "double_grouped",
            "masked",
            [Part(2, (0, 1)), Part(1, (2,)), Part(1, (0, 1)), Part(2, (2,))],
            3,
            id="2gw-rows-terms-differ",
        ),
    ],
)
def test_replicas_rows_and_recomputation_change_nothing(
    pool: RankPool, tmp_path: Path, rule: Any, job: str, parts: list[Part], count: int
) -> None:
    programs = periodic_programs_of(getattr(rule_jobs, job), parts, count, rule, (4,))
    records = pool.record(programs, job, tmp_path)
    wanted = Trajectory(getattr(rule_jobs, job), programs[0][0], parts, records[0]["expected_count"])
    wanted.train(4)
    assert_follows(records, wanted)


def test_replicas_in_turn_step_together_under_weight_stashing(pool: RankPool, tmp_path: Path) -> None:
    """Two replicas that take turns update after both have had theirs: the mean of two micro-batches' losses."""
    programs = periodic_programs_of(rule_jobs.adam, IN_TURN, 4, "weight_stashing", (5,))
    records = pool.record(programs, "adam", tmp_path)
    used = counted_versions(programs[0])
    wanted = Trajectory(
        rule_jobs.adam,
        programs[0][0],
        IN_TURN,
        records[0]["expected_count"],
        versions=lambda stage, m: used[stage, m],
        update_every=(2, 1),
    )
    wanted.train(5)
    assert_follows(records, wanted)


HALVES = [Part(3, (0,)), Part(3, (1,))]


@pytest.mark.cases(2)
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_elastic_averaging_trains_its_equation(pool: RankPool, tmp_path: Path, optimizer: str, staleness: int) -> None:
    """Two pipelines on two devices; every model is diluted, and the reference model is what evaluation sees."""
    job = getattr(rule_jobs, optimizer)
    programs = [averaging_programs_of(job, HALVES, 3, 2, staleness=staleness, delta=delta) for delta in (0, 1)]
    records = pool.record(programs, optimizer, tmp_path, uses=(0, 0, 1, 0, 1))
    wanted = Trajectory(job, programs[0][0], HALVES, records[0]["expected_count"])
    wanted.train(5)
    assert_follows(records, wanted)
    reference = wanted.trainer.weights()
    for record in records:
        for name, value in record["references"].items():
            torch.testing.assert_close(value, reference[name], rtol=1e-8, atol=1e-10)
    if not staleness:
        for name in reference:
            models = [weights[-1][name] for r in records for weights in r["weights"].values() if name in weights[-1]]
            assert len(models) == 2
            torch.testing.assert_close(sum(models) / 2, reference[name], rtol=1e-10, atol=1e-12)
    assert [r["evaluation"] for r in records] == pytest.approx([evaluated(job, reference)] * 4, rel=1e-10)


def test_elastic_averaging_of_one_pipeline_is_plain_training(pool: RankPool, tmp_path: Path) -> None:
    (single,) = [averaging_programs_of(rule_jobs.adam, HALVES, 3, 1)]
    plain = programs_of(rule_jobs.adam, HALVES, 3)
    averaged, wanted = [pool.record([one], "adam", tmp_path, uses=(0,) * 4) for one in (single, plain)]
    for actual, other in zip(averaged, wanted, strict=True):
        assert actual["losses"] == other["losses"]
        for stage, weights in other["weights"].items():
            for one, two in zip(actual["weights"][stage], weights, strict=True):
                assert all(torch.equal(one[name], two[name]) for name in two)


def evaluated(job: Any, weights: dict[str, torch.Tensor]) -> float:
    """Compute the mean loss over the evaluation batches, whole batches at once."""
    chain = Chain(job)
    modules = chain.build_layers(range(len(chain.specs)), SEED)
    total, count = 0.0, 0
    with torch.no_grad():
        for name, parameter in chain.named_parameters(modules):
            parameter.copy_(weights[name])
        for number in range(job.num_evaluation_batches):
            inputs, targets = job.evaluation(number, range(job.batch_size))
            x = inputs["x"]
            for module in modules.values():
                x = module.eval()(x)
            loss, terms = job.loss({"x": x}, targets)
            total, count = total + float(loss), count + terms
    return total / count
