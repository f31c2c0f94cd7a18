"""Parts of what a stage computes in: precision, the loss scale, clipping, ties, shares, and who is to blame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import small_jobs
import torch
import torch.distributed as dist
from small_jobs import WIDTH, Block, Regression, blocks
from torch import Tensor, nn

from penstock.executor.run.chain import Chain
from penstock.executor.run.job import LayerSpec
from penstock.executor.stage.gradient_norm import GradientNorm, LossScale, clipping
from penstock.executor.stage.precision import Training
from penstock.executor.stage.reduction import Flat
from penstock.executor.stage.segment import blame
from penstock.executor.stage.sharded_optimizer import shares_of
from penstock.executor.stage.stage_module import MicroBatch, StageModule
from penstock.executor.stage.ties import refuse_untied
from penstock.schemas.errors import InvalidDocument, ModelMismatch


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Precision


@pytest.mark.parametrize("job", ["plain", "residual", "encoder_decoder"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_shapes_at_cuts_have_the_types_that_autocast_makes(job: str, precision: Any) -> None:
    """Found without running the model; compared with a run."""
    chain, training = Chain(getattr(small_jobs, job)), Training(precision)
    shapes = chain.infer_shapes(range(3), training)
    env = chain.batch_inputs(range(3), "cpu")
    for i, spec in enumerate(chain.specs[:-1]):
        with torch.autocast("cpu", dtype=torch.bfloat16 if precision == "bf16" else torch.float16):
            results = chain.call(i, chain.build_layer(i), [env[name] for name in spec.reads])
        env.update(zip(spec.writes, results, strict=True))
        for name, shape in shapes[i].items():
            assert shape == (tuple(env[name].shape[1:]), env[name].dtype, env[name].requires_grad)
    lowered = {shape.dtype for cut in shapes for shape in cut.values()} & {torch.bfloat16, torch.float16}
    assert bool(lowered) == (job == "residual"), "residual streams stay in full precision, results of linear layers not"


def test_a_model_that_looks_at_its_numbers_is_run_in_lower_precision_too() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 if x.sum().item() > 0 else 2)

    chain = Chain(Regression("looks", lambda: [*blocks(1), LayerSpec("looks", Looks), *blocks(2)[1:]]))
    (first, second) = chain.infer_shapes(range(2), Training("bf16"))
    assert first["x"].sample_shape == second["x"].sample_shape == (small_jobs.LENGTH, WIDTH)


@pytest.mark.parametrize("recompute", [(), ((1, 2),)])
def test_a_stage_in_lower_precision_is_autocast(recompute: Any) -> None:
    job = small_jobs.plain
    chain, training = Chain(job), Training("bf16")
    stage = StageModule(
        chain, chain.infer_shapes(range(4), training), 0, 5, seed=1, recompute=recompute, training=training
    )
    stage.count = 7.0
    cell = MicroBatch(0, range(4), stage.seeds(0, 0))
    cell.batch, cell.targets = job.batch(0, range(4))
    loss, _ = stage.loss_of(cell, stage.forward(cell, 0))
    cell.loss = None if stage.recomputes_loss else loss
    stage.backward(cell, 0)
    modules = chain.build_layers(range(6), 1)
    inputs, targets = job.batch(0, range(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = inputs["x"]
        for module in modules.values():
            x = module(x)
        expected, _ = job.loss({"x": x}, targets)
    (expected / 7.0).backward()
    assert torch.equal(loss.detach(), expected.detach())
    for (name, parameter), (_, other) in zip(stage.named_parameters(), chain.named_parameters(modules), strict=True):
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision 'fp8' is unknown; give one of fp32, tf32, bf16, fp16"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan"),
    ],
)
def test_training_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidDocument, match=message):
        Training(**options)


# Loss scale and norm


def test_the_loss_scale_moves_as_torchs() -> None:
    """Torch's own scaler over the same overflows."""
    other = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    scale = LossScale(interval=3)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for overflow in (False, False, True, False, False, False, False, True, True, False, False, False, False):
        other.scale(parameter.sum())
        parameter.grad = torch.tensor([1.0, float("inf") if overflow else 1.0])
        other.step(optimizer)
        other.update()
        scale.update(overflow)
        assert scale.value == other.get_scale()
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert (again.value, again.good_steps) == (scale.value, scale.good_steps)


