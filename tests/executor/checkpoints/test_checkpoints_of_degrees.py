"""Checkpoints of ranks that share layers: what is written, and who can go on from it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import tensor_jobs
import torch
from pipelines import Part, averaging_programs_of, periodic_programs_of, programs_of
from rank_pool import SEED, RankPool
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.executor.run.chain import Chain
from penstock.executor.stage.stage_module import back_loss
from penstock.schemas.program import Sharding

ONE = [Part(4, (0,))]
TWO = [Part(2, (0,)), Part(2, (1,))]
PAIR = [Part(4, (0, 1))]
THREE = [Part(4, (0, 1, 2))]
MIXED = [Part(1, (0,)), Part(3, (1, 2))]
STEPS = 4


def run(
    pool: RankPool,
    parts: list[Part],
    *,
    tensor: int,
    steps: int,
    job: str = "llama",
    shard_states: bool = False,
    sharding: Sharding | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    how = {"tensor": tensor, "shard_states": shard_states, "sharding": sharding}
    programs = programs_of(getattr(tensor_jobs, job), parts, 2, **how)
    return pool.train(programs, f"tensor_jobs:{job}", steps=steps, check=False, options=options)


def losses(results: list[dict[str, Any]]) -> list[float]:
    assert [one["kind"] for one in results] == ["done"] * len(results), results
    values: list[float] = results[0]["losses"]
    return values


def plain(job: Any, steps: int) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Train in a loop without ranks; return losses, parameters and optimizer."""
    chain = Chain(job)
    modules = dict(enumerate(chain.build_layer(i, SEED) for i in range(len(chain.specs))))
    parameters = dict(chain.named_parameters(modules))
    optimizer = job.optimizer(list(parameters.values()))
    schedule = job.lr_scheduler(optimizer)
    losses_of_steps = []
    for step in range(steps):
        inputs, targets = job.batch(step, range(job.batch_size))
        x = next(iter(inputs.values()))
        for module in modules.values():
            x = module(x)
        optimizer.zero_grad()
        loss, count = job.loss({"x": x}, targets)
        back_loss(loss, count)
        optimizer.step()
        schedule.step()
        losses_of_steps.append(loss.item() / count)
    return losses_of_steps, parameters, optimizer


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint, whole, as torch reads them in a separate process."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(directory)
    tensors = {
        name: torch.empty(has.size, dtype=has.properties.dtype)
        for name, has in reader.read_metadata().state_dict_metadata.items()
        if isinstance(has, TensorStorageMetadata)
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    return tensors


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    ("parts", "tensor", "sharding"),
    [
        pytest.param(MIXED, 2, None, id="tensor-2"),
        pytest.param(MIXED, 2, "parameters_kept", id="kept-at-tensor-2"),
        pytest.param(THREE, 1, "parameters", id="rows-of-three"),
        pytest.param(PAIR, 2, "gradients", id="gradients-at-tensor-2"),
    ],
)
def test_what_ranks_of_a_mesh_write_is_the_whole_model(
    pool: RankPool, tmp_path: Path, parts: list[Part], tensor: int, sharding: Sharding | None
) -> None:
    """Parameters and states equal the ones of a loop in one process; each number is written once."""
    run(pool, parts, tensor=tensor, sharding=sharding, steps=2, checkpoint_directory=str(tmp_path))
    _, parameters, optimizer = plain(tensor_jobs.llama, 2)
    tensors = saved(tmp_path / "step-2")
    assert {name for name in tensors if name.startswith("model/")} == {f"model/{name}" for name in parameters}
    for name, parameter in parameters.items():
        assert torch.allclose(tensors[f"model/{name}"], parameter, rtol=0, atol=1e-13)
        for key, state in optimizer.state[parameter].items():
            assert torch.allclose(tensors[f"optimizer/{name}/{key}"], state, rtol=0, atol=1e-13)
    metadata = FileSystemReader(tmp_path / "step-2").read_metadata()
    for name, tensor in tensors.items():
        has = metadata.state_dict_metadata[name]
        assert isinstance(has, TensorStorageMetadata)
        assert sum(chunk.sizes.numel() for chunk in has.chunks) == tensor.numel()
    assert any(len(has.chunks) > 1 for has in metadata.state_dict_metadata.values() if hasattr(has, "chunks"))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((ONE, 1, False), (TWO, 2, False), id="from-one-rank-to-tensor-2"),
        pytest.param((TWO, 2, False), (ONE, 1, False), id="from-tensor-2-to-one-rank"),
        pytest.param((PAIR, 2, True), (MIXED, 2, False), id="from-shared-out-states-to-other-stages"),
        pytest.param((MIXED, 1, False), (PAIR, 2, True), id="from-degree-1-to-shared-out-states"),
    ],
)
def test_a_run_goes_on_under_other_degrees(pool: RankPool, tmp_path: Path, first: Any, second: Any) -> None:
    where = {"checkpoint_directory": str(tmp_path), "evaluate_every": STEPS}
    all_losses: list[float] = []
    for (parts, tensor, shard_states), steps, resume in ((first, 2, False), (second, STEPS, True)):
        results = run(pool, parts, tensor=tensor, shard_states=shard_states, steps=steps, resume=resume, **where)
        all_losses += losses(results)
    assert all_losses == pytest.approx(plain(tensor_jobs.llama, STEPS)[0], rel=1e-12)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((THREE, 1, "parameters"), (MIXED, 2, "parameters_kept"), id="parameters-to-kept-at-tensor-2"),
        pytest.param((MIXED, 2, "parameters_kept"), (PAIR, 2, "gradients"), id="kept-to-gradients"),
        pytest.param((PAIR, 2, "gradients"), (ONE, 1, None), id="gradients-to-one-rank"),
        pytest.param((TWO, 1, None), (PAIR, 2, "parameters"), id="two-stages-to-parameters-at-tensor-2"),
    ],
)
def test_a_run_goes_on_under_another_sharding(pool: RankPool, tmp_path: Path, first: Any, second: Any) -> None:
    """Other stages and degrees, too, with an evaluation after each half."""
    where = {"checkpoint_directory": str(tmp_path), "evaluate_every": 2}
    all_losses: list[float] = []
    evaluations = []
    for (parts, tensor, sharding), steps, resume in ((first, 2, False), (second, STEPS, True)):
        results = run(pool, parts, tensor=tensor, sharding=sharding, steps=steps, resume=resume, **where)
        all_losses += losses(results)
        evaluations += [one["loss"] for one in results[0]["events"] if one["kind"] == "evaluation"]
    assert all_losses == pytest.approx(plain(tensor_jobs.llama, STEPS)[0], rel=1e-12)
    assert evaluations == pytest.approx([evaluated(tensor_jobs.llama, steps) for steps in (2, STEPS)], rel=1e-12)


