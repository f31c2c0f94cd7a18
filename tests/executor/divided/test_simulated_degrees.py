"""Random plans whose ranks share layers, sequences, experts, parameters and gradients, on simulated devices.

It covers what is most likely to hang on GPUs: collectives within layers, collectives that gather parameters and sum
gradients, and messages of the pipeline, each on a separate communicator.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from mesh_jobs import Tokens
from pipelines import cells_of, problem_of
from random_plans import random_allocation, random_orders
from simulated_cuda.engine import H100, run
from simulated_cuda.entries import Joins
from simulated_cuda.groups import SimulatedGroup, SimulatedWork
from simulated_cuda.ranks import Logged, log_alone
from torch import Tensor

from penstock.examples import gpt, llama, moe
from penstock.executor.program.interpreter import Interpreter
from penstock.executor.program.rehearsal import rehearse
from penstock.executor.stage.sharded_parameters import Scatter
from penstock.schemas.errors import PenstockError
from penstock.schemas.program import INPUT, SHARDINGS, WITHIN_PASSES, Instruction, Program
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.problem import Problem
from penstock.solvers.schedules.early_backward import one_f_one_b
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.periodic.eager import eager

PLANS = 100
MOST_RANKS, MOST_MICRO_BATCHES = 4, 12
_SIZES: dict[str, Any] = {"blocks": 2, "width": 8, "heads": 2, "length": 16, "vocabulary": 64}
_GROUPED = _SIZES | {"key_value_heads": 2, "inner": 8}
JOBS = {
    "gpt": Tokens("gpt", partial(gpt.layers, gpt.Config(**_SIZES)), torch.float32),
    "tied": Tokens("tied", partial(gpt.layers, gpt.Config(**_SIZES, tied=True)), torch.float32, (gpt.TIED,)),
    "llama": Tokens("llama", partial(llama.layers, llama.Config(**_GROUPED)), torch.float32),
    "moe": Tokens("moe", partial(moe.layers, moe.Config(**_GROUPED, experts=2, per_token=1)), torch.float32),
}
DEGREES = [
    *(Degrees(tensor=2), Degrees(tensor=2), Degrees(context=2), Degrees(expert=2)),
    *(Degrees(), Degrees(tensor=2, context=2), Degrees(context=2, expert=2)),
]


class Plan(NamedTuple):
    """Programs of all ranks, and what they train."""

    programs: list[Program]
    job: Tokens


def drawn(seed: int) -> Plan:
    """Draw the first plan of a seed that has several ranks and that NCCL can carry."""
    rng = random.Random(seed)
    while True:
        degrees, sharding = rng.choice(DEGREES), rng.choice(["none", "optimizer", *SHARDINGS, *SHARDINGS])
        name = "moe" if degrees.expert > 1 else rng.choice(list(JOBS))
        cells = rng.randint(1, MOST_RANKS // degrees.cell)
        try:
            programs = lowered(rng, name, degrees, cells, sharding)
        except (PenstockError, ValueError):  # no such plan, or none that NCCL can carry
            continue
        if len(programs) > 1 and programs[0].batches * programs[0].num_micro_batches <= MOST_MICRO_BATCHES:
            return Plan(programs, JOBS[name])


def lowered(rng: random.Random, name: str, degrees: Degrees, cells: int, sharding: Any) -> list[Program]:
    """Lower a random plan. Raises PenstockError where there is no such plan."""
    job = JOBS[name]
    problem = problem_of(
        job,
        cells,
        bucket_bytes=rng.choice([1000, 10**6]),
        overlap=rng.random() < 0.7,
        shard_states=sharding == "optimizer",
    )
    problem = replace(cells_of(problem, degrees), choice=Choice(degrees, sharding))
    norm = rng.random() < 0.3
    if sharding in WITHIN_PASSES:
        layers = problem.num_layers
        whole = Stage(0, layers - 1, tuple(range(cells)), recompute=_recomputed(rng, layers))
        allocation = single_pipeline([with_modules(rng, whole)], rng.randint(1, 3))
        orders = rng.choice([gpipe, one_f_one_b])(problem, allocation)
        return lower(problem, allocation, orders, norm=norm, transport="nccl")
    allocation = random_allocation(rng, problem)
    if sharding in ("none", "optimizer") and rng.random() < 0.25:
        return _periodic(rng, problem, allocation)
    orders = random_orders(rng, allocation)
    if not any(
        (row.operations[:, 0] == INPUT).any() for row in orders.rows
    ):  # halves of backwards recompute no modules
        stages = [with_modules(rng, stage) for stage in allocation.stages]
        allocation = single_pipeline(stages, allocation.num_micro_batches)
    return lower(problem, allocation, orders, norm=norm, transport="nccl")


def _periodic(rng: random.Random, problem: Problem, allocation: Allocation) -> list[Program]:
    """Lower programs without a flush."""
    rule: Any = rng.choice(["weight_stashing", "double_buffered"])
    pattern = eager(problem, allocation, update_rule=rule)
    return lower(problem, allocation, pattern, update_rule=rule, batches=rng.randint(2, 4), transport="nccl")


def _recomputed(rng: random.Random, layers: int) -> tuple[tuple[int, int], ...]:
    first = rng.randrange(layers)
    return ((first, rng.randrange(first, layers)),) if rng.random() < 0.3 else ()


def with_modules(rng: random.Random, stage: Stage) -> Stage:
    """Return a stage that recomputes some modules separately, where it does not recompute whole layers."""
    modules = rng.choice([(), (), ("attention",), ("mlp", "norm")])
    return replace(stage, modules=() if stage.recomputes else modules)


def logged_of(plan: Plan) -> list[Logged]:
    """Log the product's ranks, each alone: two steps, or all batches of a plan that does not flush."""
    batches = plan.programs[0].batches
    more = {"segments": [0]} if batches > 1 else {}
    return log_alone(plan.programs, plan.job, steps=batches if batches > 1 else 2, **more)


