"""Training on real ranks, compared step by step with one plain loop over the unsplit model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numeric_jobs
import pytest
import torch
from pipelines import Part, problem_of, programs_of
from rank_pool import SEED, RankPool
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from penstock.executor.run.chain import Chain
from penstock.executor.stage.stage_module import layer_seed, step_seed
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.schedules.chimera import chimera
from penstock.solvers.schedules.interleaved import interleaved
from penstock.solvers.schedules.v_shape import zb_v
from penstock.solvers.schedules.zero_bubble import zb_h1

STEPS = 4
V_SHAPE = [Part(2, (0,)), Part(2, (1,)), Part(2, (1,)), Part(2, (0,))]
TWO = [Part(4, (0,)), Part(4, (1,))]
LOOP = [Part(2, (0,)), Part(2, (1,)), Part(2, (0,)), Part(2, (1,))]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks compute with one thread, and so does the unsplit model: in bfloat16 the number of threads shows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Unsplit:
    """The whole model in one process: torch's autocast, gradient scaler and clipping, and nothing of ours but seeds."""

    def __init__(
        self, job: Any, num_micro_batches: int, precision: str = "fp32", clip_norm: float | None = None
    ) -> None:
        self.job = job
        self.chain = Chain(job)
        self.modules = self.chain.build_layers(range(len(self.chain.specs)), SEED)
        self.rows = job.batch_size // num_micro_batches
        assert self.rows * num_micro_batches == job.batch_size
        trained = {id(p): p for m in self.modules.values() for p in m.parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self.optimizer = job.optimizer(self.parameters)
        lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self.autocast: Any = contextlib.nullcontext() if lower is None else torch.autocast("cpu", dtype=lower)
        self.scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
        self.clip_norm = clip_norm
        self.norms: list[float] = []
        self.halved: range = range(0)

    def call(self, i: int, module: torch.nn.Module, arguments: list[torch.Tensor]) -> Any:
        """Run a layer over a micro-batch; over its halves, one after the other, where two replicas have it."""
        if i not in self.halved:
            return self.chain.call(i, module, arguments)
        middle = len(arguments[0]) // 2
        first = self.chain.call(i, module, [one[:middle] for one in arguments])
        kept = [buffer.clone() for buffer in module.buffers()]
        second = self.chain.call(i, module, [one[middle:] for one in arguments])
        for buffer, value in zip(module.buffers(), kept, strict=True):
            buffer.data.copy_(value)
        return [torch.cat(pair) for pair in zip(first, second, strict=True)]

    def evaluate(self) -> float:
        total, terms = 0.0, 0
        for module in self.modules.values():
            module.eval()
        with torch.no_grad():
            for number in range(self.job.num_evaluation_batches):
                env, targets = self.job.evaluation(number, range(self.job.batch_size))
                for i, module in self.modules.items():
                    spec = self.chain.specs[i]
                    results = self.chain.call(i, module, [env[name] for name in spec.reads])
                    env |= dict(zip(spec.writes, results, strict=True))
                loss, count = self.job.loss({name: env[name] for name in self.chain.outputs}, targets)
                total, terms = total + float(loss), terms + count
        return total / terms

    def step(self, number: int) -> float:
        job, chain = self.job, self.chain
        _, targets = job.batch(number, range(job.batch_size))
        terms = int(targets[1].sum())
        total = 0.0
        self.optimizer.zero_grad()
        for m in range(job.batch_size // self.rows):
            env, targets = job.batch(number, range(m * self.rows, (m + 1) * self.rows))
            with self.autocast:
                for i, module in self.modules.items():
                    spec = chain.specs[i]
                    torch.manual_seed(layer_seed(SEED, m, spec.name, 0) + step_seed(SEED, number))
                    results = self.call(i, module, [env[name] for name in spec.reads])
                    env |= dict(zip(spec.writes, results, strict=True))
                loss, _ = job.loss({name: env[name] for name in chain.outputs}, targets)
            self.scaler.scale(loss / terms).backward()
            total += float(loss.detach())
        self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total / terms


def losses_of(results: list[dict[str, Any]]) -> list[float]:
    assert [one["kind"] for one in results] == ["done"] * len(results), results
    assert len({tuple(one["losses"]) for one in results}) == 1
    losses: list[float] = results[0]["losses"]
    return losses


def trains_as_unsplit(
    pool: RankPool,
    name: str,
    parts: list[Part],
    count: int,
    *,
    rel: float = 1e-11,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Unsplit:
    job, options = getattr(numeric_jobs, name), options or {}
    unsplit = Unsplit(job, count, options.get("precision", "fp32"), options.get("clip_norm"))
    expected = [unsplit.step(number) for number in range(STEPS)]
    assert len(set(expected)) == STEPS
    programs = programs_of(job, parts, count, norm=bool(options), **more)
    results = pool.train(programs, f"numeric_jobs:{name}", steps=STEPS, options=options, check=False)
    assert losses_of(results) == pytest.approx(expected, rel=rel)
    return unsplit


# Backwards in two halves


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "parts", "schedule", "count"),
    [
        pytest.param("eight_dropout", TWO, zb_h1, 4, id="zb-h1-dropout"),
        pytest.param("eight", V_SHAPE, zb_v, 4, id="zb-v"),
        pytest.param("eight", LOOP, interleaved, 4, id="interleaved"),
        pytest.param("residual", [Part(2, (0,)), Part(3, (1,)), Part(3, (2,))], zb_h1, 3, id="zb-h1-skip-and-frozen"),
        pytest.param(
            "encoder_decoder",
            [Part(2, (0,)), Part(2, (1,)), Part(2, (1,)), Part(2, (0,))],
            zb_v,
            4,
            id="zb-v-branching",
        ),
        pytest.param("tied", [Part(2, (0,)), Part(2, (1,)), Part(2, (2,))], zb_h1, 3, id="zb-h1-tied"),
        pytest.param("tied", [Part(2, (0,)), Part(1, (1,)), Part(2, (1,)), Part(1, (0,))], zb_v, 4, id="zb-v-tied"),
    ],
)
def test_schedules_with_weight_halves(pool: RankPool, name: str, parts: list[Part], schedule: Any, count: int) -> None:
    trains_as_unsplit(pool, name, parts, count, schedule=schedule)


REPLICATED = ["0F0 0F1 0I0 0W0 0I1 0W1"] * 2 + ["1F0 1I0 1F1 1I1 1W0 1W1"]


def test_buckets_start_within_the_last_weight_half(pool: RankPool) -> None:
    """Two replicas, several buckets: the hooks that start all-reduces fire in W."""
    parts = [Part(4, (0, 1)), Part(4, (2,))]
    trains_as_unsplit(pool, "eight", parts, 2, rows=REPLICATED, bucket_bytes=4000)


def test_recomputed_layers_in_two_halves(pool: RankPool) -> None:
    """R ahead of I where there is time, and within I where there is not."""
    parts = [Part(4, (0,), recompute=((1, 2),)), Part(4, (1,), recompute=((6, 7),))]
    rows = ["0F0 0F1 0R0 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1W0 1R1 1I1 1W1"]
    trains_as_unsplit(pool, "eight_dropout", parts, 2, rows=rows)


# Models that branch, ties, batch normalisation


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        pytest.param("inception", [Part(2, (0,)), Part(3, (1,)), Part(2, (2,)), Part(2, (3,))], id="inception"),
        pytest.param("encoder_decoder", [Part(3, (0,)), Part(2, (1,)), Part(3, (2,))], id="encoder-decoder"),
        pytest.param("residual", [Part(3, (0,)), Part(2, (1,)), Part(3, (2,))], id="residual"),
        pytest.param("inception", [Part(3, (0, 1)), Part(3, (2,)), Part(3, (3,))], id="inception-replicated"),
        pytest.param("tied", [Part(2, (0,)), Part(2, (1,)), Part(2, (2,))], id="tied"),
        pytest.param("tied", [Part(3, (0, 1)), Part(3, (2, 3))], id="tied-replicated"),
        pytest.param("tied", [Part(6, (0, 1))], id="tied-in-one-stage"),
        pytest.param("normalised", [Part(2, (0,)), Part(3, (1,))], id="batch-norm"),
    ],
)
def test_models_that_are_no_chain(pool: RankPool, name: str, parts: list[Part]) -> None:
    trains_as_unsplit(pool, name, parts, 3)


