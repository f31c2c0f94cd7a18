"""Layers that several GPUs share, traced: what each GPU has of small ones, and which cannot be divided so."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from penstock.examples import gpt
from penstock.executor.divided.division import divide
from penstock.executor.divided.tensor_group import LocalRecorder, first_of
from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.run.job import LayerSpec, SimpleJob, layer_specs, load_job
from penstock.schemas.errors import Conflict, InvalidDocument, PenstockError, UnsupportedRequest
from penstock.schemas.profile import DividedCost, ModelProfile
from penstock.schemas.transformers.degrees import Collective, Degrees

POSITIONS, WIDTH = 16, 8


class Sequences(SimpleJob):
    """Vectors at positions, and their sum as the loss."""

    def __init__(self, *layers: LayerSpec, positions: int = POSITIONS) -> None:
        super().__init__("sequences", batch_size=8)
        self._layers, self._positions = layers, positions

    def layers(self) -> tuple[LayerSpec, ...]:
        return self._layers

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        return {"x": torch.ones(len(rows), self._positions, WIDTH)}, None

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        return outputs["x"].sum(), 1

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)


linear = partial(nn.Linear, WIDTH, WIDTH, bias=False)
SUM = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
PAIR = LayerSpec(
    "pair", lambda: nn.Sequential(linear(), linear()), parallel={"0": ColwiseParallel(), "1": RowwiseParallel()}
)
"""Columns, then rows: one sum forward, one backward; it reads and writes whole tensors."""
SCATTERED = LayerSpec(
    "scattered", linear, parallel={"": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
)
NORMED = LayerSpec("normed", partial(nn.LayerNorm, WIDTH), parallel={"": SequenceParallel(use_local_output=True)})


def traced(*layers: LayerSpec, degree: int = 2, positions: int = POSITIONS) -> ModelProfile:
    return analytic_profile(Sequences(*layers, positions=positions), "H100", (1, 2), tensor_degrees=(degree,))


def costs(profile: ModelProfile, size: int = 0) -> list[DividedCost]:
    assert profile.variants is not None
    assert profile.classes is not None
    return [profile.variants[0].measurements[size].layers[each] for each in profile.classes]


def test_columns_then_rows_halve_the_weights_and_sum_twice() -> None:
    profile = traced(LayerSpec("first", linear, parallel="replicated"), PAIR, PAIR._replace(name="last"))
    assert profile.variants is not None
    (variant,) = profile.variants
    whole = 4 * WIDTH * WIDTH
    assert profile.classes is not None
    assert [variant.layers[each].parameter_bytes for each in profile.classes] == [whole, whole, whole]
    assert variant.boundary == "whole"
    size = 4 * POSITIONS * WIDTH
    summed = partial(Collective, operation="all_reduce", over="tensor", bytes_per_sample=size)
    assert costs(profile)[1].collectives == costs(profile, 1)[1].collectives
    assert costs(profile)[1].collectives == (summed(phase="forward"), summed(phase="backward"))
    assert costs(profile)[1].stash_bytes == size + size // 2, "the whole input, and a half of what lies between"


def test_a_replicated_layer_costs_what_it_costs_alone() -> None:
    profile = traced(*(LayerSpec(f"fc{i}", linear, parallel="replicated") for i in range(3)))
    alone = profile.measurements[0].layers
    assert [(each.forward_ns, each.backward_ns, each.stash_bytes, each.collectives) for each in costs(profile)] == [
        (each.forward_ns, each.backward_ns, each.stash_bytes, ()) for each in alone
    ]


def test_parts_of_the_sequence_cross_cuts_and_norms_are_summed_in_the_step() -> None:
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    last = LayerSpec("last", nn.Identity, parallel={"": gathered})
    profile = traced(SCATTERED, NORMED, last)
    assert profile.variants is not None
    assert profile.variants[0].boundary == "sharded"
    step = [each for each in costs(profile)[1].collectives if each.phase == "step"]
    assert step == [Collective(phase="step", operation="all_reduce", over="tensor", bytes_per_sample=4 * 2 * WIDTH)]


def test_a_tied_weight_counts_once_on_a_gpu() -> None:
    profile = analytic_profile(load_job("examples.gpt:tied"), "H100", (1,), tensor_degrees=(2,))
    assert profile.variants is not None
    assert profile.classes is not None
    head, config = (
        profile.variants[0].layers[profile.classes[-1]],
        gpt.Config(blocks=4, width=32, heads=2, length=16, vocabulary=64),
    )
    assert head.parameter_bytes == 4 * 2 * config.width, "the norm alone"
    words = 4 * config.vocabulary * config.width // 2
    assert profile.variants[0].layers[0].parameter_bytes == words + 4 * config.length * config.width


class Windows(nn.Module):
    """An operation that torch has no rule to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.part = linear()

    def forward(self, x: Tensor) -> Tensor:
        """Cut the result into windows of two."""
        return self.part(x).unfold(2, 2, 2).flatten(2)