def evaluated(job: Any, steps: int) -> float:
    """Return the loss of the evaluation's batches after so many steps of ``plain``."""
    _, parameters, _ = plain(job, steps)
    chain = Chain(job)
    modules = dict(enumerate(chain.build_layer(i, SEED) for i in range(len(chain.specs))))
    total, terms = 0.0, 0
    with torch.no_grad():
        for name, parameter in chain.named_parameters(modules):
            parameter.copy_(parameters[name])
        for number in range(job.num_evaluation_batches):
            inputs, targets = job.evaluation(number, range(job.batch_size))
            x = next(iter(inputs.values()))
            for module in modules.values():
                x = module(x)
            loss, count = job.loss({"x": x}, targets)
            total, terms = total + loss.item(), terms + count
    return total / terms


@pytest.mark.tier("nightly")
def test_going_on_under_the_same_plan_is_going_on_bit_by_bit(pool: RankPool, tmp_path: Path) -> None:
    where = {"checkpoint_directory": str(tmp_path)}
    whole = losses(run(pool, TWO, tensor=2, steps=STEPS, job="momentum"))
    halves = losses(run(pool, TWO, tensor=2, steps=2, job="momentum", **where))
    halves += losses(run(pool, TWO, tensor=2, steps=STEPS, job="momentum", resume=True, **where))
    assert halves == whole


@pytest.mark.tier("nightly")
def test_what_is_read_and_written_again_at_other_degrees_is_the_same_bit_by_bit(pool: RankPool, tmp_path: Path) -> None:
    """From degree 1 through tensor 2 with the states shared out, by an optimizer that changes nothing, and back."""
    where = {"checkpoint_directory": str(tmp_path), "keep_checkpoints": 9, "resume": "auto"}
    run(pool, ONE, tensor=1, steps=1, job="still", **where)
    run(pool, PAIR, tensor=2, steps=2, job="still", shard_states=True, **where)
    run(pool, TWO, tensor=1, steps=3, job="still", **where)
    first, *others = [saved(tmp_path / f"step-{step}") for step in (1, 2, 3)]
    assert any(name.endswith("/once") for name in first)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("parts", "tensor", "sharding"), [(ONE, 2, None), (PAIR, 1, "parameters")], ids=["tensor-2", "rows"]
)
def test_an_optimizer_of_whole_tensors_is_refused(
    pool: RankPool, parts: list[Part], tensor: int, sharding: Sharding | None
) -> None:
    results = run(pool, parts, tensor=tensor, sharding=sharding, steps=1, job="adafactor")
    assert {one["kind"] for one in results} == {"failed"}
    assert "keeps 'row_var' of shape" in results[0]["reason"]
    assert results[0]["remedy"].startswith("train with an optimizer that steps each number by itself")


