"""Parts of the interpreter in one process: stages, what is kept of a micro-batch, refusals, the trace's documents."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import small_jobs
import torch
from pipelines import Part, programs_of

from penstock.executor.program.interpreter import InstructionFailed, Interpreter, first_row
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import ANY_BATCH, SimpleJob
from penstock.executor.run.job_fit import checked_chain, refuse_other_boundaries, untrained_samples
from penstock.executor.run.trace import rank_trace
from penstock.executor.stage.held_stage import Cell
from penstock.executor.stage.stage_module import MicroBatch, StageModule, layer_seed, step_seed
from penstock.executor.stage.versions import Place, Versions
from penstock.executor.transport import GlooTransport
from penstock.schemas.errors import InvalidDocument, ModelMismatch
from penstock.schemas.program import Instruction, Program
from penstock.schemas.trace import RankTrace

LOCAL = [Part(3, (0,)), Part(3, (0,), recompute=((4, 4),))]
LOCAL_ROWS = ["0F0 0F1 1F0 1F1 1B1 1B0 0B0 0B1 0F2 1F2 1B2 0B2"]


def interpreter_of(program: Program, job: Any, transport: GlooTransport, **more: Any) -> Interpreter:
    chain = Chain(job)
    interpreter = Interpreter(program, chain, chain.infer_shapes(range(4)), seed=1, transport=transport, **more)
    interpreter.agree()
    return interpreter


def test_nothing_of_a_micro_batch_is_left_after_a_step(transport: GlooTransport) -> None:
    (program,) = programs_of(small_jobs.plain, LOCAL, 3, rows=LOCAL_ROWS)
    interpreter = interpreter_of(program, small_jobs.plain, transport)
    interpreter.step(0)
    for cell in interpreter.bound.cells.values():
        left = {name for name in MicroBatch.__slots__ if getattr(cell, name) not in (None, [], ())}
        assert left - {"seeds", "rows", "number", "input_gradients"} == set()
        assert not cell.input_gradients
    assert all(batch.row_cache == {} for batch in interpreter.bound.batches)


def test_a_failing_instruction_is_named(transport: GlooTransport) -> None:
    (program,) = programs_of(small_jobs.failing, [Part(4, (0,))], 3, rows=["0F0 0B0 0F1 0B1 0F2 0B2"])
    mark = [0, 0]
    interpreter = interpreter_of(program, small_jobs.failing, transport, mark=mark)
    interpreter.step(0)
    interpreter.step(1)
    with pytest.raises(InstructionFailed, match=r"instruction 0 \(0F0\)") as caught:
        interpreter.step(2)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.layer == "fails"
    assert "small_jobs.py:" in str(caught.value.line)
    assert "the seventh call is too many" in str(caught.value.line)
    assert mark[0] == 0


def test_a_loss_without_terms_is_refused(transport: GlooTransport) -> None:
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 3)
    job = small_jobs.Regression("empty", lambda: small_jobs.blocks(6))
    job.loss = lambda outputs, targets: (outputs["x"].sum() * 0, 0)
    with pytest.raises(InvalidDocument, match="no terms"):
        interpreter_of(program, job, transport)


def test_gradients_that_no_message_brings_are_refused(transport: GlooTransport) -> None:
    """A plan made from a profile without backward bytes has no channel for them."""
    (program,) = programs_of(small_jobs.plain, LOCAL, 3, rows=LOCAL_ROWS)
    lost = tuple(one for one in program.prologue if one.kind != "LOCAL_B")
    with pytest.raises(ModelMismatch, match=r"\['x'\] after layer 'block.2' have gradients.*0B0"):
        interpreter_of(replace(program, prologue=lost), small_jobs.plain, transport)


def test_recomputation_leaves_running_statistics_alone() -> None:
    """The second run of a forward must not move them again, nor disturb the gradients."""
    job = small_jobs.normalised
    chain = Chain(job)
    shapes = chain.infer_shapes(range(4))
    inputs = torch.randn(4, small_jobs.LENGTH, small_jobs.WIDTH, generator=torch.Generator().manual_seed(1))
    runs = []
    for recompute in ((), ((1, 1),)):
        stage = StageModule(chain, shapes, 1, 1, seed=1, recompute=recompute)
        cell = MicroBatch(0, range(4), stage.seeds(0, 0))
        cell.inputs = [inputs.clone()]
        stage.forward(cell, 0)
        cell.gradients = [torch.ones_like(inputs)]
        stage.backward(cell, 0)
        (norm,) = stage.modules.values()
        runs.append([*norm.buffers(), *(p.grad for p in norm.parameters()), *(cell.input_gradients or [])])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    assert int(runs[0][2]) == 1


def test_random_states_differ_in_everything_that_they_are_made_of() -> None:
    seeds = [layer_seed(s, m, name, row) for s in (0, 1) for m in (0, 1) for name in "ab" for row in (0, 2)]
    steps = [step_seed(s, step) for s in (0, 1) for step in (0, 1)]
    assert len(set(seeds + steps)) == len(seeds + steps)
    assert max(seeds) + max(steps) < 2**64


def test_micro_batches_start_where_the_larger_ones_end() -> None:
    """22 samples in 5 micro-batches: 5, 5, 4, 4, 4."""
    (program,) = programs_of(small_jobs.uneven64, [Part(6, (0,))], 5)
    assert [first_row(program, m) for m in range(5)] == [0, 5, 10, 14, 18]


def test_another_model_is_refused_at_its_first_difference() -> None:
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 3)
    names = [f"block.{i}" for i in range(6)]
    with pytest.raises(ModelMismatch, match=r"layer 2 .*'block.2'.*'other'"):
        checked_chain(small_jobs.plain, program, [*names[:2], "other", *names[3:]])
    with pytest.raises(ModelMismatch, match=r"6 layers.*7"):
        checked_chain(small_jobs.plain, program, [*names, "block.6"])
    with pytest.raises(ModelMismatch, match=r"13 samples.*12"):
        checked_chain(small_jobs.plain, replace(program, global_batch_size=13), names)


def test_a_plan_for_a_smaller_batch_says_what_it_leaves_out() -> None:
    (program,) = programs_of(small_jobs.plain, [Part(6, (0,))], 3)
    assert untrained_samples(small_jobs.plain, program) is None
    text = untrained_samples(small_jobs.plain, replace(program, global_batch_size=8))
    assert text is not None
    assert text.startswith(
        "the plan's global batch has 8 samples, but a batch of job 'plain' has 12: of each batch the last 4"
    )
    assert untrained_samples(SimpleJob("endless", batch_size=ANY_BATCH), program) is None  # type: ignore[arg-type]


def test_other_tensors_at_a_cut_are_refused() -> None:
    chain = Chain(small_jobs.residual)
    shapes = chain.infer_shapes(range(2))
    size = small_jobs.LENGTH * small_jobs.WIDTH * 4
    planned = [
        [
            [chain.tensor_name(i, k), s.bytes_per_sample, s.bytes_per_sample if s.needs_grad else 0]
            for k, s in enumerate(cut.values())
        ]
        for i, cut in enumerate(shapes)
    ]
    refuse_other_boundaries(chain, shapes, planned)
    planned[1][0] = [planned[1][0][0], 2 * size, 2 * size]
    with pytest.raises(ModelMismatch, match=f"after layer 'split': tensor '[^']*:x' has {size} bytes"):
        refuse_other_boundaries(chain, shapes, planned)
    del planned[1][0]
    planned[1][0] = [*planned[1][0]]
    with pytest.raises(ModelMismatch, match="after layer 'split'"):
        refuse_other_boundaries(chain, shapes, planned)


@pytest.mark.tier("quick")
def test_traces_become_documents() -> None:
    document = rank_trace(
        rank=1,
        device="node0/1",
        step=4,
        instructions=[Instruction("F", 1, 0), Instruction("SEND_F", 1, 0, 3)],
        events=[1000, 3000, 3000, 3500],
        shift_ns=-1000,
        clock_error_ns=7,
    )
    trace = RankTrace.model_validate_json(json.dumps(document))
    assert [(e.instruction, e.start_ns, e.end_ns) for e in trace.events] == [("1F0", 0, 2000), ("1SEND_F0", 2000, 2500)]
    assert (trace.batches, trace.clock_error_ns) == (1, 7)


def test_versions_live_as_long_as_something_uses_them() -> None:
    """Two micro-batches in flight on two versions: a third version only where the plan has it; then storage is free."""
    layer = torch.nn.Linear(2, 2)
    parameters = list(layer.parameters())
    gradients = [torch.zeros_like(p) for p in parameters]
    places = [Place(p, gradient) for p, gradient in zip(parameters, gradients, strict=True)]
    versions = Versions([layer], parameters, places, limit=2, oldest=0)
    start = parameters[0].detach().clone()
    cells = [Cell(m, range(1), (), None) for m in range(3)]  # type: ignore[arg-type]

    def update() -> None:
        with torch.no_grad():
            parameters[0].add_(1.0)

    versions.enter(cells[0])
    output = layer(torch.ones(1, 2))
    versions.step(update)
    versions.enter(cells[1])
    assert torch.equal(layer.weight, start + 1)
    with pytest.raises(InvalidDocument, match="3 versions of the weights at once, but the plan has 2"):
        versions.step(update)
    output.sum().backward()
    assert torch.equal(gradients[1], torch.ones(2))
    versions.leave(cells[0])
    versions.step(update)
    assert versions.peak == 2
    versions.leave(cells[1])
    saved = versions.state()
    versions.step(update)
    assert len(versions.live) == 1
    versions.restore([[tensor.clone() for tensor in saved[0]]])
    assert torch.equal(parameters[0], layer.weight)
