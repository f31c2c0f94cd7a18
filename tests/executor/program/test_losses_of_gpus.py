"""Losses that the host reads late, as on GPUs: the same numbers, every batch reported once and in order."""

from __future__ import annotations

from typing import Any

import pytest
import small_jobs
import torch
import torch.distributed as dist
from pipelines import Part, periodic_programs_of, programs_of

from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.transport import GlooTransport
from penstock.schemas.program import Program


def interpreter_of(program: Program, transport: GlooTransport, *, late: bool) -> Interpreter:
    """Build an interpreter; ``late``: as where a rank has a GPU, with a separate group that sums losses."""
    chain = Chain(small_jobs.plain)
    interpreter = Interpreter(program, chain, chain.infer_shapes(range(4)), seed=1, transport=transport)
    interpreter.agree()
    assert interpreter.source.loss_group is None, "CPUs have no such group"
    if late:
        interpreter.source.loss_group = dist.new_group(backend="gloo")
    return interpreter


def test_steps_lose_and_train_the_same(transport: GlooTransport) -> None:
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 3)

    def trained(*, late: bool) -> tuple[list[Any], list[torch.Tensor]]:
        one = interpreter_of(program, transport, late=late)
        results = [one.step(number) for number in range(3)]
        return results, [p.detach() for stage in one.stages.values() for p in stage.parameters.values()]

    (losses, weights), (others, other_weights) = trained(late=False), trained(late=True)
    assert [(one.loss, one.count, one.losses) for one in losses] == [
        (one.loss, one.count, one.losses) for one in others
    ]
    assert len({one.loss for one in losses}) == 3
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


def test_terms_are_known_before_losses_are_read(transport: GlooTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for the number of terms alone."""
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 3)
    one = interpreter_of(program, transport, late=True)
    (batch,) = one.bound.batches
    counts: list[float] = []

    def before(stage: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(batch, "_fetched", None)
            counts.append(batch.true_count)

    one.actions.before_step = before
    result = one.step(0)
    assert counts == [result.count] == [small_jobs.plain.batch_size * small_jobs.LENGTH]
    assert result.loss > 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rule", ["weight_stashing", "double_buffered"])
def test_every_batch_is_told_once_and_in_order(transport: GlooTransport, rule: Any, late: bool) -> None:
    ((program,),) = periodic_programs_of(small_jobs.plain, [Part(6, (0,))], 3, rule, [6])
    reports: list[tuple[int, float]] = []
    interpreter_of(program, transport, late=late).run(10, lambda step, result, ns: reports.append((step, result.loss)))
    assert [step for step, _ in reports] == list(range(10, 16))
    early: list[float] = []
    interpreter_of(program, transport, late=False).run(10, lambda step, result, ns: early.append(result.loss))
    assert [loss for _, loss in reports] == early


def test_the_newest_batch_is_told_later(transport: GlooTransport) -> None:
    """So that the host does not wait for a GPU that has only been given the batch's work."""
    ((program,),) = periodic_programs_of(small_jobs.plain, [Part(6, (0,))], 3, "double_buffered", [4])

    def told_when_stepped(*, late: bool) -> list[int]:
        reports: list[int] = []
        at: list[int] = []
        one = interpreter_of(program, transport, late=late)
        one.actions.before_step = lambda stage: at.append(len(reports))
        one.run(0, lambda step, result, ns: reports.append(step))
        return at

    assert told_when_stepped(late=False) == [0, 1, 2, 3]
    assert told_when_stepped(late=True) == [0, 0, 1, 2]