def test_chimeras_two_directions_share_a_tied_weight(pool: RankPool) -> None:
    """Both devices hold all layers, each in another stage of each direction; clipping counts every parameter once."""
    job, options = numeric_jobs.tied, {"clip_norm": 0.05}
    down = Pipeline((Stage(0, 2, (0,)), Stage(3, 5, (1,))), (0, 1))
    up = Pipeline((Stage(0, 2, (1,)), Stage(3, 5, (0,))), (2, 3))
    problem, allocation = problem_of(job, 2), Allocation((down, up), 4)
    programs = lower(problem, allocation, chimera(problem, allocation), norm=True)
    unsplit = Unsplit(job, 4, clip_norm=0.05)
    expected = [unsplit.step(number) for number in range(STEPS)]
    assert min(unsplit.norms) > 0.05
    results = pool.train(programs, "numeric_jobs:tied", steps=STEPS, options=options, check=False)
    assert losses_of(results) == pytest.approx(expected, rel=1e-11)


def test_batch_normalisation_under_replicas(pool: RankPool) -> None:
    """Each replica normalises its rows, and the first one's running statistics count."""
    job = numeric_jobs.normalised
    programs = programs_of(job, [Part(3, (0, 1)), Part(2, (2,))], 3)
    results = pool.train(programs, "numeric_jobs:normalised", steps=STEPS, options={"evaluate_every": 2}, check=False)
    unsplit = Unsplit(job, 3)
    unsplit.halved = range(3)
    assert losses_of(results) == pytest.approx([unsplit.step(number) for number in range(STEPS)], rel=1e-11)
    evaluated = [event["loss"] for event in results[0]["events"] if event["kind"] == "evaluation"]
    assert evaluated[-1] == pytest.approx(unsplit.evaluate(), rel=1e-11)