def kinds(logged: Sequence[Logged]) -> Counter[str]:
    """Count the communicators' kernels of all ranks by kind."""
    return Counter(entry.kind for one in logged for entry in one.log if isinstance(entry, Joins))


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(PLANS))
def test_ranks_that_share_layers_come_to_their_end(seed: int) -> None:
    """At two speeds of host, computation and messages; nothing races, and nothing is used that was given back."""
    logged = logged_of(drawn(seed))
    assert kinds(logged), "over simulated communicators"
    rng = random.Random(seed)
    other = H100._replace(
        call_ns=rng.choice([1, 10_000]), operation_ns=rng.choice([10, 10**6]), message_ns=rng.choice([10, 10**6])
    )
    for device in (H100, other):
        assert run([one.log for one in logged], device).faults == ()
    assert [race for one in logged for race in one.races] == []


# Faults


def plan_of(sharding: Any, *, degrees: Degrees = Degrees(), cells: int = 2, micro_batches: int = 2) -> Plan:
    """Lower all layers of a small GPT on some GPU groups; parameters of a bucket move together."""
    problem = problem_of(JOBS["gpt"], cells, bucket_bytes=1000)
    problem = replace(cells_of(problem, degrees), choice=Choice(degrees, sharding))
    allocation = single_pipeline([Stage(0, problem.num_layers - 1, tuple(range(cells)))], micro_batches)
    return Plan(lower(problem, allocation, one_f_one_b(problem, allocation), transport="nccl"), JOBS["gpt"])


def piped(sharding: Any, *, degrees: Degrees = Degrees()) -> Plan:
    """Lower two stages, the first of them on two GPU groups that share out their parameters."""
    problem = problem_of(JOBS["gpt"], 3, bucket_bytes=1000)
    problem = replace(cells_of(problem, degrees), choice=Choice(degrees, sharding))
    allocation = single_pipeline([Stage(0, 1, (0, 1)), Stage(2, problem.num_layers - 1, (2,))], 2)
    return Plan(lower(problem, allocation, one_f_one_b(problem, allocation), transport="nccl"), JOBS["gpt"])


