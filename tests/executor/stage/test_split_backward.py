"""A backward in two halves gives the gradients of a whole one, and keeps no more between them than W needs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import small_jobs
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.examples import gpt
from penstock.executor.run.chain import Chain
from penstock.executor.stage.split_backward import Recorded, SplitBackward
from penstock.executor.stage.stage_module import MicroBatch, StageModule

Run = Callable[..., Tensor]


def one_after_the_other(modules: Sequence[nn.Module]) -> Run:
    def run(x: Tensor) -> Tensor:
        for module in modules:
            x = module(x)
        return x

    return run


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]


def recorded_run(split: SplitBackward, run: Run, inputs: Sequence[Tensor]) -> tuple[Recorded, Tensor]:
    torch.manual_seed(1)
    recorded = split.record()
    with recorded:
        result = run(*inputs)
    return recorded, result


def halves_equal_the_whole(modules: Sequence[nn.Module], run: Run, inputs: Sequence[Tensor], times: int = 2) -> None:
    """Check equality bit by bit, also when it happens again, and that I alone adds no parameter's gradient."""
    parameters = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values()
    split = SplitBackward(modules)
    for _ in range(times):
        starts = leaves(inputs)
        torch.manual_seed(1)
        result = run(*starts)
        torch.autograd.backward(result, torch.ones_like(result))
        expected = [p.grad for p in parameters] + [one.grad for one in starts]
        for parameter in parameters:
            parameter.grad = None
        starts = leaves(inputs)
        recorded, result = recorded_run(split, run, starts)
        computed = recorded.backward_input([result], [torch.ones_like(result)], starts)
        del result
        assert all(p.grad is None for p in parameters)
        recorded.backward_weight()
        for one, other in zip(expected, [*(p.grad for p in parameters), *computed], strict=True):
            assert one is other is None or (one is not None and other is not None and torch.equal(one, other))
        for parameter in parameters:
            parameter.grad = None


CONFIG = gpt.Config(blocks=2, width=16, heads=2, length=6, vocabulary=16, dropout=0.2)

MODELS: list[Any] = [
    pytest.param(lambda: [gpt.Block(CONFIG) for _ in range(2)], [drawn(3, 6, 16)], id="transformer"),
    pytest.param(
        lambda: [
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 4, 3),
            nn.GroupNorm(2, 4),
            nn.MaxPool2d(2),
        ],
        [drawn(2, 3, 8, 8)],
        id="convolution",
    ),
    pytest.param(lambda: [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)], [drawn(3, 5, 16)], id="encoder"),
    pytest.param(
        lambda: [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8).requires_grad_(False)], [drawn(3, 8)], id="frozen"
    ),
    pytest.param(lambda: [nn.Tanh(), nn.Dropout(0.5)], [drawn(3, 8)], id="no-parameters"),
    pytest.param(
        lambda: [nn.Embedding(9, 8), nn.LayerNorm(8)], [torch.tensor([[1, 2, 8], [1, 0, 3]])], id="no-gradient-goes-in"
    ),
]


@pytest.mark.parametrize(("build", "inputs"), MODELS)
def test_halves_equal_the_whole(build: Callable[[], list[nn.Module]], inputs: list[Tensor]) -> None:
    modules = build()
    halves_equal_the_whole(modules, one_after_the_other(modules), inputs)


def test_recurrent_layers_that_return_more_than_a_tensor() -> None:
    lstm = nn.LSTM(8, 8, 2, batch_first=True)
    halves_equal_the_whole([lstm], lambda x: lstm(x)[0] + lstm(x)[1][0][-1][:, None, :], [drawn(2, 4, 8)])
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    halves_equal_the_whole([attention], lambda x: attention(x, x, x)[0], [drawn(2, 4, 8)])


def test_weights_that_are_used_in_several_places() -> None:
    """Tied, called twice, read from outside: PyTorch issue 180952 counts some of these twice."""
    embedding, linear = nn.Embedding(9, 8), nn.Linear(8, 8)
    ids = torch.tensor([[1, 2, 8], [1, 0, 3]])
    halves_equal_the_whole(
        [embedding, linear], lambda i: functional.linear(linear(embedding(i)), embedding.weight), [ids]
    )
    halves_equal_the_whole([linear], lambda x: linear(torch.tanh(linear(x))) + linear.bias, [drawn(3, 8)])
    halves_equal_the_whole([linear], lambda x: linear(x * linear.bias) + x * linear.bias, [drawn(3, 8)])
    halves_equal_the_whole([linear], lambda x: torch.relu_(linear(x)) + x, [drawn(3, 8)])
    halves_equal_the_whole([linear], lambda x: x, [drawn(3, 8)])


class Checkpointed(nn.Module):
    """Two layers that torch runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._run, torch.tanh(x), use_reentrant=False)
        return result

    def _run(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(functional.dropout(torch.tanh(self.first(torch.tanh(x))), 0.5))
        return result


def test_layers_that_are_checkpointed_by_torch() -> None:
    modules = [Checkpointed(), nn.Linear(8, 8)]
    halves_equal_the_whole(modules, one_after_the_other(modules), [drawn(3, 8)])


def test_a_forward_that_takes_another_course_is_looked_at_again() -> None:
    linear = nn.Linear(8, 8)
    calls = iter(range(100))

    def run(x: Tensor) -> Tensor:
        y: Tensor = linear(x)
        return torch.tanh(y * linear.bias) if next(calls) // 2 % 2 else y

    halves_equal_the_whole([linear], run, [drawn(3, 8)], times=4)


class Noted(torch.autograd.Function):
    """The identity, which keeps a copy for its backward and tells of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[weakref.ref[Tensor]]) -> Tensor:
        kept = x.clone()
        notes.append(weakref.ref(kept.untyped_storage()))  # type: ignore[arg-type]
        ctx.save_for_backward(kept)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return gradients[0] + 0.0 * kept, None