# Precision and clipping

THREE = [Part(2, (0,)), Part(3, (1,)), Part(3, (2,))]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision(pool: RankPool, precision: str) -> None:
    trains_as_unsplit(pool, "lowered", THREE, 3, options={"precision": precision})


def test_steps_that_overflow_are_left_out_everywhere(pool: RankPool) -> None:
    unsplit = trains_as_unsplit(
        pool, "loud", [Part(2, (0,)), Part(3, (1,))], 3, rel=1e-6, options={"precision": "fp16"}
    )
    assert unsplit.scaler.get_scale() < 2.0**16


@pytest.mark.parametrize(
    ("name", "parts", "more"),
    [
        pytest.param("residual", THREE, {}, id="stages"),
        pytest.param("tied_masked", [Part(3, (0, 1)), Part(3, (2,))], {}, id="replicas-and-ties"),
        pytest.param("eight", V_SHAPE, {"schedule": zb_v}, id="zb-v"),
    ],
)
def test_clipping_by_the_norm_of_the_unsplit_model(pool: RankPool, name: str, parts: Any, more: Any) -> None:
    options = {"clip_norm": 0.05}
    unsplit = trains_as_unsplit(pool, name, parts, 4 if more else 3, options=options, **more)
    assert min(unsplit.norms) > 0.05, "nothing was clipped"


def test_clipping_in_float16(pool: RankPool) -> None:
    """Torch unscales, then clips: other roundings, which float16 makes larger."""
    options = {"clip_norm": 0.05, "precision": "fp16"}
    trains_as_unsplit(pool, "lowered", [Part(4, (0,)), Part(4, (1,))], 3, rel=1e-4, options=options)


