"""Modules of layers that ranks recompute by themselves: what is refused; the matrix of meshes trains with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_cases import Case, lowered
from rank_pool import RankPool
from torch import Tensor, nn

from penstock.executor.run.job import LayerSpec, layer_specs
from penstock.executor.stage.recomputed_modules import recomputable, recompute_modules
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.program import Program

HERE = Path(__file__).parent


class Counted(nn.Module):
    """Counts its runs, draws random numbers, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        result: Tensor = self.inner(x)
        return result


def test_a_module_runs_again_with_the_same_random_state_and_leaves_statistics_alone() -> None:
    torch.manual_seed(0)
    whole, again = Counted(), Counted()
    again.load_state_dict(whole.state_dict())
    x = torch.randn(6, 4)
    recompute_modules(LayerSpec("a", Counted, modules={"mlp": ""}), again, ["mlp"])
    for module in (whole, again):
        torch.manual_seed(1)
        module(x).square().sum().backward()
    assert (whole.runs, again.runs) == (1, 2)
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    for before, after in zip(whole.buffers(), again.buffers(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (
            None,
            "layer 'a' cannot recompute its 'attention': its LayerSpec has no `modules` to say which module that is",
        ),
        ({"mlp": "inner"}, "layer 'a' cannot recompute its 'attention': its `modules` names only mlp"),
        ({"attention": "inside"}, "layer 'a' cannot recompute its 'attention': its `modules` names 'inside', which"),
    ],
)
def test_what_a_layer_cannot_recompute_is_refused_by_layer_and_module(modules: Any, words: str) -> None:
    with pytest.raises(UnsupportedRequest, match=words) as refused:
        recompute_modules(LayerSpec("a", Counted, modules=modules), Counted(), ["attention"])
    assert "recompute never or always" in str(refused.value.remedy)


def test_only_modules_that_every_layer_names_have_costs() -> None:
    specs = [LayerSpec("embedding", Counted, modules={}), LayerSpec("a", Counted, modules={"mlp": "x", "norm": "y"})]
    assert recomputable(specs) == ("mlp", "norm")
    assert recomputable([*specs, LayerSpec("b", Counted, modules={"norm": ("x", "y")})]) == ("norm",)
    assert recomputable([*specs, LayerSpec("c", Counted)]) == ()


@pytest.mark.tier("quick")
def test_names_of_modules_are_those_of_plans() -> None:
    class Job:
        name, seed, batch_size = "job", 0, 1

        def layers(self) -> list[LayerSpec]:
            return [LayerSpec("a", Counted, modules={"attenton": "inner"})]

    with pytest.raises(InvalidDocument, match=r"layer 0 \('a'\): modules is .*attenton.* of attention, mlp, norm"):
        layer_specs(Job())  # type: ignore[arg-type]


@pytest.mark.tier("nightly")
def test_ranks_say_before_any_step_which_layer_and_module(world: RankPool) -> None:
    """A plan of modules for a job whose layers do not say where they are; the program is as it was written."""
    case = Case("llama", "float32", 2, 1, 1, 1, 1, "none", "gpipe", "attention")
    programs = [Program.from_json(each.to_json()) for each in lowered(case).programs]
    assert {entry.modules for each in programs for entry in each.stages} == {("attention",)}
    done = world.train(programs, "mesh_jobs:silent", steps=1, directory=str(HERE))
    assert all("layer 'embedding' cannot recompute its 'attention'" in each["reason"] for each in done)
    assert not any(each["events"] for each in done)


def test_backwards_in_halves_are_refused_with_the_schedule() -> None:
    case = Case("llama", "float32", 2, 1, 1, 1, 2, "none", "zero-bubble", "attention")
    with pytest.raises(UnsupportedRequest, match="do not recompute attention of each layer under schedule zb-h1"):
        lowered(case)