def test_only_what_the_weights_need_is_kept_between_the_halves() -> None:
    outside: list[Any] = []
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    split = SplitBackward([first, second])
    inputs_of_units: list[Any] = []
    for unit in (first, second):
        unit.register_forward_pre_hook(lambda _, x: inputs_of_units.append(weakref.ref(x[0].untyped_storage())))

    def run(x: Tensor) -> Tensor:
        result: Tensor = second(torch.tanh(Noted.apply(first(torch.tanh(Noted.apply(x, outside))), outside)))
        return result

    starts = leaves([drawn(3, 8)])
    recorded, result = recorded_run(split, run, starts)
    assert all(one() is not None for one in (*outside, *inputs_of_units))
    recorded.backward_input([result], [torch.ones_like(result)], starts)
    del result
    assert [one() for one in outside] == [None, None]
    assert all(one() is not None for one in inputs_of_units)
    recorded.backward_weight()
    assert [one() for one in inputs_of_units] == [None, None]


@pytest.mark.parametrize("whole", [False, True])
def test_nothing_waits_for_the_garbage_collector(whole: bool) -> None:
    """Graph, hooks and records hold each other in no circle, also where the weight half never comes."""
    notes: list[Any] = []
    module = nn.Linear(8, 8)
    module.register_forward_pre_hook(lambda _, x: notes.append(weakref.ref(x[0].untyped_storage())))
    split = SplitBackward([module])
    gc.disable()
    try:
        starts = leaves([drawn(3, 8)])
        recorded, result = recorded_run(split, lambda x: Noted.apply(module(Noted.apply(x, notes)), notes), starts)
        if whole:
            result.sum().backward()
        else:
            recorded.backward_input([result], [torch.ones_like(result)], starts)
        del result, recorded
        assert {one() for one in notes} == {None}
    finally:
        gc.enable()


def test_hooks_of_parameters_fire_once_and_in_the_weight_half() -> None:
    module = gpt.Block(CONFIG)
    fired: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    split = SplitBackward([module])
    starts = leaves([drawn(3, 6, 16)])
    recorded, result = recorded_run(split, module, starts)
    recorded.backward_input([result], [torch.ones_like(result)], starts)
    assert fired == []
    recorded.backward_weight()
    assert sorted(fired) == sorted(name for name, _ in module.named_parameters())
    assert [fired[0].split(".")[0], fired[-1].split(".")[0]] == ["feed_forward", "norm_attention"]


def test_a_tensor_changed_in_place_is_noticed() -> None:
    linear = nn.Linear(8, 8)
    starts = leaves([drawn(3, 8)])

    def run(x: Tensor) -> Tensor:
        y = torch.tanh(linear(x))
        z = y * y
        y.detach().add_(1.0)
        return z

    recorded, result = recorded_run(SplitBackward([linear]), run, starts)
    with pytest.raises(RuntimeError, match="changed in place"):
        recorded.backward_input([result], [torch.ones_like(result)], starts)


# The same through a stage: segments, tensors passed on, batches, recomputation.


def gradients_of(job: str, first: int, last: int, recompute: Any, split: bool) -> list[Tensor | None]:
    chain = Chain(getattr(small_jobs, job))
    shapes = chain.infer_shapes(range(4))
    stage = StageModule(chain, shapes, first, last, seed=1, recompute=recompute, split=split)
    rows = range(2, 6)
    cell = MicroBatch(0, rows, stage.seeds(0, 0))
    cell.batch, cell.targets = chain.job.batch(3, rows)
    generator = torch.Generator().manual_seed(3)
    if first:
        cell.inputs = [
            (torch.randn(4, *one.sample_shape, generator=generator) * 3).to(one.dtype)
            for one in shapes[first - 1].values()
        ]
    results = stage.forward(cell, 11)
    if stage.is_last:
        loss, _ = stage.loss_of(cell, results)
        if not stage.recomputes_loss:
            cell.loss = loss
    else:
        cell.gradients = [
            torch.randn(one.shape, generator=generator) if needs else None
            for one, needs in zip(results, stage.needs_grad[-1], strict=True)
        ]
    del results
    if split:
        if recompute:
            stage.recompute(cell, 11)
        stage.backward_input(cell, 11)
        stage.backward_weight(cell)
        assert cell.saved is cell.pending is None
    else:
        stage.backward(cell, 11)
    return [p.grad for _, p in stage.named_parameters()] + list(cell.input_gradients or ())


@pytest.mark.parametrize(
    ("job", "first", "last", "recompute"),
    [
        ("plain", 1, 4, ()),
        ("dropout", 0, 5, ()),
        ("dropout", 1, 5, ((1, 2), (5, 5))),
        ("residual", 1, 4, ()),
        ("residual", 4, 7, ((5, 6),)),
        ("residual", 3, 4, ()),
        ("encoder_decoder", 2, 4, ()),
        ("encoder_decoder", 3, 5, ((3, 5),)),
        ("frozen_front", 0, 1, ()),
        ("frozen_front", 1, 4, ()),
        ("normalised", 0, 2, ((1, 1),)),
    ],
)
def test_a_stage_in_halves_is_the_whole_stage(job: str, first: int, last: int, recompute: Any) -> None:
    whole = gradients_of(job, first, last, recompute, split=False)
    halves = gradients_of(job, first, last, recompute, split=True)
    assert len(whole) == len(halves)
    for one, other in zip(whole, halves, strict=True):
        assert one is other is None or (one is not None and other is not None)
        if one is not None and other is not None:
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)
