"""Profiles with tensor degrees: their memory under the judge, their own numbers at degree 1, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from penstock.convert import to_problem
from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.facts.device_table import LEVELS, device_facts
from penstock.schemas.errors import InvalidDocument, NotFound, UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import MemoryModel, PlanRequest
from penstock.schemas.transformers.degrees import ContextKind, Framework
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of
from penstock.shapes.gpu_memory import memory_of_stages
from penstock.shapes.layout import Layout, layers_of_stages
from penstock.shapes.profiled_degrees import LEAST_TOKENS, DegreeOptions
from penstock.shapes.profiles import profile_of, with_variants
from penstock.solvers.degrees.contract import contract
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees, Sharding
from penstock.solvers.schedules.early_backward import one_f_one_b

LLAMA = SHAPES["llama-3-70b"].model_copy(update={"layers": 16})
GROUPED = LLAMA.model_copy(update={"kv_heads": 4})
GPT = SHAPES["gpt-20b"].model_copy(update={"layers": 8})
FRAMEWORKS: tuple[Framework, ...] = ("megatron", "torch")


def _peaks(shape: TransformerShape, layout: Layout) -> list[int]:
    """Return the judge's peak memory of every stage of the layout, one micro-batch forward and one backward in turn."""
    rows = layout.micro_batch_size * layout.data
    request = PlanRequest(
        profile=profile_of(
            shape,
            layout.framework,
            ("A100",),
            degrees=DegreeOptions(context=(layout.context,)),
            context_kind=layout.context_kind,
        ),
        topology=catalogue.cluster(f"{layout.pipeline * layout.data}x{layout.tensor * layout.context}xA100"),
        global_batch_size=layout.global_batch_size or rows,
        micro_batch_sizes=(rows,),
        memory=MemoryModel(gradient="fp32", buffers="none"),
    )
    choice = Choice(Degrees(tensor=layout.tensor, context=layout.context), layout.sharding)
    problem = contract(to_problem(request), choice)
    cells = 1 if choice.in_one_stage else layout.data
    split = layers_of_stages(shape.layers, layout)
    assert split is not None
    stages, first = [], 0
    for number, layers in enumerate(split):
        last = first + layers + (number == 0) + (number == layout.pipeline - 1) - 1
        stages.append(Stage(first, last, tuple(range(number * cells, (number + 1) * cells))))
        first = last + 1
    allocation = single_pipeline(tuple(stages), (layout.global_batch_size or rows) // rows)
    timeline = simulate(problem, allocation, one_f_one_b(problem, allocation))
    return [
        timeline.uses[stage.devices[0]].memory.total - problem.devices[stage.devices[0]].context_bytes
        for stage in stages
    ]


@pytest.mark.cases(13)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize(("pipeline", "data", "sharding"), [(4, 1, "none"), (2, 2, "optimizer"), (1, 2, "optimizer")])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_judges_memory_is_that_of_the_closed_form(
    framework: Framework, shape: TransformerShape, pipeline: int, data: int, sharding: str, tensor: int
) -> None:
    layout = Layout(
        tensor=tensor, pipeline=pipeline, data=data, framework=framework, micro_batch_size=2,
        global_batch_size=16, sharding=sharding,  # type: ignore[arg-type]
    )  # fmt: skip
    expected = [stage.total for stage in memory_of_stages(shape, layout)]
    assert _peaks(shape, layout) == pytest.approx(expected, rel=0.001)


@pytest.mark.cases(15)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize(("sharding", "pipeline"), [("gradients", 1), ("parameters", 1), ("parameters_kept", 2)])
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_and_where_more_is_sharded(
    framework: Framework, shape: TransformerShape, sharding: Sharding, pipeline: int, tensor: int
) -> None:
    layout = Layout(
        tensor=tensor, pipeline=pipeline, data=4, framework=framework, micro_batch_size=2, global_batch_size=32,
        sharding=sharding,
    )  # fmt: skip
    if (framework, sharding) == ("megatron", "parameters_kept"):
        pytest.skip("a sharding of FSDP2 alone: tests/shapes/test_legality.py")
    expected = [stage.total for stage in memory_of_stages(shape, layout)]
    assert _peaks(shape, layout) == pytest.approx(expected, rel=0.001)


@pytest.mark.tier("ci")
@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_of_sharded_sequences(framework: Framework, sharding: Sharding) -> None:
    """Two replicas of two GPUs that share sequences: four that share out the dense parameters."""
    shape = LLAMA.model_copy(update={"sequence_length": 32_768})
    layout = Layout(
        tensor=2, context=2, data=2, framework=framework, global_batch_size=4, sharding=sharding
    )  # fmt: skip
    expected = [stage.total for stage in memory_of_stages(shape, layout)]
    assert _peaks(shape, layout) == pytest.approx(expected, rel=0.001)


@pytest.mark.cases(4)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("kind", get_args(ContextKind))
@pytest.mark.parametrize(("tensor", "context", "pipeline"), [(1, 4, 2), (2, 2, 4), (1, 8, 1)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_of_long_sequences_as_well(
    framework: Framework, tensor: int, context: int, pipeline: int, kind: ContextKind
) -> None:
    shape = LLAMA.model_copy(update={"sequence_length": 32_768})
    layout = Layout(
        tensor=tensor, context=context, pipeline=pipeline, framework=framework, context_kind=kind,
        global_batch_size=4,
    )  # fmt: skip
    expected = [stage.total for stage in memory_of_stages(shape, layout)]
    assert _peaks(shape, layout) == pytest.approx(expected, rel=0.001)


def test_copied_heads_are_in_both() -> None:
    layout = Layout(tensor=8, pipeline=2, global_batch_size=4)
    expected = [stage.total for stage in memory_of_stages(GROUPED, layout)]
    assert _peaks(GROUPED, layout) == pytest.approx(expected, rel=0.001)


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", sorted(SHAPES.keys() & set(catalogue.model_names())))
def test_a_shipped_profile_keeps_its_own_numbers(name: str) -> None:
    profile = catalogue.profile(name)
    variants = with_variants(profile, SHAPES[name], "torch")
    added = {"shape", "framework", "classes", "variants", "assumptions"}
    assert variants == profile
    assert variants.model_dump(exclude=added) == catalogue.read(name).model_dump(exclude=added)
    assert ModelProfile.model_validate_json(variants.canonical_json()) == variants
    degrees = [each.degrees.tensor for each in variants.variants or () if each.degrees.context == 1]
    assert sorted({each.degrees.context for each in variants.variants or ()} - {1}) == (
        [2] if SHAPES[name].sequence_length >= 2 * LEAST_TOKENS else []
    )
    assert degrees == {"gpt": [2, 4], "gpt2-small": [2, 4], "gpt2-xl": [], "bert-base": [2, 4]}.get(name, [2, 4, 8])
    if degrees:
        assert set(variants.classes or ()) == {0, 1, 2}, "all blocks are alike"


def test_sends_are_hidden_for_as_long_as_a_measured_pass_takes() -> None:
    """A profile of a device half as fast as the closed form says."""
    fast = profile_of(
        LLAMA, "megatron", ("H100",), micro_batch_sizes=(1,), degrees=DegreeOptions(tensor=(), context=(4,))
    )
    measured = fast.measurements[0]
    layers = tuple(
        each.model_copy(update={"forward_ns": 2 * each.forward_ns, "backward_ns": 3 * each.backward_ns})
        for each in measured.layers
    )
    alone = fast.model_copy(
        update={"measurements": (measured.model_copy(update={"layers": layers}),), "classes": None, "variants": None}
    )
    slow = with_variants(alone, LLAMA, "megatron", degrees=DegreeOptions(tensor=(), context=(4,)))

    def hidden(profile: ModelProfile) -> list[tuple[str, int]]:
        (variant,) = profile.variants or ()
        collectives = variant.measurements[0].layers[1].collectives
        return [(each.phase, each.hidden_ns) for each in collectives if each.over == "context"]

    factors = {"forward": 2, "backward": 3}
    assert hidden(slow) == [(phase, factors[phase] * hidden_ns) for phase, hidden_ns in hidden(fast)]
    assert all(hidden_ns > 0 for _phase, hidden_ns in hidden(fast))


def test_heads_that_no_degree_divides_are_named() -> None:
    divided = with_variants(catalogue.profile("gpt2-xl"), SHAPES["gpt2-xl"], "torch")
    assert (divided.variants, divided.classes) == (None, None)
    assert "tensor 2 does not divide 25 attention heads" in divided.assumptions[-1]


def test_of_a_shape_alone_the_variants_are_the_closed_form_itself() -> None:
    profile = profile_of(LLAMA, "megatron", ("A100", "H100"), micro_batch_sizes=(1, 4))
    (variant,) = (each for each in profile.variants or () if each.degrees.tensor == 4 and each.degrees.context == 1)
    layout = Layout(tensor=4, micro_batch_size=4)
    costs = costs_of(Case(LLAMA, layout, device_facts("H100", framework="megatron")))
    assert variant.measurements[-1].layers == tuple(costs.values())
    assert profile.device_kinds == ("A100", "H100")
    size = variant.layers[1].parameter_bytes
    assert size == 2 * (parameters.layer(LLAMA, dense=True).dense // 4 + 2 * LLAMA.hidden)


def test_measured_layers_that_differ_are_classes_of_their_own() -> None:
    profile = profile_of(LLAMA, "torch", ("H100",), micro_batch_sizes=(1,))
    measured = profile.measurements[0]
    slower = measured.layers[3].model_copy(update={"forward_ns": 2 * measured.layers[3].forward_ns})
    layers = (*measured.layers[:3], slower, *measured.layers[4:])
    changed = profile.model_copy(
        update={"measurements": (measured.model_copy(update={"layers": layers}),), "classes": None, "variants": None}
    )
    divided = with_variants(changed, LLAMA, "torch")
    assert divided.classes is not None
    assert divided.classes[:5] == (0, 1, 1, 2, 1)
    for variant in divided.variants or ():
        _embedding, usual, odd, _head = variant.measurements[0].layers
        assert odd.forward_ns == pytest.approx(2 * usual.forward_ns, abs=1)
        assert odd.backward_ns == usual.backward_ns


def test_a_tied_head_holds_its_norm_alone() -> None:
    shape = SHAPES["gpt-3-175b"]
    profile = profile_of(shape, "megatron", ("A100",), micro_batch_sizes=(1,))
    assert profile.layers[-1].parameter_bytes == 2 * 2 * shape.hidden
    (tie,) = profile.shared_parameters
    assert (tie.layers, tie.bytes) == ((0, 97), 2 * 50_304 * shape.hidden)
    assert sum(layer.parameter_bytes for layer in profile.layers) == pytest.approx(2 * 175e9, rel=0.01)


def test_an_illegal_degree_is_refused_with_its_rule() -> None:
    with pytest.raises(UnsupportedRequest, match="tensor 3 does not divide 64 attention heads; nearest"):
        profile_of(LLAMA, "torch", ("H100",), degrees=DegreeOptions(tensor=[3]))
    with pytest.raises(NotFound, match="no device kind 'X9'"):
        profile_of(LLAMA, "torch", ("X9",))
    with pytest.raises(InvalidDocument, match="at least 1 sample"):
        profile_of(LLAMA, "torch", ("H100",), micro_batch_sizes=(0,))


def test_layers_of_another_model_are_refused() -> None:
    with pytest.raises(InvalidDocument, match="'gpt2-small' has 14 layers, but llama-3-70b has 18"):
        with_variants(catalogue.profile("gpt2-small"), LLAMA, "torch")
    wider = SHAPES["gpt2-small"].model_copy(update={"ffn": 4096})
    with pytest.raises(InvalidDocument, match=r"layer 'block[.]0' of 'gpt2-small' has 14175744 bytes"):
        with_variants(catalogue.profile("gpt2-small"), wider, "torch")


def test_a_profile_of_kernels_is_quicker_and_says_by_how_much() -> None:
    """All of it: at degrees, too, and no byte is another."""
    runs, kernels = (profile_of(LLAMA, "torch", ["H100"], micro_batch_sizes=[1], level=level) for level in LEVELS)
    ratio = device_facts("H100", "kernels").flops_per_s("bf16") / device_facts("H100").flops_per_s("bf16")
    (sentence,) = set(kernels.assumptions) - set(runs.assumptions)
    assert sentence.startswith("times are of kernels measured one by one")
    assert f"{ratio:.2f} times as quick on H100" in sentence
    for plain, quick in zip(runs.variants or (), kernels.variants or (), strict=True):
        for plain_cost, other in zip(plain.measurements[0].layers, quick.measurements[0].layers, strict=True):
            assert other.forward_ns < plain_cost.forward_ns
            assert other.stash_bytes == plain_cost.stash_bytes
            assert other.collectives == plain_cost.collectives


def test_a_kind_whose_kernels_were_not_measured_has_no_such_level() -> None:
    with pytest.raises(NotFound, match="no level 'kernels' of V100, only of H100, H200, B200"):
        profile_of(LLAMA, "torch", ["V100"], level="kernels")
    assert device_facts("B200", "kernels") == replace(device_facts("B200"), level="kernels")
