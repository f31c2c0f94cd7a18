"""Costs of a layer on one GPU: bytes and collectives by hand, times against the meta device's operations."""

from __future__ import annotations

import pytest

from penstock.examples import catalogue
from penstock.examples.models import MODELS
from penstock.examples.shapes import SHAPES
from penstock.facts.device_table import device_facts
from penstock.schemas.profile import DividedCost
from penstock.schemas.transformers.degrees import Collective
from penstock.schemas.transformers.shape import TransformerShape
from penstock.shapes import parameters
from penstock.shapes.activations import per_token
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of, local_parameters
from penstock.shapes.layout import Layout
from penstock.shapes.roles import Role

H100 = device_facts("H100")
LLAMA = SHAPES["llama-3-70b"]
BLOCK: Role = "dense"


def _costs(shape: TransformerShape, **layout: object) -> dict[Role, DividedCost]:
    return costs_of(Case(shape, Layout(**layout), H100))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "gpt-20b"])
def test_eager_times_are_those_of_the_operations_on_the_meta_device(name: str) -> None:
    """The profiler counts the whole square of attention and does without the losses of small products."""
    shape, profile = SHAPES[name], catalogue.profile(name)
    for measured in profile.measurements:
        if measured.device_kind not in ("A100", "H100", "H200"):
            continue
        facts = device_facts(measured.device_kind)
        layout = Layout(framework="torch", micro_batch_size=measured.micro_batch_size)
        costs = costs_of(Case(shape, layout, facts, MODELS[name].dtype))
        for mine, profiled in zip(list(costs.values())[1:], (measured.layers[1], measured.layers[-1]), strict=True):
            assert mine.forward_ns == pytest.approx(profiled.forward_ns, rel=0.12)
            assert mine.backward_ns == pytest.approx(profiled.backward_ns, rel=0.12)
            assert mine.stash_bytes == pytest.approx(profiled.stash_bytes, rel=0.003)


@pytest.mark.tier("ci")
@pytest.mark.parametrize("framework", ["megatron", "torch"])
def test_eight_gpus_take_more_than_an_eighth_of_the_time_and_the_more_the_less_each_has_to_do(framework: str) -> None:
    gains = []
    for length in (8192, 2048, 512):
        shape = LLAMA.model_copy(update={"sequence_length": length})
        alone, shared = (_costs(shape, tensor=t, framework=framework)[BLOCK] for t in (1, 8))
        gains.append(alone.forward_ns / shared.forward_ns)
        assert 0 < (shared.backward_weight_ns or 0) < shared.backward_ns
    assert 8 > gains[0] > gains[1] > gains[2] > 4


def test_a_micro_batch_twice_as_large_takes_at_most_twice_as_long() -> None:
    one, two = (_costs(LLAMA, tensor=8, micro_batch_size=b)[BLOCK] for b in (1, 2))
    assert one.forward_ns < two.forward_ns <= 2 * one.forward_ns
    assert two.stash_bytes == 2 * one.stash_bytes
    assert two.workspace_bytes == one.workspace_bytes, "dummy gradients do not grow with the samples"


def _summed(costs: DividedCost) -> dict[tuple[str, str], tuple[int, int]]:
    return {(each.phase, each.operation): (each.bytes_per_sample, each.count) for each in costs.collectives}


def test_megatrons_collectives_by_hand() -> None:
    whole = LLAMA.sequence_length * LLAMA.hidden * 2
    embedding, block, head = map(_summed, _costs(LLAMA, tensor=8).values())
    assert embedding == {("forward", "reduce_scatter"): (whole, 1), ("backward", "all_gather"): (whole, 1)}
    assert block == {
        ("forward", "all_gather"): (2 * whole, 2), ("forward", "reduce_scatter"): (2 * whole, 2),
        ("backward", "all_gather"): (4 * whole, 4), ("backward", "reduce_scatter"): (2 * whole, 2),
        ("step", "all_reduce"): (4 * 2 * LLAMA.hidden, 1),
    }  # fmt: skip
    assert head == {
        ("forward", "all_gather"): (whole, 1), ("forward", "all_reduce"): (3 * 4 * LLAMA.sequence_length, 3),
        ("backward", "all_gather"): (whole, 1), ("backward", "reduce_scatter"): (whole, 1),
        ("step", "all_reduce"): (4 * LLAMA.hidden, 1),
    }  # fmt: skip


def test_torch_keeps_what_megatron_gathers_again() -> None:
    whole = LLAMA.sequence_length * LLAMA.hidden * 2
    _embedding, block, head = _costs(LLAMA, tensor=8, framework="torch").values()
    assert _summed(block)["backward", "all_gather"] == (2 * whole, 2)
    assert ("backward", "all_gather") not in _summed(head)
    alone = _costs(LLAMA, framework="torch")[BLOCK].stash_bytes
    assert block.stash_bytes == pytest.approx((alone - 2 * whole) / 8 + 2 * whole, rel=1e-6)


def test_without_sequence_parallelism_an_all_reduce_moves_what_both_halves_do() -> None:
    def moved(collectives: tuple[Collective, ...], phase: str) -> int:
        weight = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
        return sum(weight[each.operation] * each.bytes_per_sample for each in collectives if each.phase == phase)

    with_it, without = (_costs(LLAMA, tensor=8, sequence_parallel=flag)[BLOCK].collectives for flag in (True, False))
    again = 2 * LLAMA.sequence_length * LLAMA.hidden * 2
    assert moved(with_it, "forward") == moved(without, "forward")
    assert moved(with_it, "backward") == moved(without, "backward") + again, "inputs gathered for weight gradients"
    assert moved(without, "step") == 0, "every GPU has the whole gradient of norms"