def said_of(plan: Plan, *patches: Any) -> str:
    """Return the reports of the engine and of the order of accesses, a line each."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        logged = logged_of(plan)
    return "\n".join([*run([one.log for one in logged]).faults, *(race for one in logged for race in one.races)])


def moved(program: Program, kind: str, to: Callable[[list[Instruction]], int]) -> Program:
    """Return a program whose first instruction of a kind is at another place."""
    instructions = list(program.prologue)
    one = instructions.pop(next(i for i, each in enumerate(instructions) if each.kind == kind))
    place = to(instructions)
    return replace(program, prologue=(*instructions[:place], one, *instructions[place:]))


def test_parameters_that_one_replica_does_not_gather() -> None:
    """Its peer's kernel waits for it, and takes the next one for it."""
    plan = piped("parameters_kept")
    assert said_of(plan) == ""
    assert re.search(r"do not fit each other: |has not launched its own", said_of(plan, left_out(0)))


def test_buckets_that_replicas_gather_in_different_orders() -> None:
    plan = piped("parameters_kept")
    places = [i for i, one in enumerate(plan.programs[0].prologue) if one.kind == "UNSHARD"]
    assert len(places) > 1
    turned = moved(plan.programs[0], "UNSHARD", lambda _: places[-1])
    assert "do not fit each other: all_gather" in said_of(plan._replace(programs=_with(plan, turned)))


@pytest.mark.tier("nightly")
def test_replicas_with_parts_of_different_sizes_rehearse_alike() -> None:
    """Of three samples one replica has two, the other one: of two sizes of micro-batch, and of one."""
    plan = plan_of("gradients", micro_batches=3)
    assert {len(program.stages[0].rows) for program in plan.programs} == {2}
    assert said_of(plan) == ""

    def by_own_rows(interpreter: Interpreter) -> None:
        cells = [(n, len(cell.rows), cell) for b in interpreter._bound for (n, _), cell in b.cells.items()]
        with interpreter._whole():
            rehearse(cells, interpreter.stages, interpreter.shapes, interpreter.chain, interpreter.runtime)

    assert said_of(plan, mock.patch.object(Interpreter, "rehearse", by_own_rows)) != ""


@pytest.mark.tier("nightly")
def test_a_rank_that_leaves_out_a_collective_within_a_layer() -> None:
    """Its peer's kernel waits, and everything behind it in the compute stream."""
    plan = plan_of("none", degrees=Degrees(tensor=2), cells=1)
    assert said_of(plan) == ""
    assert re.search(r"do not fit each other: |has not launched its own", said_of(plan, left_out(1)))


def left_out(rank: int) -> Any:
    """Make a rank of a group leave out its first all-gather."""
    gather, left = SimulatedGroup.all_gather_single, iter([True])

    def all_but_one(group: Any, output: Tensor, source: Tensor, opts: Any) -> Any:
        if group.rank() == rank and next(left, False):
            return SimulatedWork(group._recorder, group._recorder.record(0), None)
        return gather(group, output, source, opts)

    return mock.patch.object(SimulatedGroup, "all_gather_single", all_but_one)


def test_sums_of_gradients_that_nobody_waits_for() -> None:
    """What was summed is added up while it is still being summed."""
    report = said_of(plan_of("gradients"), mock.patch.object(SimulatedWork, "wait", return_value=True))
    assert re.search(r"reads what reduce_scatter \d+ in the stream of group \d+ writes, and does not wait", report)


def test_parameters_that_are_let_go_of_while_they_are_gathered() -> None:
    """Into the storage of the whole parameters, which another tensor then has."""

    def unwaited(scatter: Scatter) -> None:
        scatter._unit.summed.untyped_storage().resize_(0)
        scatter._unit.summed.untyped_storage().resize_(scatter._unit.summed.numel() * 4)
        scatter._unit.summed.zero_()

    report = said_of(plan_of("parameters_kept"), mock.patch.object(Scatter, "wait", unwaited))
    assert re.search(r"computation in the compute stream writes what reduce_scatter \d+ .* writes", report)


def _with(plan: Plan, program: Program) -> list[Program]:
    return [program if program.rank == one.rank else one for one in plan.programs]