def parameters_with_gradients(largest: float) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    parameters = []
    for shape in ((3, 4), (5,), (2, 2, 2)):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape, generator=generator) * largest
        parameters.append(parameter)
    return [*parameters, nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize("largest", [1e-3, 1.0, 100.0])
def test_clipping_is_torchs(alone: None, largest: float) -> None:
    parameters, others = parameters_with_gradients(largest), parameters_with_gradients(largest)
    norm = GradientNorm(Training(clip_norm=1.0), parameters, [])
    norm.start()
    norm.wait()
    factor = norm.factor(0.5)
    for parameter in others:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    expected = torch.nn.utils.clip_grad_norm_(others, 1.0)
    assert norm.norm == pytest.approx(expected.item(), rel=1e-6)
    for parameter, other in zip(parameters, others, strict=True):
        if parameter.grad is not None and other.grad is not None:
            torch.testing.assert_close(parameter.grad * factor, other.grad, rtol=1e-6, atol=0)


def test_clipping_lets_numbers_that_are_none_show() -> None:
    assert clipping(0.0, 1.0) == 1.0
    assert clipping(float("inf"), 1.0) == 0.0
    assert clipping(float("nan"), 1.0) != clipping(float("nan"), 1.0)


def test_an_overflow_halves_the_scale_of_the_losses(alone: None) -> None:
    chain = Chain(small_jobs.plain)
    stage = StageModule(chain, chain.infer_shapes(range(2)), 5, 5, seed=1)
    parameters = parameters_with_gradients(1.0)
    norm = GradientNorm(Training("fp16"), parameters, [stage])
    norm.begin(30.0)
    assert stage.count == 30.0 / 65536
    assert parameters[0].grad is not None
    parameters[0].grad[0, 0] = float("inf")
    norm.start()
    norm.wait()
    assert norm.overflow
    assert stage.count == 30.0 / 32768
    parameters[0].grad[0, 0] = 0.0
    norm.start()
    norm.wait()
    assert not norm.overflow
    assert norm.factor(1.0) == 1 / 32768


# Ties


def tied_job(*ties: Sequence[str], layers: Any = None) -> Regression:
    job = Regression("tied", lambda: layers or [LayerSpec("a", Linear), *blocks(2), LayerSpec("z", Linear)])
    job.shared_parameters = ties  # type: ignore[attr-defined]
    return job


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def test_tied_parameters_are_one_and_start_as_the_first() -> None:
    chain = Chain(tied_job(["z.weight", "a.weight"]))
    (tie,) = chain.ties
    assert (tie.name, tie.layers) == ("z.weight", (0, 3))
    assert chain.shared_parameters() == [("z.weight", (0, 3), WIDTH * WIDTH * 4)]
    drawn = chain.build_layer(3).weight
    together = chain.build_layers(range(4))
    assert together[0].weight is together[3].weight
    assert torch.equal(together[0].weight, drawn)
    apart = chain.build_layers(range(2))
    assert torch.equal(apart[0].weight, drawn)
    later = chain.build_layers(range(2, 4), existing=apart)
    assert later[3].weight is apart[0].weight
    names = [name for name, _ in chain.named_parameters(apart)]
    assert names[:2] == ["z.weight", "a.bias"]
    assert [name for name, _ in chain.named_parameters(together)].count("z.weight") == 1


@pytest.mark.parametrize(
    ("ties", "kind", "message"),
    [
        ("a.weight", InvalidDocument, "shared_parameters is 'a.weight'"),
        ([["a.weight"]], InvalidDocument, "at least two names"),
        ([["a.weight", 3]], InvalidDocument, "names have to be strings"),
        ([["a.weight", "q.weight"]], InvalidDocument, "'q.weight', which is in no layer"),
        ([["a.weight", "z.weight"], ["z.weight", "a.bias"]], InvalidDocument, "'z.weight' twice"),
        ([["a.weight", "z.wait"]], ModelMismatch, r"'z.wait', but that layer has the parameters \['weight', 'bias'\]"),
        ([["a.weight", "z.bias"]], ModelMismatch, "as one parameter, but are"),
    ],
)
def test_ties_that_do_not_hold_are_refused(ties: Any, kind: type[Exception], message: str) -> None:
    job = tied_job()
    job.shared_parameters = ties  # type: ignore[attr-defined]
    with pytest.raises(kind, match=message):
        Chain(job).build_layers(range(4))


def test_a_plan_has_to_know_the_ties_that_it_parts() -> None:
    ties = Chain(tied_job(["a.weight", "z.weight"])).ties
    refuse_untied(ties, [(0, 3)], [])
    refuse_untied(ties, [(1, 2)], [])
    refuse_untied(ties, [(0, 1)], [("a.weight", (0, 3))])
    with pytest.raises(ModelMismatch, match="the plan does not tie them"):
        refuse_untied(ties, [(0, 1)], [])
    with pytest.raises(ModelMismatch, match=r"\[0, 2\] share the parameter 'a.weight'"):
        refuse_untied(ties, [(0, 1)], [("a.weight", (0, 2))])
    with pytest.raises(ModelMismatch, match="no layers share it"):
        refuse_untied((), [(0, 1)], [("a.weight", (0, 3))])


# Shares


def test_shares_are_even_by_bytes_and_the_same_everywhere() -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 9, 4, 4, 1, 7)]
    sizes = {id(parameter): parameter.nbytes for parameter in parameters}
    shares = shares_of(parameters, [0, 0], sizes)
    assert [[p.numel() for p in share] for share in shares] == [[9, 4, 1], [7, 4, 3]]
    assert [sum(p.numel() for p in s) for s in shares_of(parameters, [0, 40], sizes)] == [19, 9]