@pytest.mark.tier("nightly")
def test_a_checkpoint_of_another_model_is_refused_before_any_step(pool: RankPool, tmp_path: Path) -> None:
    where = {"checkpoint_directory": str(tmp_path)}
    run(pool, TWO, tensor=2, steps=1, job="llama", **where)
    before = saved(tmp_path / "step-1")
    results = run(pool, TWO, tensor=2, steps=2, job="wider", resume=True, **where)
    assert {one["kind"] for one in results} == {"failed"}
    assert any("is of another model: parameter 'block.0" in one["reason"] for one in results), results
    assert not any(event["kind"] == "step" for one in results for event in one["events"])
    (shard,) = sorted((tmp_path / "step-1").glob("__0_0.distcp"))
    after = saved(tmp_path / "step-1")
    assert all(torch.equal(before[name], after[name]) for name in before)
    bytes_of = bytearray(shard.read_bytes())
    bytes_of[: len(bytes_of) // 2] = bytes(len(bytes_of) // 2)
    shard.write_bytes(bytes(bytes_of))
    results = run(pool, TWO, tensor=2, steps=2, resume=True, **where)
    unreadable = [one for one in results if "'__0_0.distcp' changed after it was written" in one["reason"]]
    assert unreadable, results
    assert all(one["remedy"].startswith("give the directory of an earlier run") for one in unreadable)
    assert {len(one["reason"].splitlines()) for one in unreadable} == {2}, "a sentence, and what to do"
    assert not any(event["kind"] == "step" for one in results for event in one["events"])
    assert [one.name for one in tmp_path.glob("step-*")] == ["step-1"]


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(("first", "second"), [pytest.param(2, 1, id="from-tensor-2"), pytest.param(1, 2, id="to-it")])
def test_older_versions_of_weights_go_on_under_other_degrees(
    pool: RankPool, tmp_path: Path, first: int, second: int
) -> None:
    """Double buffered: losses after an interruption equal uninterrupted ones only if the older version was kept."""

    def trained(tensor: int, steps: int, **options: Any) -> list[float]:
        programs = periodic_programs_of(tensor_jobs.llama, TWO, 2, "double_buffered", (2,), tensor=tensor)[0]
        arguments = {"segments": [0] * (steps // 2), "check": False, "options": {"checkpoint_every": 2, **options}}
        return losses(pool.train(programs, "tensor_jobs:llama", steps=steps, **arguments))

    whole = trained(1, 4, checkpoint_directory=str(tmp_path / "whole"))
    resumed = trained(first, 2, checkpoint_directory=str(tmp_path / "parts"))
    resumed += trained(second, 4, checkpoint_directory=str(tmp_path / "parts"), resume=True)
    assert resumed == pytest.approx(whole, rel=1e-12)
    assert any(name.startswith("older/1/") for name in saved(tmp_path / "parts" / "step-2"))


@pytest.mark.tier("nightly")
def test_averaged_models_are_evaluated_and_go_on_under_other_degrees(pool: RankPool, tmp_path: Path) -> None:
    """Two pipelines' own models and the reference model, which evaluations are of."""

    def trained(tensor: int, steps: int, where: str, **options: Any) -> tuple[list[float], list[float]]:
        programs = averaging_programs_of(tensor_jobs.llama, TWO, 2, 2, tensor=tensor)
        options |= {"checkpoint_directory": str(tmp_path / where), "evaluate_every": 1}
        results = pool.train(programs, "tensor_jobs:llama", steps=steps, check=False, options=options)
        evaluated = [each["loss"] for each in results[0]["events"] if each["kind"] == "evaluation"]
        return losses(results), evaluated

    whole = trained(1, 4, "whole")
    first, second = trained(2, 2, "parts"), trained(1, 4, "parts", resume=True)
    assert first[0] + second[0] == pytest.approx(whole[0], rel=1e-12)
    assert first[1] + second[1] == pytest.approx(whole[1], rel=1e-12)
