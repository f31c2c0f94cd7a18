"""Shipped models as they are traced from their modules, whole and divided, against the closed form of their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from penstock.examples import gpt, llama
from penstock.examples.models import MODELS
from penstock.examples.shapes import SHAPES
from penstock.executor.divided.tensor_group import first_of
from penstock.executor.divided.tracer import DividedTracer, divided
from penstock.executor.profiling.analytic import TORCH_DTYPES, analytic_profile
from penstock.executor.profiling.memory_use import MemoryWatch
from penstock.executor.profiling.tracing import LayerCost, Tracer
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import load_job
from penstock.executor.runtime.cpu import CPU
from penstock.facts.device_table import device_facts
from penstock.schemas.profile import DividedCost, ModelProfile
from penstock.schemas.transformers.degrees import Collective, Degrees
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.activations import kept_by_modules, per_token
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.flash import flash
from penstock.shapes.costs.layers import costs_of, layers_of
from penstock.shapes.heads import heads_of
from penstock.shapes.layout import Layout

pytestmark = pytest.mark.tier("ci")

FACTS = device_facts("H100")
ALL = {"gpt2-small": (2, 4), "bert-base": (2, 4), "llama-3-8b": (2, 4, 8), "llama-3-70b": (2, 4, 8)}
"""Families and their degrees besides 1."""
CASES = [(name, degree) for name, degrees in ALL.items() for degree in (1, *degrees)]
ROLES = ("embedding", "dense", "head")


@cache
def traced(name: str) -> ModelProfile:
    model = MODELS[name]
    return analytic_profile(load_job(model.reference), "H100", (1,), model.dtype, tensor_degrees=ALL[name])


def layers(name: str, degree: int) -> list[tuple[int, DividedCost]]:
    """Return parameter bytes and cost of embedding, a block and head on one GPU."""
    profile = traced(name)
    places = (0, 1, len(profile.layers) - 1)
    if degree == 1:
        costs = profile.measurements[0].layers
        return [(profile.layers[i].parameter_bytes, DividedCost(**costs[i].model_dump())) for i in places]
    assert profile.classes is not None
    assert profile.variants is not None
    (variant,) = [each for each in profile.variants if each.degrees.tensor == degree]
    classes = [profile.classes[i] for i in places]
    return [(variant.layers[each].parameter_bytes, variant.measurements[0].layers[each]) for each in classes]


def case(name: str, degree: int) -> Case:
    return Case(SHAPES[name], Layout(tensor=degree, framework="torch"), FACTS, MODELS[name].dtype)


def totals(collectives: tuple[Collective, ...], *phases: str) -> Counter[tuple[str, str, str]]:
    totals_of = Counter[tuple[str, str, str]]()
    for each in collectives:
        if each.phase in phases:
            key = (each.phase, each.operation)
            totals_of.update({(*key, "count"): each.count, (*key, "bytes"): each.bytes_per_sample})
    return totals_of


def has_own_head(shape: TransformerShape) -> bool:
    """Return whether the head is BERT's, with two scores per token.

    BERT's scores are made of each GPU's part of the sequence, while the closed form divides all heads.
    """
    return shape.outputs is not None


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "degree"), CASES)
def test_parameters_are_those_of_the_closed_form(name: str, degree: int) -> None:
    closed = layers_of(case(name, degree))
    for role, (size, _cost) in zip(ROLES, layers(name, degree), strict=True):
        if not (role == "head" and has_own_head(SHAPES[name])):
            assert size == closed[role].parameter_bytes, role  # type: ignore[index]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("name", "degree"), CASES)
def test_collectives_are_those_of_the_closed_form(name: str, degree: int) -> None:
    closed = costs_of(case(name, degree))
    for role, (_size, cost) in zip(ROLES, layers(name, degree), strict=True):
        if role == "head" and has_own_head(SHAPES[name]):
            continue
        expected = closed[role].collectives  # type: ignore[index]
        assert totals(cost.collectives, "forward", "backward") == totals(expected, "forward", "backward"), role
        assert totals(cost.collectives, "step") == _without_whole_biases(SHAPES[name], role, totals(expected, "step"))


def _without_whole_biases(
    shape: TransformerShape, role: str, expected: Counter[tuple[str, str, str]]
) -> Counter[tuple[str, str, str]]:
    """Remove the biases' sums that DTensor does not make.

    DTensor makes gradients of biases behind row-divided products of gathered gradients: every GPU has the sum.
    """
    if role == "dense" and shape.ffn_biases and expected:
        expected["step", "all_reduce", "bytes"] -= 4 * 2 * shape.hidden
    return expected


@pytest.mark.parametrize(("name", "degree"), CASES)
def test_kept_bytes_are_those_of_the_closed_form(name: str, degree: int) -> None:
    closed = costs_of(case(name, degree))
    for role, (_size, cost) in zip(ROLES, layers(name, degree), strict=True):
        if role == "head" and has_own_head(SHAPES[name]):
            continue
        expected = closed[role].stash_bytes  # type: ignore[index]
        assert cost.stash_bytes - _numbers(SHAPES[name], role, degree) == pytest.approx(expected, rel=0.03), role


def _numbers(shape: TransformerShape, role: str, degree: int) -> int:
    """Return the bytes that an embedding keeps besides the ids of its tokens.

    Lookups of positions and segments keep their indices, 8 bytes each, of a GPU's own part. A divided lookup of words
    keeps for each token whether the GPU has it.
    """
    lookups = bool(shape.positions) + bool(shape.token_types)
    tokens = shape.sequence_length
    return 8 * lookups * tokens // degree + tokens * (degree > 1) if role == "embedding" else 0


@cache
def operations(name: str, degree: int) -> list[LayerCost]:
    """Trace the operations of embedding, first block and head."""
    model = MODELS[name]
    chain, dtype = Chain(load_job(model.reference)), TORCH_DTYPES[model.dtype]
    tracer = Tracer(chain, [chain.build_layer(i, device="meta").to(dtype) for i in range(len(chain.specs))], dtype)
    if degree == 1:
        return _ends(tracer.run(1).costs)
    with first_of(Degrees(tensor=degree)) as meshes:
        return _ends(DividedTracer(tracer, meshes).run(1).costs)


def _ends(costs: list[LayerCost]) -> list[LayerCost]:
    return [costs[0], costs[1], costs[-1]]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("name", "degree"), CASES)
def test_flops_are_those_of_the_weights_and_of_attention(name: str, degree: int) -> None:
    """Of attention all of the square, as torch counts it; its backward makes the scores again: 5 products for 2."""
    shape = SHAPES[name]
    tokens, width = shape.sequence_length, shape.heads * shape.head_width
    weights = sum(rows * columns for rows, columns in parameters.matrices(shape, dense=True))
    block, attention = 2 * weights * tokens / degree, 4 * tokens**2 * width / degree
    scores = 2 * shape.hidden * (shape.outputs or shape.vocabulary / degree) * tokens
    scores /= degree if has_own_head(shape) else 1
    expected = [(0.0, 0.0), (block + attention, 2 * block + 2.5 * attention), (scores, 2 * scores)]
    for (forward, backward), cost in zip(expected, operations(name, degree), strict=True):
        assert sum(each.flops for each in cost.forward) == pytest.approx(forward, rel=0.01)
        assert sum(each.flops for each in cost.backward) == pytest.approx(backward, rel=0.01)


def test_deep_models_are_traced_once_for_each_class() -> None:
    """llama-3-70b has 82 layers of three kinds."""
    profile = traced("llama-3-70b")
    assert profile.classes == (0, *[1] * 80, 2)
    assert [each.boundary for each in profile.variants or ()] == ["sharded"] * 3


@pytest.mark.parametrize("degrees", [Degrees(context=2), Degrees(tensor=2, context=4)], ids=str)
def test_parts_of_sequences_are_those_of_the_closed_form(degrees: Degrees) -> None:
    """Of attention each GPU has an even part of the square, though it computes two triangles and what is before."""
    name = "llama-3-8b"
    model, gpus = MODELS[name], degrees.gpus
    chain, dtype = Chain(load_job(model.reference)), TORCH_DTYPES[model.dtype]
    tracer = Tracer(chain, [chain.build_layer(i, device="meta").to(dtype) for i in range(len(chain.specs))], dtype)
    with first_of(degrees) as meshes:
        run = divided(tracer, meshes).run(1)
    layout = Layout(tensor=degrees.tensor, context=degrees.context, context_kind="all_gather", framework="torch")
    closed = costs_of(Case(SHAPES[name], layout, FACTS, model.dtype))
    for role, cost in zip(ROLES, _ends(run.costs), strict=True):
        expected = closed[role].collectives  # type: ignore[index]
        for over in ("tensor", "context"):
            traced, other = (
                tuple(each for each in every if each.over == over) for every in (cost.collectives, expected)
            )
            assert totals(traced, "forward", "backward") == totals(other, "forward", "backward"), (role, over)
    whole = operations(name, 1)[1]
    block = _ends(run.costs)[1]
    for of_gpu, alone in ((block.forward, whole.forward), (block.backward, whole.backward)):
        assert sum(each.flops for each in of_gpu) == pytest.approx(sum(each.flops for each in alone) / gpus, rel=1e-6)
    assert block.stash_bytes == pytest.approx(closed["dense"].stash_bytes, rel=0.03)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "llama-3-8b": lambda: llama.Block(
        llama.Config(blocks=1, width=256, heads=8, key_value_heads=2, inner=640, length=LENGTH, vocabulary=64)
    ),
    "gpt2-small": lambda: gpt.Block(gpt.Config(blocks=1, width=256, heads=8, length=LENGTH, vocabulary=64)),
}
LENGTH = 128
SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def selective() -> Any:
    """Return contexts that make every second product without a bias again, as torchtitan's ``SelectiveAC``."""
    seen = Counter[bool]()

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator is torch.ops.aten.mm.default:
            seen[context.is_recompute] += 1
        is_saved = operator in SAVED and (operator is not torch.ops.aten.mm.default or seen[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("name", BLOCKS)
def test_selective_checkpoints_keep_what_is_counted(name: str) -> None:
    """As allocated for a block in bf16 on the CPU; a whole checkpoint keeps the same apart from the results."""
    block = BLOCKS[name]().to(torch.bfloat16)
    x = torch.randn(1, LENGTH, 256, dtype=torch.bfloat16, requires_grad=True)
    left = []
    for contexts in (noop_context_fn, selective):
        with MemoryWatch(CPU) as watch, watch.stretch("forward"):
            out = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        left.append(watch.growth("forward").left_bytes - out.untyped_storage().nbytes())
        del out
    sizes = {"hidden": 256, "heads": 8, "head_width": 32, "sequence_length": LENGTH}
    widths = {"kv_heads": 2, "ffn": 640} if name == "llama-3-8b" else {"kv_heads": 8, "ffn": 1024, "positions": 0}
    shape = SHAPES[name].model_copy(update=sizes | widths)
    layout = Layout(framework="torch", sequence_parallel=False)
    freed = kept_by_modules(shape, layout, dense=True)["operators"]
    kept = per_token(shape, layout, dense=True).kept - freed
    assert left[1] - left[0] == LENGTH * (kept - 2 * shape.hidden)


def test_what_selective_checkpoints_make_again_is_all_but_attention_and_the_products_that_are_kept() -> None:
    one = case("llama-3-8b", 1)
    cost = costs_of(one)["dense"]
    (operators,) = [each for each in cost.modules or () if each.module == "operators"]
    shape = one.shape
    kept = [(shape.hidden, 4096), (shape.hidden, 1024), (shape.hidden, shape.ffn), (shape.ffn, shape.hidden)]
    products = sum(one.kernels.product_ns(one.tokens, rows, columns) for rows, columns in kept)
    attention = flash(one, heads_of(shape, 1)).forward
    assert cost.forward_ns - operators.forward_ns == pytest.approx(products + attention, abs=2)
    assert operators.collectives == ()
    shared = costs_of(case("llama-3-8b", 8))["dense"]
    again = next(each for each in shared.modules or () if each.module == "operators")
    sent = Counter({each.operation: each.count for each in shared.collectives if each.phase == "forward"})
    assert Counter({each.operation: each.count for each in again.collectives}) == sent - Counter(reduce_scatter=2)