@pytest.mark.parametrize(("last", "padding"), [(4, [0]), (3, [])])
def test_each_share_of_a_flat_buffer_lies_in_its_own_block(last: int, padding: list[int]) -> None:
    """Shares that are nearly even are made so."""
    parameters = [nn.Parameter(torch.full((size,), float(size))) for size in (3, 2, last)]
    flat = Flat([parameters[:2], parameters[2:]], None, 1)
    assert flat.is_even == bool(padding)
    for k, (_, view) in enumerate((*flat.local, *flat.others), 1):
        view.fill_(k)
    assert flat.buffer.tolist() == [2, 2, 2, 3, 3, *[1] * last, *padding]
    assert flat.block.tolist() == [*[1] * last, *padding]
    with torch.no_grad():
        flat.take()
    assert [p.tolist() for p in parameters] == [[2] * 3, [3] * 2, [last] * last]


def test_parts_of_parameters_are_shared_out_by_the_bytes_of_whole_ones() -> None:
    """Ranks that hold longer and shorter parts have to agree on who steps which."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (1, 2)]
    sizes = {id(parameters[0]): 80, id(parameters[1]): 8}
    assert shares_of(parameters, [0, 0], sizes) == [[parameters[0]], [parameters[1]]]
    part_sizes = {id(parameter): parameter.nbytes for parameter in parameters}
    assert shares_of(parameters, [0, 0], part_sizes) == [[parameters[1]], [parameters[0]]]


# Blame


class Deep(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.where == "forward":
            raise ValueError("too deep")
        x.register_hook(self._back)
        return x

    def _back(self, _: Tensor) -> None:
        if self.where == "backward":
            raise ValueError("too far back")


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_the_layer_and_the_users_line_are_found(where: str) -> None:
    job = Regression("deep", lambda: [*blocks(2), LayerSpec("deep", partial(Deep, where))])
    if where == "loss":
        job.loss = lambda outputs, targets: (outputs["y"].sum(), 1)  # type: ignore[method-assign]
    chain = Chain(job)
    shapes = [dict(cut) for cut in Chain(small_jobs.plain).infer_shapes(range(2))]
    stage = StageModule(chain, shapes, 1, 2, seed=1)
    cell = MicroBatch(0, range(2), stage.seeds(0, 0))
    cell.inputs = [torch.ones(2, small_jobs.LENGTH, WIDTH)]
    _, cell.targets = job.batch(0, range(2))

    def train() -> None:
        cell.loss, _ = stage.loss_of(cell, stage.forward(cell, 0))
        stage.backward(cell, 0)

    with pytest.raises((ValueError, KeyError)) as caught:
        train()
    culprit = blame(caught.value, chain.names)
    assert culprit.layer == ("deep" if where == "forward" else None)
    line = {"forward": 'raise ValueError("too deep")', "backward": 'raise ValueError("too far back")', "loss": "y"}
    assert culprit.line is not None
    assert "test_numerics.py:" in culprit.line
    assert line[where] in culprit.line