def test_one_gpu_has_no_collectives() -> None:
    assert not any(each.collectives for each in _costs(LLAMA).values())


@pytest.mark.parametrize("name", sorted(SHAPES.keys() & set(catalogue.model_names())))
def test_parameters_of_a_gpu_are_those_of_the_shipped_layers(name: str) -> None:
    dtype = MODELS[name].dtype
    case = Case(SHAPES[name], Layout(framework="torch"), device_facts("A100"), dtype)
    profile = catalogue.profile(name)
    shipped = (profile.layers[0], profile.layers[1], profile.layers[-1])
    for mine, profiled in zip(layers_of(case).values(), shipped, strict=True):
        assert mine.parameter_bytes == profiled.parameter_bytes
        assert mine.update_ns == pytest.approx(profiled.update_ns, abs=1)


@pytest.mark.tier("ci")
@pytest.mark.parametrize("framework", ["megatron", "torch"])
def test_parameters_of_all_gpus_are_the_model_and_copies_of_norms(framework: str) -> None:
    shape = SHAPES["gpt-3-175b"].model_copy(update={"padded_vocabulary": 51_200})
    per_gpu = local_parameters(shape, Layout(tensor=8, framework=framework))  # type: ignore[arg-type]
    block = parameters.layer(shape, dense=True)
    assert 8 * per_gpu["dense"].total == block.total + 7 * block.replicated
    assert per_gpu["head"].total == shape.hidden * 2, "the tied weight is the embedding's"
    assert 8 * per_gpu["embedding"].total == 51_200 * shape.hidden + 8 * 2048 * shape.hidden


def test_key_and_value_heads_are_copied_where_they_are_fewer_than_the_gpus() -> None:
    shape = LLAMA.model_copy(update={"kv_heads": 2})
    per_gpu = local_parameters(shape, Layout(tensor=8))["dense"].total
    each = 2 * LLAMA.hidden * LLAMA.head_width
    dense, replicated, _expert = parameters.layer(shape, dense=True)
    assert per_gpu == dense // 8 + replicated + each - each * 2 // 8, "a whole head, not a quarter of one"


# ---- recomputed modules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_modules_free_what_the_formula_of_a_dense_block_says(tensor: int) -> None:
    """Of (8h + 2(a + 2k)e + 2ae + 6f) s b / t and the log-sum-exp: norms 4h, attention the heads, the mlp 6f."""
    h, a, k, e, f = LLAMA.hidden, LLAMA.heads, LLAMA.kv_heads, LLAMA.head_width, LLAMA.ffn
    tokens = LLAMA.sequence_length
    block = _costs(LLAMA, tensor=tensor)[BLOCK]
    freed = {each.module: each.freed_bytes for each in block.modules or ()}
    kv = max(k, tensor)
    assert freed == {
        "attention": (2 * (a + 2 * kv) * e + 2 * a * e + 4 * a) * tokens // tensor,
        "mlp": 6 * f * tokens // tensor,
        "norm": 4 * h * tokens // tensor,
    }
    statistics = 2 * 4 * tokens // tensor
    assert block.stash_bytes - sum(freed.values()) == 4 * h * tokens // tensor + statistics


@pytest.mark.tier("ci")
@pytest.mark.parametrize("framework", ["megatron", "torch"])
def test_modules_are_parts_of_a_forward(framework: str) -> None:
    """What is left are the two sums with what passes by; norms cost little for what they free."""
    for tensor in (1, 2, 8):
        block = _costs(LLAMA, tensor=tensor, framework=framework)[BLOCK]
        modules = {each.module: each for each in block.modules or ()}
        operators = modules.pop("operators", None)
        assert (operators is None) == (framework == "megatron")
        assert list(modules) == ["attention", "mlp", "norm"]
        left = block.forward_ns - sum(each.forward_ns for each in modules.values())
        assert 0 < left < 0.05 * block.forward_ns
        collectives = [collectives for each in modules.values() for collectives in each.collectives]
        forward = [each for each in block.collectives if each.phase == "forward"]
        for operation in ("all_gather", "reduce_scatter"):
            again, first = (
                sum(each.count for each in some if each.operation == operation) for some in (collectives, forward)
            )
            assert again == first
        assert modules["norm"].forward_ns * 10 < modules["mlp"].forward_ns
    assert _costs(LLAMA, tensor=8)["embedding"].modules is None


def test_what_modules_free_agrees_with_fits() -> None:
    """Memory of stages that recompute norms and the mlp, as `penstock fits` computes it."""
    for modules in (("norm",), ("mlp",), ("attention", "mlp", "norm")):
        layout = Layout(tensor=4, recompute=frozenset(modules))
        kept = per_token(LLAMA, layout, dense=True)
        block = _costs(LLAMA, tensor=4)[BLOCK]
        freed = sum(each.freed_bytes for each in block.modules or () if each.module in modules)
        assert freed == int(kept.again * LLAMA.sequence_length) or len(modules) == 3
        if len(modules) < 3:
            assert block.stash_bytes - freed == int(kept.kept * LLAMA.sequence_length)
