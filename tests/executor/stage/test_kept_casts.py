"""Autocast's copies of weights: one for all micro-batches in flight, none that lacks gradients, none that is old."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import small_jobs
import torch
from pipelines import Part, periodic_programs_of, programs_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.executor.program import interpreter as module
from penstock.executor.program.interpreter import Interpreter
from penstock.executor.run.chain import Chain
from penstock.executor.stage.precision import Training
from penstock.executor.transport import GlooTransport
from penstock.schemas.program import Program

ROWS = ["0F0:3 0B0:3"]
MATRIX = 2 * small_jobs.WIDTH * small_jobs.WIDTH
"""Elements of each weight matrix of the job, and of no activation."""
TRAINING = Training("bf16")


def interpreter_of(program: Program, transport: GlooTransport) -> Interpreter:
    chain = Chain(small_jobs.plain)
    shapes = chain.infer_shapes(range(4), TRAINING)
    interpreter = Interpreter(program, chain, shapes, seed=1, transport=transport, training=TRAINING)
    interpreter.agree()
    return interpreter


def copies(transport: GlooTransport) -> int:
    """Count the 16-bit storages of a matrix's size that three micro-batches in flight keep for their backwards."""
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 3, rows=ROWS)
    one, kept = interpreter_of(program, transport), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        one.step(0)
    matrices = [t.untyped_storage() for t in kept if t.dtype == torch.bfloat16 and t.numel() == MATRIX]
    return len({storage.data_ptr() for storage in matrices})


def test_micro_batches_in_flight_share_the_copies(transport: GlooTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = sum(parameter.numel() == MATRIX for _, parameter in parameters())
    assert copies(transport) == matrices
    monkeypatch.setattr(module, "kept_casts", nullcontext)
    assert copies(transport) == 3 * matrices


def parameters() -> list[tuple[str, Any]]:
    chain = Chain(small_jobs.plain)
    return list(chain.named_parameters(chain.build_layers(range(6), device="meta")))


@pytest.mark.parametrize("recompute", [((0, 5),), ((1, 2),), ((3, 5),)])
def test_recomputed_layers_have_gradients(transport: GlooTransport, recompute: Any) -> None:
    """Their first forward, without gradients, leaves no copy that the second would use.

    Some versions of torch keep the copies of such a forward, so the test also reads the modes in which layers run.
    """

    def gradients(part: Part) -> dict[str, Tensor]:
        (program,) = programs_of(small_jobs.plain, [part], 3, rows=ROWS)
        one, values = interpreter_of(program, transport), {}
        one.actions.before_step = lambda stage: values.update({n: g.clone() for n, g in stage.named_gradients()})
        one.step(0)
        return values

    modes = set[tuple[bool, bool]]()
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,), recompute=recompute)], 3, rows=ROWS)
    watched = interpreter_of(program, transport)
    for layer in watched.stages[0].module.modules.values():
        layer.register_forward_pre_hook(
            lambda *_: modes.add((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
        )
    watched.step(0)
    assert modes == {(False, False), (True, True)}, "copies are kept with gradients alone"
    plain, again = gradients(Part(6, (0,))), gradients(Part(6, (0,), recompute=recompute))
    assert all(gradient.any() for gradient in again.values())
    torch.testing.assert_close(again, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", ["weight_stashing", "double_buffered"])
def test_updates_end_the_copies(transport: GlooTransport, monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
    """Several batches by one program lose what they lose where every forward makes its own copies."""
    ((program,),) = periodic_programs_of(small_jobs.plain, [Part(6, (0,))], 3, rule, [5])

    def losses() -> list[float]:
        values: list[float] = []
        interpreter_of(program, transport).run(0, lambda step, result, ns: values.append(result.loss))
        return values

    kept = losses()
    monkeypatch.setattr(module, "kept_casts", partial(nullcontext))
    assert kept == losses()
    assert len(set(kept)) == 5