class Looks(nn.Module):
    """A layer that computes otherwise where it sees a part."""

    def forward(self, x: Tensor) -> Tensor:
        """Fail on a part of the positions."""
        return x.view(-1, POSITIONS, WIDTH) if x.shape[0] == 1 else x.unflatten(1, (POSITIONS, 1)).flatten(1, 2)


REFUSED = {
    "says nothing": ([PAIR, LayerSpec("mute", linear), PAIR._replace(name="last")], "layer 'mute' .*its LayerSpec "
    "has no `parallel`"),
    "no such module": (
        [LayerSpec("lost", linear, parallel={"inner": ColwiseParallel()}), PAIR],
        "layer 'lost' .*'inner' could not be resolved",
    ),
    "no such style": (
        [LayerSpec("norm", partial(nn.LayerNorm, WIDTH), parallel={"": ColwiseParallel()}), PAIR],
        "layer 'norm' .*NotImplementedError",
    ),
    "reads a part as if it were whole": ([SCATTERED, PAIR], r"layer 'pair' .*0 takes \(1, 8, 8\) over all GPUs where "),
    "reads the whole as if it were a part": ([PAIR, NORMED], "layer 'normed' .*not what the"),
    "replicated behind a part": (
        [SCATTERED, LayerSpec("whole", linear, parallel="replicated")],
        "layer 'whole' .*it is replicated and needs all of 'x'",
    ),
    "leaves a sum": (
        [
            LayerSpec(
                "sum", lambda: nn.Sequential(linear(), linear()),
                parallel={"0": ColwiseParallel(), "1": SUM},
            ),
            PAIR,
        ],
        "layer 'sum' .*not yet summed over the GPUs",
    ),
    "no rule": (
        [LayerSpec("windows", Windows, parallel={"part": ColwiseParallel(use_local_output=False)}), PAIR],
        "layer 'windows' .*aten.unfold.default does not have a sharding strategy",
    ),
    "fails on a part": ([SCATTERED, LayerSpec("looks", Looks, parallel={}), PAIR], "layer 'looks' "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_by_layer_and_reason(name: str) -> None:
    layers, words = REFUSED[name]
    with pytest.raises(UnsupportedRequest, match=words) as refused:
        traced(*layers)
    assert "tensor 2" in str(refused.value)
    assert "\n" not in refused.value.detail
    assert not dist.is_initialized()


def test_heads_and_sequences_that_the_degree_does_not_divide_are_refused() -> None:
    with pytest.raises(
        UnsupportedRequest, match=r"layer 'block.0' cannot be divided by tensor 4: .*\[-1, 32\].* \(16\)"
    ):
        analytic_profile(load_job("examples.gpt:tiny"), "H100", (1,), tensor_degrees=(4,))
    with pytest.raises(UnsupportedRequest, match="layer 'normed' cannot be divided by tensor 2"):
        traced(SCATTERED, NORMED, positions=15)
    with pytest.raises(InvalidDocument, match=r"\[0\] have to be numbers of at least 1"):
        analytic_profile(load_job("examples.gpt:tiny"), "H100", (1,), tensor_degrees=(0,))


def test_a_process_group_of_the_caller_is_left_alone() -> None:
    dist.init_process_group("fake", rank=0, world_size=3)
    try:
        with pytest.raises(Conflict, match="already has one"):
            traced(PAIR)
        assert dist.get_world_size() == 3
    finally:
        dist.destroy_process_group()


def test_what_torch_runs_to_divide_an_operation_is_not_counted() -> None:
    """The first time torch looks at whole shapes; the second time it remembers."""
    with first_of(Degrees(tensor=2)) as meshes, torch.device("meta"):
        module = divide(PAIR, PAIR.build(), meshes)
        x = torch.empty(1, POSITIONS, WIDTH, requires_grad=True)
        seen = []
        for _ in range(2):
            with LocalRecorder() as recorder:
                module(x).sum().backward()
            module.zero_grad()
            x.grad = None
            seen.append((recorder.operations, recorder.sent))
    assert seen[0] == seen[1]
    assert sum(each.flops for each in seen[0][0]) == 6 * 2 * POSITIONS * WIDTH * WIDTH // 2


@pytest.mark.parametrize("wrong", ["whole", 3, ("0", ColwiseParallel())])
def test_a_division_that_is_none_is_refused_when_the_job_is_read(wrong: Any) -> None:
    with pytest.raises(PenstockError, match=r"parallel is .*; give styles by module"):
        layer_specs(Sequences(LayerSpec("fc", linear, parallel=wrong)))
