"""A rehearsal changes nothing of what is trained afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import small_jobs
import torch
from pipelines import Part, programs_of

from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.transport import GlooTransport
from penstock.schemas.program import Program

LOCAL = [Part(2, (0,)), Part(4, (0,), recompute=((3, 3),))]
HALVES = ["0F0 1F0 1I0 0I0 0F1 1F1 1B1 0B1 1W0 0W0 0F2 1F2 1B2 0B2"]


def trained(program: Program, job: Any, transport: GlooTransport, *, rehearsed: bool) -> list[torch.Tensor]:
    """Return losses of some global batches, and all tensors of the stages afterwards."""
    chain = Chain(job)
    interpreter = Interpreter(program, chain, chain.infer_shapes(range(4)), seed=1, transport=transport)
    interpreter.agree()
    if rehearsed:
        interpreter.rehearse()
    losses = [interpreter.step(step).loss for step in range(3)]
    return [torch.tensor(losses), *(tensor.clone() for tensor in tensors_of(interpreter))]


def tensors_of(interpreter: Interpreter) -> Iterator[torch.Tensor]:
    for stage in interpreter.stages.values():
        for module in stage.module.modules.values():
            yield from (parameter.detach() for parameter in module.parameters())
            yield from module.buffers()
        if stage.optimizer is not None:
            for state in stage.optimizer.state.values():
                yield from (one for one in state.values() if isinstance(one, torch.Tensor))


@pytest.mark.parametrize("job", ["dropout", "residual", "encoder_decoder", "frozen_front"])
def test_training_is_the_same_after_a_rehearsal(job: str, transport: GlooTransport) -> None:
    small_job = getattr(small_jobs, job)
    count = len(Chain(small_job).specs)
    (program,) = programs_of(small_job, [Part(count, (0,), recompute=((2, 2),))], 3)
    plain, rehearsed = (trained(program, small_job, transport, rehearsed=one) for one in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, rehearsed, strict=True))


def test_halves_of_backwards_are_rehearsed_and_leave_no_gradients(transport: GlooTransport) -> None:
    (program,) = programs_of(small_jobs.dropout, LOCAL, 3, rows=HALVES)
    plain, rehearsed = (trained(program, small_jobs.dropout, transport, rehearsed=one) for one in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, rehearsed, strict=True))


def test_running_statistics_are_those_of_the_batches(transport: GlooTransport) -> None:
    (program,) = programs_of(small_jobs.normalised, [Part(3, (0,))], 3)
    plain, rehearsed = (trained(program, small_jobs.normalised, transport, rehearsed=one) for one in (False, True))
    assert any(tensor.dtype == torch.int64 and tensor.item() == 9 for tensor in plain if tensor.dim() == 0)
    assert all(torch.equal(a, b) for a, b in zip(plain, rehearsed, strict=True))