@pytest.mark.tier("nightly")
def test_the_loss_scale_and_its_count_go_on_under_another_plan(pool: RankPool, tmp_path: Path) -> None:
    """Steps 0 to 2 overflow; the checkpoint of step 5 lies between two good steps of torch's own count."""
    job, options = numeric_jobs.loud, {"precision": "fp16", "checkpoint_directory": str(tmp_path)}
    unsplit = Unsplit(job, 3, "fp16")
    expected = [unsplit.step(number) for number in range(6)]
    losses: list[float] = []
    for parts, steps, resume in (
        ([Part(2, (0,)), Part(3, (1,))], 5, False),
        ([Part(1, (0,)), Part(1, (1,)), Part(3, (2,))], 6, True),
    ):
        programs = programs_of(job, parts, 3, norm=True)
        all_options = {**options, "resume": resume}
        losses += losses_of(pool.train(programs, "numeric_jobs:loud", steps=steps, options=all_options, check=False))
    assert losses == pytest.approx(expected, rel=1e-6)
    dcp_to_torch_save(tmp_path / "step-6", tmp_path / "whole.pt")
    scale = json.loads(torch.load(tmp_path / "whole.pt")["loss_scale"])
    expected_state = unsplit.scaler.state_dict()
    assert (
        scale
        == {"value": expected_state["scale"], "good_steps": expected_state["_growth_tracker"]}
        == {"value": 2.0**13, "good_steps": 3}
    )


# Optimizer states shared out


@pytest.mark.parametrize("bucket_bytes", [25_000_000, 4000])
def test_shared_out_states_change_nothing(pool: RankPool, bucket_bytes: int) -> None:
    """Bit by bit: two replicas, whose sums have no order."""
    parts = [Part(3, (0, 1)), Part(3, (2, 3))]
    runs = []
    for shard_states in (False, True):
        programs = programs_of(numeric_jobs.adam, parts, 2, bucket_bytes=bucket_bytes, shard_states=shard_states)
        assert programs[0].shard_states == shard_states
        runs.append(losses_of(pool.train(programs, "numeric_jobs:adam", steps=STEPS, check=False)))
    assert runs[0] == runs[1]


def test_states_shared_out_over_three_train_what_one_process_trains(pool: RankPool) -> None:
    """Shares have other lengths, blocks of what is reduce-scattered have not; the norm counts each parameter once."""
    parts = [Part(2, (0,)), Part(4, (1, 2, 3))]
    programs = programs_of(numeric_jobs.adam, parts, 2, bucket_bytes=4000, shard_states=True, norm=True)
    for one in pool.train(programs, "numeric_jobs:adam", steps=STEPS, options={"clip_norm": 0.05}):
        assert one["kind"] == "done", one
        assert one["gradient_check"] < 1e-12
        assert one["loss_check"] < 1e-12


@pytest.mark.tier("nightly")
def test_shared_out_states_go_on_with_another_number_of_replicas(pool: RankPool, tmp_path: Path) -> None:
    unsplit = Unsplit(numeric_jobs.adam, 2)
    losses: list[float] = []
    for parts, steps, shard_states, resume in (
        ([Part(3, (0, 1, 2)), Part(3, (3, 4))], 2, True, False),
        ([Part(2, (0,)), Part(4, (1, 2))], 3, True, True),
        ([Part(6, (0, 1))], STEPS, False, True),
    ):
        programs = programs_of(numeric_jobs.adam, parts, 2, shard_states=shard_states)
        options = {"checkpoint_directory": str(tmp_path), "resume": resume}
        losses += losses_of(pool.train(programs, "numeric_jobs:adam", steps=steps, options=options, check=False))
    assert losses == pytest.approx([unsplit.step(number) for number in range(STEPS)], rel=1e-11)


# The check of a run


@pytest.mark.parametrize(
    ("name", "options"),
    [("tied", {"clip_norm": 0.05}), ("lowered", {"precision": "bf16"})],
)
def test_the_check_knows_ties_clipping_and_precision(pool: RankPool, name: str, options: dict[str, Any]) -> None:
    job = getattr(numeric_jobs, name)
    programs = programs_of(job, [Part(3, (0,)), Part(len(job.layers()) - 3, (1,))], 3, norm=True)
    for one in pool.train(programs, f"numeric_jobs:{name}", options=options):
        assert one["kind"] == "done", one
        assert one["gradient_check"] <= one["gradient_tolerance"]
        assert one["loss_check"] < 1e-6
